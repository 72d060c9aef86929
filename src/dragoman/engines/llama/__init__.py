"""Models in GGUF files, run by llama.cpp.

engine      what the server sees: checks, one async generator per request
options     what a configuration may say about a model
doubts      what of that is hardly meant
intake      from a request to a generation; reading its prompt is the same for every engine of tokens (`reading`)
generation  one request's way from logits to events
embedder    texts made into vectors, in a thread and a decoder of their own
turns       who computes next, and the thread in which all do
pace        how many rows a step has
drafts      how a reply may go on, and whether trying that pays: pure
runner      the thread that owns the decoder: takes jobs, runs plans, hands out events
scheduler   which rows the next decode has: pure, without model, thread or clock of its own
sequences   which sequence of the memory holds what, and which one a job gets: pure
pins        which texts are to be kept for a while: pure
radix       who holds which beginning of a text: pure
room        how many texts there is room for
state       how much memory a token of a text takes
sampling    from logits to a token, and log probabilities
adapters    LoRA adapters and their files
threads     how many threads compute
binding     a model, its decoder, its samplers
library     the C functions
machine     CPUs, memory, processor, as a container may limit them

layout      which file is loaded: the original, or one with weights that are faster here
trial       the process that makes the other file and tries it
requantise  the other file
speed       how fast both are
quality     how close it stays
findings    what a trial tells
"""
