"""Server side of Anthropic messages: decodes requests, encodes replies, streams and errors.

    stream  := message_start ping block* message_delta message_stop
    block   := content_block_start content_block_delta* content_block_stop
    message := compaction? (text | thinking | redacted_thinking | tool_use | mcp_tool_use | mcp_tool_result)* blocks, in
               the order of the reply

Rules
1. `turns` decodes the system prompt and the messages.
2. As in Anthropic's API, a text that the reply continues must not end with white space.
3. In a stream, one block is open at a time; its index is its position in the message. The last delta of a thinking
   block is its signature: that of the upstream server, or one made here. A call without arguments has one empty delta.
4. While a conversation is compacted, pings keep the stream alive. Its usage is known at the end.
5. Tokens that are read from or written to the cache are not counted in `input_tokens`.
"""

import math
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

import msgspec

from dragoman.core.edits import Compacting, ContextEdited, ContextEvent
from dragoman.core.errors import BadRequest, DragomanError, ThreadUnsupported
from dragoman.core.events import (
    Event,
    FinishReason,
    ReasoningDelta,
    Started,
    TextDelta,
    ToolCallDelta,
    ToolCallStart,
    ToolOutput,
    ToolsListed,
    TurnEnded,
    Usage,
)
from dragoman.core.features import Feature
from dragoman.core.reply import Reply
from dragoman.core.request import (
    Asked,
    Constraint,
    Delivery,
    GenerationRequest,
    JsonSchema,
    Sampling,
    Text,
    Thinking,
    ToolCall,
)
from dragoman.protocols import json_body, thinking
from dragoman.protocols.errors import encode_anthropic_error
from dragoman.protocols.messages import blocks, context, mcp, tools
from dragoman.protocols.messages.tools import AnthropicToolChoice
from dragoman.protocols.messages.turns import AnthropicMessage, decode_turns
from dragoman.protocols.openai import NEUTRAL, Count, Int64, Probability, check_stop

PING = b'event: ping\ndata: {"type":"ping"}\n\n'
STOP_REASONS: dict[FinishReason, str] = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "content_filter": "refusal",
    "compaction": "compaction",
}
DELTAS = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
    "mcp_tool_use": ("input_json_delta", "partial_json"),
}
"""The delta type of each block type, and the name of its text."""
CALLS = ("tool_use", "mcp_tool_use")
EMPTY_BLOCKS = {"text": {"type": "text", "text": ""}, "thinking": {"type": "thinking", "thinking": "", "signature": ""}}


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
    messages, continues_last = decode_turns(fields.system, fields.messages, asked)
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


