"""Adapts a request to the fields that a protocol and a server support.

A server may reject a field, for example:

    400 "Unsupported parameter: 'temperature' …"     OpenAI            422 [{"loc": ["body", "seed"], …}]     FastAPI
    400 "… does not support tools"                   Ollama            500 "tools param requires --jinja"     llama.cpp

Rules
1. An optional field is omitted from then on and reported as ignored, under the name the client used.
2. Stop strings are omitted without a report, because the pipeline applies them itself.
3. A request that needs a rejected essential field fails with 501.
"""

import re
from collections.abc import Callable, Collection, Iterable

import msgspec

from dragoman.client.call import ClientProtocol
from dragoman.core.errors import ContextTooLong, DragomanError, InvalidSchema, NotSupported, UnsupportedParameter
from dragoman.core.request import GenerationRequest, Sampling, Thinking
from dragoman.protocols.client import request_fields

FEATURE_BY_FIELD = {
    **{name: name for name in ("temperature", "top_p", "top_k", "min_p", "seed", "repetition_penalty")},
    **{name: name for name in ("presence_penalty", "frequency_penalty", "logit_bias", "stop_token_ids", "ignore_eos")},
    **dict.fromkeys(("logprobs", "top_logprobs"), "logprobs"),
    **dict.fromkeys(("stop", "stop_sequences"), "stop"),
    **dict.fromkeys(("reasoning_effort", "reasoning", "thinking", "chat_template_kwargs", "include"), "thinking"),
    "thinking_token_budget": "thinking_budget",
    "documents": "documents",
    "cache_control": "cache_control",
    **{name: name for name in ("user", "metadata", "prompt_cache_key", "safety_identifier", "service_tier")},
    "parallel_tool_calls": "parallel",
    "strict": "strict_tools",
    "stream_options": "stream_options",
    "tools": "tools",
    "tool_choice": "tools",
    "image_url": "images",
    "images": "images",
    **dict.fromkeys(("response_format", "structured_outputs", "text", "output_config"), "constraint"),
}
"""The feature behind each request field of all protocols."""
ESSENTIAL_FEATURES = frozenset({"tools", "images", "constraint"})
REJECTION_PATTERN = re.compile(
    r"not (currently )?support|unsupported|not permitted|unrecognized|unknown (field|parameter|argument|name)"
    r"|extra_forbidden|not allowed|requires --|not enabled|not available",
    re.IGNORECASE,
)
REJECTION_STATUSES = (400, 422, 500, 501)
PARENT_FIELDS = {"cache_control": "messages", "strict": "tools", "image_url": "messages", "images": "messages"}
"""The top-level field that contains a nested field."""
COMMON_WORDS = frozenset({"text", "include", "user"})
"""Field names that are too common in prose to identify a field in an error message."""
CONSTRAINTS = frozenset({"json_object", "json_schema", "regex", "grammar", "one_of"})
UNREPORTED = frozenset({"stop", "stream_options", "parallel"})


class AdaptedRequest(msgspec.Struct, frozen=True):
    request: GenerationRequest
    ignored: tuple[str, ...] = ()


def find_rejected_feature(error: DragomanError, sent_fields: Iterable[str]) -> str | None:
    """The feature of the request that the server rejected; None for any other error."""
    answered = error.answered
    if answered is None or answered.status not in REJECTION_STATUSES:
        return None
    if isinstance(error, ContextTooLong | InvalidSchema):
        return None
    if not isinstance(error, UnsupportedParameter) and not REJECTION_PATTERN.search(error.message):
        return None
    sent = set(sent_fields)
    candidates = [field for field in FEATURE_BY_FIELD if PARENT_FIELDS.get(field, field) in sent]
    param = re.split(r"[.\[]", error.param or "")[0]
    if param in candidates:
        return FEATURE_BY_FIELD[param]
    named = [field for field in candidates if field not in COMMON_WORDS and re.search(rf"\b{field}\b", error.message)]
    return FEATURE_BY_FIELD[max(named, key=len)] if named else None


def adapt_request(request: GenerationRequest, protocol: ClientProtocol, rejected: Collection[str]) -> AdaptedRequest:
    """Remove unsupported features from the request; raise `NotSupported` if an essential one is among them."""
    missing = [name for name in request_fields.used_fields(request) if name not in protocol.supported_fields]
    _check_essential(request, missing, rejected)
    omitted = [*missing, *(name for name in rejected if name not in ESSENTIAL_FEATURES)]
    features = {"thinking" if name == "thinking_budget" else name for name in omitted if name not in UNREPORTED}
    params = [asked.param for asked in request.asked if asked.feature in features]
    labels = [name for name in omitted if name in request.labels or (name == "cache_control" and request.keep_at)]
    for name in omitted:
        request = _remove(request, name)
    return AdaptedRequest(request, tuple(dict.fromkeys([*params, *labels])))


def _check_essential(request: GenerationRequest, missing: Collection[str], rejected: Collection[str]) -> None:
    features = {asked.feature for asked in request.asked}
    for name in missing:
        if name in CONSTRAINTS:
            raise unsupported(request, "constraint")
        if name in ("prompts", "suffix"):
            raise unsupported(request, "infill" if name == "suffix" else "completion")
    for name in rejected:
        if name in ESSENTIAL_FEATURES and name in features:
            raise unsupported(request, name)


def unsupported(request: GenerationRequest, feature: str) -> NotSupported:
    param = next((asked.param for asked in request.asked if asked.feature == feature), None)
    return NotSupported(f"the upstream server of this model does not support {param or feature!r}", param=param)


def _remove(request: GenerationRequest, name: str) -> GenerationRequest:
    if name in Sampling.__struct_fields__:
        default: dict[int, float] | None = {} if name == "logit_bias" else None
        return msgspec.structs.replace(request, sampling=msgspec.structs.replace(request.sampling, **{name: default}))
    if name in request.labels:
        others = {label: value for label, value in request.labels.items() if label != name}
        return msgspec.structs.replace(request, labels=others)
    return _REMOVALS[name](request) if name in _REMOVALS else request


_REMOVALS: dict[str, Callable[[GenerationRequest], GenerationRequest]] = {
    "cache_control": lambda request: msgspec.structs.replace(request, keep_at=()),
    "thinking": lambda request: msgspec.structs.replace(request, thinking=Thinking()),
    "thinking_budget": lambda request: msgspec.structs.replace(
        request, thinking=msgspec.structs.replace(request.thinking, budget_tokens=None)
    ),
    "logprobs": lambda request: msgspec.structs.replace(request, logprobs=None),
    "stop": lambda request: msgspec.structs.replace(request, stop=()),
    "stop_token_ids": lambda request: msgspec.structs.replace(request, stop_token_ids=()),
    "ignore_eos": lambda request: msgspec.structs.replace(request, ignore_eos=False),
    "documents": lambda request: msgspec.structs.replace(request, documents=()),
    "parallel": lambda request: msgspec.structs.replace(
        request, tool_choice=msgspec.structs.replace(request.tool_choice, parallel=True)
    ),
    "strict_tools": lambda request: msgspec.structs.replace(
        request, tools=tuple(msgspec.structs.replace(tool, strict=False) for tool in request.tools)
    ),
}
