"""Encodes the replies of Anthropic messages, as a whole and as streams.

    stream  := message_start ping block* message_delta message_stop
    block   := content_block_start content_block_delta* content_block_stop
    message := compaction? (text | thinking | redacted_thinking | tool_use | mcp_tool_use | mcp_tool_result)* blocks, in
               the order of the reply

Rules
1. In a stream, one block is open at a time; its index is its position in the message. The last delta of a thinking
   block is its signature: that of the upstream server, or one made here. A call without arguments has one empty delta.
2. While a conversation is compacted, pings keep the stream alive. Its usage is known at the end.
3. Tokens that are read from or written to the cache are not counted in `input_tokens`.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from dragoman.core.edits import Compacting, ContextEdited, ContextEvent
from dragoman.core.errors import DragomanError
from dragoman.core.events import (
    Event,
    FinishReason,
    ReasoningDelta,
    RoundEnded,
    Started,
    TextDelta,
    ToolCallDelta,
    ToolCallStart,
    ToolOutput,
    ToolsListed,
    Usage,
)
from dragoman.core.reply import Reply
from dragoman.core.request import (
    GenerationRequest,
    ToolCall,
)
from dragoman.protocols import json_body
from dragoman.protocols.errors import encode_anthropic_error
from dragoman.protocols.messages import blocks, context, mcp

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
        if isinstance(event, RoundEnded):
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
