"""Everything that is used of vLLM. A new release is checked here, and against the stand-in of the tests.

    AsyncEngineArgs(**args)                     what an operator may set, a dataclass; wrong ones raise, pydantic's
                                                errors among others
    AsyncLLM.from_engine_args(args, ...)        loads: blocks, and raises where that fails; `shutdown()` ends it
      usage_context=OPENAI_API_SERVER           what vLLM's defaults go by; without it a step takes 2,048 tokens of
                                                prompts, where `vllm serve` takes 8,192 on the same GPU
      .model_config                             max_model_len, runner_type, get_vocab_size(), generation defaults
      .tokenizer                                Hugging Face's, with its `backend_tokenizer` where it is a fast one
      .input_processor.process_inputs(...)      checks prompt and parameters, and makes an EngineCoreRequest of them
      .engine_core                              the client of vLLM's engine process:
         get_output_async() -> outputs          of one whole step; raises EngineDeadError when the process has died
         add_request_async, abort_requests_async, add_lora_async, get_supported_tasks_async
         resources.engine_dead                  set by a thread that watches the process
    outputs.outputs, outputs.scheduler_stats    what the requests of a step got; how full the memory is, if it tells
    output                                      request_id, new_token_ids, new_logprobs, new_prompt_logprobs_tensors,
                                                pooling_output, finish_reason, prefill_stats.num_cached_tokens
    SamplingParams, PoolingParams, StructuredOutputsParams, LoRARequest, tokens_input

vLLM brings no types that could be checked here without it, and it is not installed where most of this is developed: its
objects are Any, and the few that cross modules have protocols.
"""

import dataclasses
import importlib
import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any, Protocol

import msgspec

from dragoman.core.errors import ConfigError

NOT_INSTALLED = "vllm is not installed: pip install 'dragoman[vllm]'"
STOP, LENGTH, ABORT, ERROR, REPETITION = range(5)
"""vLLM's reasons to end."""

ENVIRONMENT = {
    # A process that is forked off would hold the pipe to the server open after this one has died.
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    # Nobody is called but those whom the operator names.
    "VLLM_NO_USAGE_STATS": "1",
}
"""What holds unless the operator's environment says otherwise."""


class Output(Protocol):
    """What one request got in a step."""

    request_id: str
    new_token_ids: Sequence[int]
    new_logprobs: Any
    new_prompt_logprobs_tensors: Any
    pooling_output: Any
    finish_reason: int | None
    prefill_stats: Any


class Outputs(Protocol):
    outputs: Sequence[Output]
    scheduler_stats: Any


class Core(Protocol):
    """The client of vLLM's engine process."""

    resources: Any

    async def get_output_async(self) -> Outputs: ...

    async def add_request_async(self, request: Any) -> None: ...

    async def abort_requests_async(self, request_ids: list[str]) -> None: ...

    async def add_lora_async(self, lora_request: Any) -> bool: ...

    async def get_supported_tasks_async(self) -> Sequence[str]: ...


class Llm(Protocol):
    model_config: Any
    tokenizer: Any
    input_processor: Any
    engine_core: Core
    output_handler: Any

    def shutdown(self) -> None: ...


class Parts(msgspec.Struct, frozen=True):
    version: str
    engine_args: Callable[..., Any]
    arguments: frozenset[str]
    """Their names."""
    load: Callable[[Any], Llm]
    sampling: Callable[..., Any]
    pooling: Callable[..., Any]
    shape: Callable[..., Any]
    lora: Callable[..., Any]
    tokens_input: Callable[..., Any]
    device: str
    refusals: tuple[type[Exception], ...]
    """What it raises where a request is wrong."""


@cache
def is_installed() -> bool:
    return importlib.util.find_spec("vllm") is not None


def parts() -> Parts:
    """Imports vLLM, which takes seconds."""
    if not is_installed():
        raise ConfigError(NOT_INSTALLED)
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        return _found()
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"this release of vllm cannot be used ({error}); those that can: pip install 'dragoman[vllm]'"
        ) from error


def _found() -> Parts:
    load = importlib.import_module
    sampling = load("vllm.sampling_params")
    engine_args = load("vllm.engine.arg_utils").AsyncEngineArgs
    return Parts(
        version=str(load("vllm").__version__),
        engine_args=engine_args,
        arguments=frozenset(field.name for field in dataclasses.fields(engine_args)),
        load=partial(
            load("vllm.v1.engine.async_llm").AsyncLLM.from_engine_args,
            usage_context=load("vllm.usage.usage_lib").UsageContext.OPENAI_API_SERVER,
        ),
        sampling=sampling.SamplingParams,
        pooling=load("vllm.pooling_params").PoolingParams,
        shape=sampling.StructuredOutputsParams,
        lora=load("vllm.lora.request").LoRARequest,
        tokens_input=load("vllm.inputs").tokens_input,
        device=str(load("vllm.platforms").current_platform.device_type),
        refusals=(ValueError, load("vllm.exceptions").VLLMClientError),
    )


def generation_defaults(config: Any) -> Mapping[str, Any]:
    """What the model's makers recommend for sampling, as vLLM reads it from the folder."""
    found: Mapping[str, Any] = config.get_diff_sampling_param() or {}
    return found


def end_tokens(config: Any) -> frozenset[int]:
    """Those that the folder's generation settings name, beside the tokenizer's own."""
    named = (config.try_get_generation_config() or {}).get("eos_token_id")
    if named is None:
        return frozenset()
    return frozenset([named] if isinstance(named, int) else named)
