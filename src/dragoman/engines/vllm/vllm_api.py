"""The parts of vLLM that are used. Check a new release against this list and against the fake vLLM of the tests.

    AsyncEngineArgs(**args)                     dataclass of the engine arguments; raises for invalid ones, e.g. a
                                                pydantic error
    AsyncLLM.from_engine_args(args, ...)        loads the model: blocks, and raises on failure; `shutdown()` ends it
      usage_context=OPENAI_API_SERVER           selects vLLM's defaults; without it a step takes 2,048 prompt tokens,
                                                while `vllm serve` takes 8,192 on the same GPU
      .model_config                             max_model_len, runner_type, get_vocab_size(), generation defaults
      .tokenizer                                a Hugging Face tokenizer; a fast one has `backend_tokenizer`
      .input_processor.process_inputs(...)      validates prompt and parameters and returns an EngineCoreRequest
      .engine_core                              the client of vLLM's engine process:
         get_output_async() -> outputs          the outputs of one step; raises EngineDeadError if the process died
         add_request_async, abort_requests_async, add_lora_async, get_supported_tasks_async
         resources.engine_dead                  set by a thread that watches the process
    outputs.outputs, outputs.scheduler_stats    outputs per request; KV cache usage, if reported
    output                                      request_id, new_token_ids, new_logprobs, new_prompt_logprobs_tensors,
                                                pooling_output, finish_reason, prefill_stats.num_cached_tokens
    SamplingParams, PoolingParams, StructuredOutputsParams, LoRARequest, tokens_input

vLLM is usually not installed during development, so its types cannot be checked. Its objects are Any, except for the
protocol below.
"""

import dataclasses
import importlib
import importlib.util
import os
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, Protocol

import msgspec

from dragoman.core.errors import ConfigError

NOT_INSTALLED = "vllm is not installed: pip install 'dragoman[vllm]'"
STOP, LENGTH, ABORT, ERROR, REPETITION = range(5)
"""vLLM's finish reasons."""

ENVIRONMENT = {
    # A forked process would keep the pipe to the server open after the worker has died.
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    # No telemetry.
    "VLLM_NO_USAGE_STATS": "1",
}
"""Defaults of environment variables."""


class StepOutput(Protocol):
    """The output of a step for one request."""

    request_id: str
    new_token_ids: Sequence[int]
    new_logprobs: Any
    new_prompt_logprobs_tensors: Any
    pooling_output: Any
    finish_reason: int | None
    prefill_stats: Any


class VllmApi(msgspec.Struct, frozen=True):
    version: str
    engine_args: Callable[..., Any]
    arg_names: frozenset[str]
    load: Callable[[Any], Any]
    sampling: Callable[..., Any]
    pooling: Callable[..., Any]
    structured_outputs: Callable[..., Any]
    lora: Callable[..., Any]
    tokens_input: Callable[..., Any]
    device: str
    request_errors: tuple[type[Exception], ...]
    """Exceptions that vLLM raises for an invalid request."""


@cache
def is_installed() -> bool:
    return importlib.util.find_spec("vllm") is not None


def import_vllm() -> VllmApi:
    """Import vLLM, which takes seconds."""
    if not is_installed():
        raise ConfigError(NOT_INSTALLED)
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    load = importlib.import_module
    try:
        sampling = load("vllm.sampling_params")
        engine_args = load("vllm.engine.arg_utils").AsyncEngineArgs
        return VllmApi(
            version=str(load("vllm").__version__),
            engine_args=engine_args,
            arg_names=frozenset(field.name for field in dataclasses.fields(engine_args)),
            load=partial(
                load("vllm.v1.engine.async_llm").AsyncLLM.from_engine_args,
                usage_context=load("vllm.usage.usage_lib").UsageContext.OPENAI_API_SERVER,
            ),
            sampling=sampling.SamplingParams,
            pooling=load("vllm.pooling_params").PoolingParams,
            structured_outputs=sampling.StructuredOutputsParams,
            lora=load("vllm.lora.request").LoRARequest,
            tokens_input=load("vllm.inputs").tokens_input,
            device=str(load("vllm.platforms").current_platform.device_type),
            request_errors=(ValueError, load("vllm.exceptions").VLLMClientError),
        )
    except (ImportError, AttributeError) as error:
        message = f"this release of vllm is not supported ({error}); install one that is: pip install 'dragoman[vllm]'"
        raise ConfigError(message) from error


def end_tokens(config: Any) -> frozenset[int]:
    """The EOS tokens of the model's generation config."""
    tokens = (config.try_get_generation_config() or {}).get("eos_token_id")
    if tokens is None:
        return frozenset()
    return frozenset([tokens] if isinstance(tokens, int) else tokens)
