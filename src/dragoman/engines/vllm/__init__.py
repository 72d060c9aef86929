"""Models in folders as Hugging Face lays them out, run by vLLM: its engine, not its server.

engine     what the server sees: the start of vLLM, requests on their way in, steps on their way out
options    what a configuration may say about such a model, and what vLLM is told of it
mistakes   what can be seen to be wrong without vLLM
loras      folders of adapters
parts      everything that is used of vLLM, in one place
overheard  why vLLM's processes did not start: what they print
wording    vLLM's errors in one line
tokens     the tokenizer as a table of bytes, and the ways around where it is none
cuts       tokens of long pieces that come with every request, which are made once
intake     from a request to what vLLM's engine takes: its prompt in tokens, its sampling, its grammar
work       one request's way from the tokens of a step to events
vectors    texts on their way to vectors

vLLM's scheduler and model run in processes of their own, which vLLM starts. From there one message comes per step, with
the new tokens of all requests; it becomes one call of the receiver (`steps`), and no task is woken for a token.
"""
