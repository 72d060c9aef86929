"""Models in Hugging Face's directory layout, run by vLLM's engine (not by its server).

engine           starts vLLM and implements the calls of an engine
loaded_model     submits requests to vLLM and processes its steps
options          configuration, vLLM's engine arguments, LoRA adapters, configuration errors
vllm_api         the parts of vLLM that are used
vocabulary       the tokenizer as a table of bytes
token_cache      cached tokens of long text pieces that recur in prompts
request_builder  builds vLLM requests: prompt, sampling, grammar
generation       turns the outputs of one request into events or an embedding

vLLM's scheduler and model run in processes that vLLM starts. They send one message per step, with the new tokens of all
requests. Their events are passed on within that step, without waking a task per token (see `core.delivery`).
"""
