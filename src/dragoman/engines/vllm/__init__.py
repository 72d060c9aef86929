"""Models in Hugging Face's directory layout, run by vLLM's engine (not by its server).

engine           starts vLLM, submits requests and processes steps
options          configuration, and vLLM's engine arguments
config_errors    configuration errors
adapters         directories of LoRA adapters
vllm_api         the parts of vLLM that are used
captured_stderr  finds the cause of a failed start in the output of vLLM's processes
vocabulary       the tokenizer as a table of bytes
token_cache      cached tokens of long text pieces that recur in prompts
request_builder  builds vLLM requests: prompt, sampling, grammar
generation       turns the tokens of one request into events
embedder         embedding requests

vLLM's scheduler and model run in processes that vLLM starts. They send one message per step, with the new tokens of all
requests. The engine passes them to its receiver in one call (`step_delivery`), without waking a task per token.
"""
