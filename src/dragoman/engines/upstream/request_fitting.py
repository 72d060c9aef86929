"""A request in the words that a protocol has and a place takes.

Rules
1. What is left out is named, as the caller named it: a reply never claims to have honoured it.
2. Stop strings may be left out without a word: the server keeps to them itself.
3. What cannot be left out, and cannot be said, is an error.
"""

from collections.abc import Callable, Collection

import msgspec

from dragoman.client.call import Spoken
from dragoman.core.errors import NotSupported
from dragoman.core.request import GenerationRequest, Sampling, Thinking
from dragoman.engines.upstream.refused_fields import ESSENTIAL
from dragoman.protocols.client import request_fields

CONSTRAINTS = frozenset({"json_object", "json_schema", "regex", "grammar", "one_of"})
FEATURES = {"thinking_budget": "thinking"}
"""What asks, where it has another name in a request."""
SILENT = frozenset({"stop", "stream_options", "parallel"})


class Fitted(msgspec.Struct, frozen=True):
    request: GenerationRequest
    ignored: tuple[str, ...] = ()


def fitted(request: GenerationRequest, protocol: Spoken, refused: Collection[str]) -> Fitted:
    asked = request_fields.asked(request)
    unsaid = [name for name in asked if name not in protocol.says]
    _check(request, unsaid, refused)
    left_out = [*unsaid, *(name for name in refused if name not in ESSENTIAL)]
    features = {FEATURES.get(name, name) for name in left_out if name not in SILENT}
    quiet = [name for name in left_out if name in request.labels or (name == "cache_control" and request.keep_at)]
    named = [asked.param for asked in request.asked if asked.feature in features]
    ignored = tuple(dict.fromkeys([*named, *quiet]))
    for name in left_out:
        request = _without(request, name)
    return Fitted(request, ignored)


def _check(request: GenerationRequest, unsaid: Collection[str], refused: Collection[str]) -> None:
    asks = {asked.feature: asked.param for asked in request.asked}
    for name in unsaid:
        if name in CONSTRAINTS:
            raise not_taken(request, "constraint")
        if name in ("prompts", "suffix"):
            raise not_taken(request, "infill" if name == "suffix" else "completion")
    for name in refused:
        if name in ESSENTIAL and name in asks:
            raise not_taken(request, name)


def not_taken(request: GenerationRequest, feature: str) -> NotSupported:
    param = next((asked.param for asked in request.asked if asked.feature == feature), None)
    return NotSupported(f"the server behind this model does not take {param or feature!r}", param=param)


def _without(request: GenerationRequest, name: str) -> GenerationRequest:
    if name in Sampling.__struct_fields__:
        nothing: dict[int, float] | None = {} if name == "logit_bias" else None
        return msgspec.structs.replace(request, sampling=msgspec.structs.replace(request.sampling, **{name: nothing}))
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
