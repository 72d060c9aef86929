"""A stand-in for vLLM: the few names that `dragoman.engines.vllm.vllm_api` lists, over a model that needs no weights.

values.py     what goes to the engine process and comes back, and what is refused
tokenizer.py  bytes, and two control tokens
core.py       the engine process: all requests in steps, one message per step
client.py     its client in the process of whoever asks
the others    the places where vLLM has these names
"""

__version__ = "0.0.stand-in"