def _frame(payload: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (payload["type"].encode(), msgspec.json.encode(payload))


class MessagesEncoder:
    def __init__(self, request: GenerationRequest, created: int) -> None:
        self._request = request
        self._open: str | None = None
        self._index = -1
        self._pieces: list[str] = []
        """Text of the open thinking or tool_use block."""
        self._signature: str | None = None
        """The upstream server's signature of the open thinking block."""
        self._is_started = False
        self._edited: ContextEdited | None = None

    def feed_context(self, event: ContextEvent) -> bytes:
        if isinstance(event, Compacting):
            return PING if self._is_started else self._begin(Started())
        self._edited = event
        if event.compaction is None:
            return b""
        opening = b"" if self._is_started else self._begin(Started())
        self._index += 1
        return opening + b"".join(map(_frame, context.stream_block(event.compaction, self._index, self._request.edits)))

    def feed(self, choice: int, events: Sequence[Event]) -> bytes:
        if self._open == "text":
            texts = [event.text for event in events if type(event) is TextDelta and event.text]
            if len(texts) == len(events):
                return self._deltas(texts)
        return b"".join(self._event(event) for event in events)

    def _event(self, event: Event) -> bytes:
        if isinstance(event, TextDelta):
            return self._piece("text", event.text)
        if isinstance(event, ReasoningDelta):
            return self._reasoning(event)
        if isinstance(event, ToolCallStart):
            return self._start(blocks.encode_part(ToolCall(event.id, event.name, "", event.server)))
        if isinstance(event, ToolCallDelta):
            # A faulty upstream server may send more arguments after the block of a call has ended.
            return self._piece(self._open or "", event.arguments) if self._open in CALLS else b""
        if isinstance(event, ToolOutput):
            return self._start(mcp.encode_output(event)) + self._stop()
        if isinstance(event, TurnEnded):
            return self._stop()
        if isinstance(event, ToolsListed):
            return b""
        if isinstance(event, Started):
            return b"" if self._is_started else self._begin(event)
        delta, usage = _stop_fields(event.reason, event.stop), event.usage or Usage()
        counts = _encode_usage(usage) | context.encode_iterations(self._edited, usage, _encode_usage)
        edited = context.encode_edited(self._request.edits, self._edited)
        return self._stop() + _frame({"type": "message_delta", "delta": delta, "usage": counts, **edited})

    def _begin(self, started: Started) -> bytes:
        self._is_started = True
        usage = Usage(started.prompt_tokens, cached=started.cached_tokens, kept=started.kept_tokens)
        message = _message(self._request, [], None, None, usage)
        return _frame({"type": "message_start", "message": message}) + PING

    def _reasoning(self, event: ReasoningDelta) -> bytes:
        if not event.signature:
            return self._piece("thinking", event.text)
        if not event.text and self._open != "thinking":
            redacted = {"type": "redacted_thinking", "data": event.signature}
            return self._start(redacted) + self._stop()
        frames = self._piece("thinking", event.text)
        self._signature = event.signature
        return frames + self._stop()

    def _piece(self, kind: str, text: str) -> bytes:
        if not text:
            return b""
        start = b"" if self._open == kind else self._start(EMPTY_BLOCKS[kind])
        if kind != "text":
            self._pieces.append(text)
        return start + self._deltas([text])

    def _start(self, block: dict[str, Any]) -> bytes:
        stop = self._stop()
        self._open = block["type"]
        self._index += 1
        return stop + _frame({"type": "content_block_start", "index": self._index, "content_block": block})

    def _deltas(self, texts: Sequence[str]) -> bytes:
        """Encode one frame per text; the frames differ only in their text."""
        kind, field = DELTAS[self._open or "text"]
        head = (
            b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":{"type":"%b","%b":"'
            % (self._index, kind.encode(), field.encode())
        )
        tail = b'"}}\n\n'
        return head + json_body.encode_texts(texts, tail + head) + tail

    def _stop(self) -> bytes:
        if self._open is None:
            return b""
        last = b""
        if self._open == "thinking":
            signature = self._signature or blocks.SIGNATURE.sign("".join(self._pieces))
            delta = {"type": "signature_delta", "signature": signature}
            last = _frame({"type": "content_block_delta", "index": self._index, "delta": delta})
        elif self._open in CALLS and not self._pieces:
            last = self._deltas([""])
        self._open, self._signature = None, None
        self._pieces.clear()
        return last + _frame({"type": "content_block_stop", "index": self._index})

    def end(self) -> bytes:
        return _frame({"type": "message_stop"})

    def fail(self, error: DragomanError) -> bytes:
        return _frame(encode_anthropic_error(error, self._request.id))


def encode_reply(request: GenerationRequest, created: int, reply: Reply) -> dict[str, Any]:
    choice = reply.choices[0]
    encoded = [] if reply.compaction is None else [context.encode_block(reply.compaction)]
    encoded += [mcp.encode_result(part) or blocks.encode_part(part) for part in choice.parts]
    message = _message(request, encoded, choice.reason, choice.stop, reply.usage)
    message["usage"] |= context.encode_iterations(reply.edited, reply.usage, _encode_usage)
    return message | context.encode_edited(request.edits, reply.edited)


def _message(
    request: GenerationRequest,
    content: list[dict[str, Any]],
    reason: FinishReason | None,
    stop: str | None,
    usage: Usage,
) -> dict[str, Any]:
    message = {"id": request.id, "type": "message", "role": "assistant", "model": request.model, "content": content}
    is_long = request.keep_seconds > blocks.SHORT_SECONDS
    created = {
        "ephemeral_5m_input_tokens": 0 if is_long else usage.kept,
        "ephemeral_1h_input_tokens": usage.kept if is_long else 0,
    }
    tier = "batch" if request.priority == "batch" else "standard"
    counts = _encode_usage(usage) | {"cache_creation": created, "service_tier": tier}
    return message | _stop_fields(reason, stop) | {"usage": counts}


def _stop_fields(reason: FinishReason | None, stop: str | None) -> dict[str, Any]:
    at_stop = reason == "stop" and stop is not None
    stop_reason = None if reason is None else "stop_sequence" if at_stop else STOP_REASONS[reason]
    details = {"type": "refusal", "category": None, "explanation": None} if stop_reason == "refusal" else None
    return {"stop_reason": stop_reason, "stop_sequence": stop if at_stop else None, "stop_details": details}


def _encode_usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt - usage.cached - usage.kept,
        "cache_creation_input_tokens": usage.kept,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.completion,
        "output_tokens_details": {"thinking_tokens": usage.reasoning},
    }


def encode_count(tokens: int, original: int | None = None) -> dict[str, Any]:
    """`original` is the number before the edits of the request, if it has any."""
    counted: dict[str, Any] = {"input_tokens": tokens}
    return counted if original is None else counted | {context.FIELD: {"original_input_tokens": original}}


def format_reset(seconds: float) -> str:
    """Return the time of a reset, such as 2026-01-31T12:00:00Z."""
    return datetime.fromtimestamp(math.ceil(time.time() + seconds), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
