"""A fake vLLM: the names listed in `dragoman.engines.vllm.vllm_api`, with a model that needs no weights.

values.py     messages to and from the engine process, and their validation
tokenizer.py  a tokenizer of bytes and two control tokens
core.py       the engine process: processes all requests in steps and sends one message per step
client.py     the client of the engine process
the others    re-export these names from the modules where vLLM has them
"""

__version__ = "0.0.fake"
