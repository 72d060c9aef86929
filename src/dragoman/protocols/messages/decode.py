"""Decodes a request for a message or for its token count.

Rules
1. `system` comes first; messages with the system role stay where they are.
2. The blocks of `system` become paragraphs. A billing header in its first line is removed: it changes with every
   session, so a prompt that starts with it would never be found in a cache.
3. Tool results become messages of their own, before the rest of their message.
"""

from typing import Annotated, Any, Literal

import msgspec

from dragoman.core.errors import BadRequest, ThreadUnsupported
from dragoman.core.request import (
    Asked,
    Constraint,
    Delivery,
    GenerationRequest,
    JsonSchema,
    Message,
    Sampling,
    Text,
    Thinking,
    ToolResult,
)
from dragoman.protocols import json_body
from dragoman.protocols.messages import blocks, cache_control, tools
from dragoman.protocols.messages.tools import AnthropicToolChoice
from dragoman.protocols.openai import Int64, Probability, check_stop

Budget = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
Effort = Literal["none", "minimal", "low", "medium", "high"]
BILLING = "x-anthropic-billing-header:"


class AnthropicThinking(msgspec.Struct, frozen=True):
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Budget | None = None
    display: str | None = None


class OutputFormat(msgspec.Struct, frozen=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, frozen=True):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class AnthropicMessage(msgspec.Struct, frozen=True):
    role: Literal["user", "assistant", "system"]
    content: blocks.Content


class MessagesFields(msgspec.Struct, frozen=True, kw_only=True):
    messages: list[AnthropicMessage]
    model: str | None = None
    max_tokens: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] | None = None
    system: blocks.Content | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: AnthropicThinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    stop_sequences: list[str] | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    top_p: Probability | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)] | None = None
    seed: Int64 | None = None
    stream: bool | None = None


HARMLESS = frozenset({"metadata", "cache_control", "betas", "anthropic_version", "anthropic_beta", "thread"})
"""Unknown fields that do not affect the reply."""
NEUTRAL: dict[str, Any] = {"service_tier": ("auto", "standard_only"), "speed": ("standard",), "mcp_servers": ([],)}
"""Values without effect of fields that are not supported."""


def decode(body: bytes) -> GenerationRequest:
    request = decode_count(body)
    if request.max_tokens is None:
        raise json_body.missing_field("max_tokens")
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
    asked = [Asked("chat", "messages"), *_asked_fields(fields, parsed)]
    offered, choice = tools.decode(fields.tools or [], fields.tool_choice, asked)
    top_k = 0 if fields.top_k == -1 else fields.top_k  # Some clients send -1 for no limit.
    keep_seconds, keep_at = cache_control.decode(parsed)
    return GenerationRequest(
        model=fields.model or "",
        messages=_messages(fields.system, fields.messages, asked),
        tools=offered,
        tool_choice=choice,
        constraint=_constraint(fields, asked),
        thinking=_thinking(fields, asked),
        sampling=Sampling(temperature=fields.temperature, top_p=fields.top_p, top_k=top_k, seed=fields.seed),
        keep_seconds=keep_seconds,
        keep_at=keep_at,
        labels=_labels(parsed.get("metadata")),
        max_tokens=fields.max_tokens,
        stop=_stops(fields.stop_sequences or []),
        delivery=Delivery(stream=bool(fields.stream), usage=True),
        asked=tuple(asked),
    )


def _asked_fields(fields: MessagesFields, parsed: dict[str, Any]) -> list[Asked]:
    values = {"temperature": fields.temperature, "top_p": fields.top_p, "top_k": fields.top_k, "seed": fields.seed}
    asked = [Asked(name, name) for name, value in values.items() if value is not None and (name, value) != ("top_p", 1)]
    if fields.stop_sequences:
        asked.append(Asked("stop", "stop_sequences"))
    for name in json_body.unknown_fields(parsed, MessagesFields):
        value = parsed[name]
        if name == "context_management":
            value = _edits(value)
        if value is not None and name not in HARMLESS and value not in NEUTRAL.get(name, ()):
            asked.append(Asked("unknown", name))
    config = parsed.get("output_config") or {}
    unknown = [name for name in json_body.unknown_fields(config, OutputConfig) if config[name] is not None]
    return asked + [Asked("unknown", f"output_config.{name}") for name in unknown]


