"""Server side of Anthropic messages: decodes requests. `encoder` encodes the replies.

Rules
1. `conversation` decodes the system prompt and the messages.
2. As in Anthropic's API, a text that the reply continues must not end with white space.
"""

import math
import time
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

import msgspec

from dragoman.core.errors import BadRequest, ThreadUnsupported
from dragoman.core.features import Feature
from dragoman.core.request import (
    Asked,
    Constraint,
    Delivery,
    GenerationRequest,
    JsonSchema,
    Sampling,
    Text,
    Thinking,
)
from dragoman.protocols import json_body, thinking
from dragoman.protocols.messages import blocks, context, mcp, tools
from dragoman.protocols.messages.conversation import AnthropicMessage, decode_conversation
from dragoman.protocols.messages.tools import AnthropicToolChoice
from dragoman.protocols.openai import NEUTRAL, Count, Int64, Probability, check_stop


class AnthropicThinking(msgspec.Struct, frozen=True):
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Count | None = None
    display: str | None = None


class OutputFormat(msgspec.Struct, frozen=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, frozen=True):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class MessagesFields(msgspec.Struct, frozen=True, kw_only=True):
    messages: list[AnthropicMessage]
    model: str | None = None
    max_tokens: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] | None = None
    system: blocks.Content | None = None
    tools: list[dict[str, Any]] | None = None
    mcp_servers: list[dict[str, Any]] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: AnthropicThinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    context_management: Any = None
    compaction: Any = None
    stop_sequences: list[str] | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    top_p: Probability | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)] | None = None
    seed: Int64 | None = None
    stream: bool | None = None


HARMLESS = frozenset({"metadata", "cache_control", "betas", "anthropic_version", "anthropic_beta", "thread"})
"""Unknown fields that do not affect the reply."""
NO_EFFECT: dict[str, Any] = {"service_tier": ("auto", "standard_only"), "speed": ("standard",)}
"""Values without effect of fields that are not supported."""


def decode(body: bytes) -> GenerationRequest:
    request = decode_count(body)
    if request.max_tokens is None:
        raise json_body.missing_field("max_tokens")
    prefill, path = request.prefill, request.prefill_path
    if isinstance(prefill, Text) and prefill.text[-1].isspace():
        raise BadRequest(f"{path}: final assistant content cannot end with trailing whitespace", param=path)
    return request


def decode_count(body: bytes) -> GenerationRequest:
    """Decode a request to count tokens, which needs no `max_tokens`."""
    parsed = json_body.parse(body)
    if parsed.get("thread") is not None:
        message = "thread: server-side threads are not supported; send the whole conversation without `thread`"
        raise ThreadUnsupported(message, param="thread")
    fields = json_body.convert(parsed, MessagesFields)
    if not fields.messages:
        raise BadRequest("messages: at least one message is needed", param="messages")
    asked = [Asked(Feature.CHAT, "messages"), *_asked_fields(fields, parsed)]
    servers = mcp.decode(parsed, asked)
    offered, choice = tools.decode(fields.tools or [], fields.tool_choice, asked, bool(servers))
    top_k = 0 if fields.top_k == -1 else fields.top_k  # Some clients send -1 for no limit.
    for at, stop in enumerate(fields.stop_sequences or ()):
        check_stop(stop, f"stop_sequences[{at}]")
    metadata = parsed.get("metadata")
    user = metadata.get("user_id") if isinstance(metadata, dict) else None
    keep_seconds, keep_at = blocks.decode_cache_control(parsed)
    messages, continues_last = decode_conversation(fields.system, fields.messages, asked)
    return GenerationRequest(
        model=fields.model or "",
        messages=messages,
        continues_last=continues_last,
        edits=context.decode_edits(parsed, asked),
        tools=offered,
        tool_choice=choice,
        tool_servers=servers,
        constraint=_constraint(fields, asked),
        thinking=_thinking(fields, parsed, asked),
        sampling=Sampling(temperature=fields.temperature, top_p=fields.top_p, top_k=top_k, seed=fields.seed),
        keep_seconds=keep_seconds,
        keep_at=keep_at,
        labels={"user": user} if isinstance(user, str) and user else {},
        max_tokens=fields.max_tokens,
        stop=tuple(fields.stop_sequences or ()),
        delivery=Delivery(stream=bool(fields.stream), usage=True),
        asked=tuple(asked),
        extra=json_body.extra_fields(parsed, asked),
    )


def _asked_fields(fields: MessagesFields, parsed: dict[str, Any]) -> list[Asked]:
    names = ("temperature", "top_p", "top_k", "seed")
    asked = [Asked(Feature(name), name) for name in names if getattr(fields, name) not in (None, NEUTRAL.get(name))]
    if fields.stop_sequences:
        asked.append(Asked(Feature.STOP, "stop_sequences"))
    unknown = [
        name
        for name in json_body.unknown_fields(parsed, MessagesFields)
        if name not in HARMLESS and parsed[name] not in NO_EFFECT.get(name, ())
    ]
    config = parsed.get("output_config") or {}
    unknown += [f"output_config.{name}" for name in json_body.unknown_fields(config, OutputConfig)]
    return asked + [Asked(Feature.UNKNOWN, name) for name in unknown]


def _constraint(fields: MessagesFields, asked: list[Asked]) -> Constraint | None:
    config = fields.output_config or OutputConfig()
    if config.format is not None and fields.output_format is not None:
        message = "output_format: only one output format is allowed, and output_config.format already sets it"
        raise BadRequest(message, param="output_format")
    output_format = config.format or fields.output_format
    if output_format is None:
        return None
    path = "output_format" if config.format is None else "output_config.format"
    asked.append(Asked(Feature.CONSTRAINT, path))
    return JsonSchema(output_format.schema, path=f"{path}.schema")


def _thinking(fields: MessagesFields, parsed: dict[str, Any], asked: list[Asked]) -> Thinking:
    if fields.thinking is not None and fields.thinking.display == "omitted":
        asked.append(Asked(Feature.THINKING_DISPLAY, "thinking.display"))
    if fields.thinking is not None and fields.thinking.type == "between_tools":
        asked.append(Asked(Feature.BETWEEN_TOOLS, "thinking.type"))
    return thinking.resolve({name: parsed.get(name) for name in ("thinking", "output_config")}, asked)


def encode_count(tokens: int, original: int | None = None) -> dict[str, Any]:
    """`original` is the number before the edits of the request, if it has any."""
    counted: dict[str, Any] = {"input_tokens": tokens}
    return counted if original is None else counted | {context.FIELD: {"original_input_tokens": original}}


def format_reset(seconds: float) -> str:
    """Return the time of a reset, such as 2026-01-31T12:00:00Z."""
    return datetime.fromtimestamp(math.ceil(time.time() + seconds), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
