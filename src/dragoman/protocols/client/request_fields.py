"""Lists the fields that a request uses, and encodes those that the protocols share."""

import base64
from collections.abc import Mapping
from typing import Any

import msgspec

from dragoman.core.errors import UnsupportedParameter
from dragoman.core.request import GenerationRequest, Image, Message, Sampling, Text, ToolResult

SAMPLING = frozenset(Sampling.__struct_fields__)
FIELDS = (
    "prompts",
    "suffix",
    "documents",
    "template_options",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "logprobs",
)
EMPTY_SCHEMA: Mapping[str, Any] = {"type": "object", "properties": {}}


def used_fields(request: GenerationRequest) -> list[str]:
    """Return the names of the fields in use: those of `Sampling`, the kind of constraint, `thinking_budget`, …"""
    names = list(sampling_fields(request.sampling))
    names += [name for name in FIELDS if getattr(request, name)]
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


def sampling_fields(values: Sampling) -> dict[str, Any]:
    fields = {name: getattr(values, name) for name in Sampling.__struct_fields__}
    fields["logit_bias"] = {str(token): bias for token, bias in values.logit_bias.items()} or None
    return {name: value for name, value in fields.items() if value is not None}


def check_supported(request: GenerationRequest, protocol: str, supported: frozenset[str]) -> None:
    unsupported = [name for name in used_fields(request) if name not in supported]
    if unsupported:
        message = f"{', '.join(unsupported)}: not supported by the {protocol} protocol"
        raise UnsupportedParameter(message, param=unsupported[0])


def image_url(image: Image) -> str:
    """Return the URL of an image, or a data URL with its content."""
    if image.url is not None:
        return image.url
    data = base64.b64encode(image.data or b"").decode()
    return f"data:{image.media_type or 'image/png'};base64,{data}"


def tool_results(message: Message) -> list[ToolResult]:
    return [part for part in message.parts if isinstance(part, ToolResult)]


def text_and_images(message: Message) -> list[Text | Image]:
    return [part for part in message.parts if isinstance(part, Text | Image)]
