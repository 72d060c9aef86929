"""Runs models in GGUF files with llama.cpp.

engine           the `LlamaEngine`: loads a model and serves requests
options          the configuration of a model, what is wrong with it, and the sizes that it leaves open
compute_thread   the thread in which all computation runs, and the pace of its steps
generation       turns a request into a generation, and the logits of a generation into events
runner           runs the steps of a decoder: plans, decodes, samples, delivers events
scheduler        decides which rows the next decode has; no I/O, threads or clock
prefill_shares   divides prompt rows between principals; no I/O
sequences        assigns the decoder's sequences to jobs; no I/O
prefix_tree      finds the longest shared prefix; no I/O
speculation      drafts likely tokens and decides how many to verify
sampling         picks tokens and computes log probabilities
embedder         creates embeddings
binding          typed classes over the C library
library          the C library
hardware         CPUs, memory and processor
tuning           finds the fastest layout and number of threads, for `dragoman tune`
tuning_record    what was chosen for a model file; read when the model is loaded
"""
