"""Runs models in GGUF files with llama.cpp.

engine           the `LlamaEngine`: loads a model and serves requests
options          the configuration of a model
request_builder  turns a request into a generation
generation       turns the logits of one request into events
embedder         the thread that creates embeddings
compute_thread   the thread in which all computation runs
pace             chooses the number of prompt rows in a step
speculation      drafts likely tokens and decides how many to verify
runner           the thread that owns the decoder: accepts jobs, runs plans, delivers events
scheduler        decides which rows the next decode has; no I/O, threads or clock
sequences        assigns the decoder's sequences to jobs; no I/O
prefix_tree      finds the longest shared prefix; no I/O
memory_fit       chooses the number and size of the sequences
sampling         picks tokens and computes log probabilities
adapters         LoRA adapters
binding          typed classes over the C library
library          the C library
hardware         CPUs, memory and processor

tuning           finds the fastest layout and number of threads, for `dragoman tune`
"""
