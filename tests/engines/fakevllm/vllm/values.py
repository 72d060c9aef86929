"""The values of vLLM that are used, with its field names."""

from enum import IntEnum, StrEnum
from typing import Any

import msgspec

VOCABULARY = 258
MAX_LOGPROBS = 20


class VLLMClientError(Exception):
    pass


class VLLMValidationError(VLLMClientError):
    def __init__(self, message: str, *, parameter: str | None = None) -> None:
        super().__init__(message)
        self.parameter = parameter


class EngineDeadError(Exception):
    pass


class ValidationError(ValueError):
    """Has the interface of pydantic's ValidationError."""

    title = "SchedulerConfig"

    def __init__(self, *entries: tuple[tuple[str, ...], str, object]) -> None:
        super().__init__(f"{len(entries)} validation errors\nFor further information visit https://errors.example")
        self.entries = entries

    def errors(self) -> list[dict[str, Any]]:
        return [{"loc": loc, "msg": msg, "input": given} for loc, msg, given in self.entries]


class UsageContext(StrEnum):
    OPENAI_API_SERVER = "OPENAI_API_SERVER"
    ENGINE_CONTEXT = "ENGINE_CONTEXT"


class FinishReason(IntEnum):
    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3


class StructuredOutputsParams(msgspec.Struct):
    grammar: str | None = None
    _backend: str | None = None


class SamplingParams(msgspec.Struct):
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    logit_bias: dict[int, float] | None = None
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    max_tokens: int = 16
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_clone: bool = False
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.temperature <= 2:
            raise VLLMValidationError(
                f"temperature must be in [0, 2], got {self.temperature}.", parameter="temperature"
            )
        if not 0 < self.top_p <= 1:
            raise VLLMValidationError(f"top_p must be in (0, 1], got {self.top_p}.", parameter="top_p")
        if self.max_tokens < 1:
            raise VLLMValidationError("max_tokens must be at least 1", parameter="max_tokens")

    def verify(self) -> None:
        if (self.logprobs or 0) > MAX_LOGPROBS:
            raise VLLMValidationError(f"Requested sample logprobs of {self.logprobs}", parameter="logprobs")


class PoolingParams(msgspec.Struct):
    task: str | None = None


class LoRARequest(msgspec.Struct):
    lora_name: str
    lora_int_id: int
    lora_path: str = ""


class EngineCoreRequest(msgspec.Struct):
    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams | None = None
    pooling_params: PoolingParams | None = None
    lora_request: LoRARequest | None = None
    cache_salt: str | None = None
    priority: int = 0


class Abort(msgspec.Struct, tag=True):
    request_ids: list[str]


class Add(msgspec.Struct, tag=True):
    request: EngineCoreRequest


class PrefillStats(msgspec.Struct):
    num_cached_tokens: int = 0


class SchedulerStats(msgspec.Struct):
    kv_cache_usage: float = 0.0


class Numbers(list[Any]):
    """Has the methods of an array or tensor."""

    def tolist(self) -> list[Any]:
        return list(self)

    def flatten(self) -> "Numbers":
        return self


class EngineCoreOutput(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    request_id: str
    new_token_ids: list[int]
    new_logprobs: Any = None
    new_prompt_logprobs_tensors: Any = None
    pooling_output: Any = None
    finish_reason: FinishReason | None = None
    prefill_stats: PrefillStats | None = None

    def __post_init__(self) -> None:
        if self.new_logprobs is not None:
            self.new_logprobs = tuple([Numbers(row) for row in rows] for rows in self.new_logprobs)
        if self.new_prompt_logprobs_tensors is not None:
            self.new_prompt_logprobs_tensors = tuple(map(Numbers, self.new_prompt_logprobs_tensors))
        if self.pooling_output is not None:
            self.pooling_output = Numbers(self.pooling_output)


class EngineCoreOutputs(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    outputs: list[EngineCoreOutput] = []
    scheduler_stats: SchedulerStats | None = None


def tokens_input(prompt_token_ids: list[int], *, cache_salt: str | None = None) -> dict[str, Any]:
    return {"type": "token", "prompt_token_ids": prompt_token_ids, "cache_salt": cache_salt}
