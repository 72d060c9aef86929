"""Lists the fields that a request uses, and encodes those that the protocols share."""

import base64
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from dragoman.core.errors import UnsupportedParameter
from dragoman.core.request import GenerationRequest, Image, Message, Part, Sampling, Text, ToolResult
from dragoman.protocols.json_body import without_nulls

SAMPLING = frozenset(Sampling.__struct_fields__)
FIELDS = ("prompts", "suffix", "documents", "template_options", "stop", "stop_token_ids", "ignore_eos", "logprobs")
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
    if request.continues_last:
        names.append("prefill")
    return names


def sampling_fields(values: Sampling) -> dict[str, Any]:
    fields = {name: getattr(values, name) for name in Sampling.__struct_fields__}
    fields["logit_bias"] = {str(token): bias for token, bias in values.logit_bias.items()} or None
    return without_nulls(fields)


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


def encode_content(
    parts: Sequence[Part], text_type: str, encode_image: Callable[[str], dict[str, Any]]
) -> str | list[dict[str, Any]]:
    """Encode texts and images; `encode_image` gets the URL of an image. Other parts are left out."""
    shown = [part for part in parts if isinstance(part, Text | Image)]
    if not any(isinstance(part, Image) for part in shown):
        return "".join(part.text for part in shown if isinstance(part, Text))
    return [
        {"type": text_type, "text": part.text} if isinstance(part, Text) else encode_image(image_url(part))
        for part in shown
    ]


def common_fields(request: GenerationRequest, stream: bool) -> dict[str, Any]:
    """Encode the fields that all OpenAI protocols share; None marks an absent field."""
    return {
        "model": request.model or None,
        "stop": list(request.stop) or None,
        "stop_token_ids": list(request.stop_token_ids) or None,
        "ignore_eos": request.ignore_eos or None,
        "stream": stream or None,
        **sampling_fields(request.sampling),
        **request.labels,
    }