def _edits(management: Any) -> Any:
    """Return the edits other than "keep all thinking", which needs no action."""
    edits = management.get("edits") if isinstance(management, dict) else management
    if not isinstance(edits, list):
        return edits
    keeps_all = {"type": "clear_thinking_20251015", "keep": "all"}
    return [edit for edit in edits if edit != keeps_all] or None


def _labels(metadata: Any) -> dict[str, Any]:
    user = metadata.get("user_id") if isinstance(metadata, dict) else None
    return {"user": user} if isinstance(user, str) and user else {}


def _stops(stops: list[str]) -> tuple[str, ...]:
    for at, stop in enumerate(stops):
        check_stop(stop, f"stop_sequences[{at}]")
    return tuple(stops)


def _constraint(fields: MessagesFields, asked: list[Asked]) -> Constraint | None:
    config = fields.output_config or OutputConfig()
    if config.format is not None and fields.output_format is not None:
        message = "output_format: only one output format is allowed, and output_config.format already sets it"
        raise BadRequest(message, param="output_format")
    output_format = config.format or fields.output_format
    if output_format is None:
        return None
    path = "output_format" if config.format is None else "output_config.format"
    asked.append(Asked("constraint", path))
    return JsonSchema(output_format.schema, path=f"{path}.schema")


def _thinking(fields: MessagesFields, asked: list[Asked]) -> Thinking:
    """Decode `thinking` and the effort; `adaptive` leaves the decision to the model."""
    field, config = fields.thinking, fields.output_config or OutputConfig()
    effort: Effort | None = "high" if config.effort == "xhigh" or config.effort == "max" else config.effort
    if effort is not None:
        asked.append(Asked("thinking", "output_config.effort"))
    if field is None:
        return Thinking(effort=effort)
    if field.display == "omitted":
        asked.append(Asked("thinking_display", "thinking.display"))
    if field.type == "between_tools":
        asked.append(Asked("between_tools", "thinking.type"))
    if field.type == "disabled":
        asked.append(Asked("thinking", "thinking.type"))
        return Thinking(enabled=False)
    if field.budget_tokens is not None:
        asked.append(Asked("thinking", "thinking.budget_tokens"))
    if field.type != "enabled":
        return Thinking(effort=effort, budget_tokens=field.budget_tokens)
    asked.append(Asked("thinking", "thinking.type"))
    return Thinking(True, None if effort == "none" else effort, field.budget_tokens)


def _messages(
    system: blocks.Content | None, messages: list[AnthropicMessage], asked: list[Asked]
) -> tuple[Message, ...]:
    decoded = [] if system is None else _system(system, "system", asked)
    for at, message in enumerate(messages):
        path = f"messages[{at}].content"
        if message.role == "system":
            decoded += _system(message.content, path, asked)
        else:
            decoded += _split_results(message.role, message.content, path, asked)
    if messages and messages[-1].role == "assistant":
        # An engine without the feature `prefill` ignores it, which is reported.
        asked.append(Asked("prefill", f"messages[{len(messages) - 1}]"))
    return tuple(decoded)


def _system(content: blocks.Content, path: str, asked: list[Asked]) -> list[Message]:
    parts = blocks.decode(content, path, asked, blocks.ALLOWED["system"])
    texts = [part.text for part in parts if isinstance(part, Text)]
    if texts and texts[0].startswith(BILLING):
        texts[0] = texts[0].partition("\n")[2]
    text = "\n\n".join(text for text in texts if text)
    return [Message("system", (Text(text),))] if text else []


def _split_results(
    role: Literal["user", "assistant"], content: blocks.Content, path: str, asked: list[Asked]
) -> list[Message]:
    parts = blocks.decode(content, path, asked, blocks.ALLOWED[role])
    results = [Message("tool", (part,)) for part in parts if isinstance(part, ToolResult)]
    others = tuple(part for part in parts if not isinstance(part, ToolResult))
    return [*results, Message(role, others)] if others or not results else results
