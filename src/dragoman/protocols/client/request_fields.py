"""What a request asks for beyond its messages, and whether a protocol has a word for it."""

import base64
from collections.abc import Mapping
from typing import Any

import msgspec

from dragoman.core.errors import UnsupportedParameter
from dragoman.core.request import GenerationRequest, Image, Message, Sampling, Text, ToolResult

SAMPLING = frozenset(Sampling.__struct_fields__)
OTHERS = ("prompts", "suffix", "documents", "template_options", "stop", "stop_token_ids", "ignore_eos", "logprobs")
TOOL_ARGUMENTS: Mapping[str, Any] = {"type": "object", "properties": {}}


def asked(request: GenerationRequest) -> list[str]:
    """The names of what a request says: fields of `Sampling`, kinds of constraint, `thinking_budget`, …"""
    names = list(sampling(request.sampling))
    names += [name for name in OTHERS if getattr(request, name)]
    if request.constraint is not None:
        names.append(msgspec.inspect.type_info(type(request.constraint)).tag)  # type: ignore[attr-defined]
    if request.thinking.budget_tokens is not None:
        names.append("thinking_budget")
    if request.keep_at:
        names.append("cache_control")
    names += request.labels
    if request.choices > 1:
        names.append("choices")
    return names


def sampling(given: Sampling) -> dict[str, Any]:
    fields = {name: getattr(given, name) for name in Sampling.__struct_fields__}
    fields["logit_bias"] = {str(token): bias for token, bias in given.logit_bias.items()} or None
    return {name: value for name, value in fields.items() if value is not None}


def check(request: GenerationRequest, protocol: str, says: frozenset[str]) -> None:
    unsaid = [name for name in asked(request) if name not in says]
    if unsaid:
        words = f"{', '.join(unsaid)}: the {protocol} protocol has no word for it"
        raise UnsupportedParameter(words, param=unsaid[0])


def address(image: Image) -> str:
    """Where the image is, or all of it."""
    if image.url is not None:
        return image.url
    data = base64.b64encode(image.data or b"").decode()
    return f"data:{image.media_type or 'image/png'};base64,{data}"


def results(message: Message) -> list[ToolResult]:
    return [part for part in message.parts if isinstance(part, ToolResult)]


def shown(message: Message) -> list[Text | Image]:
    return [part for part in message.parts if isinstance(part, Text | Image)]
