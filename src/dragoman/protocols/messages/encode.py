"""Encodes replies, streams, errors and rate limit headers.

    stream  := message_start ping block* message_delta message_stop
    block   := content_block_start content_block_delta* content_block_stop
    message := text | thinking | redacted_thinking | tool_use blocks, in the order of the reply
    error   := {type: error, error: {type, message, details?}, request_id}
    header  := anthropic-ratelimit-{requests,tokens}-{limit,remaining,reset}     a reset is a time: 2026-01-31T12:00:00Z

Rules
1. One block is open at a time; its index is its position in the message.
2. The last delta of a thinking block is its signature: that of the upstream server, or one made here. A call without
   arguments has one empty delta.
3. Call arguments that are not a JSON object, as in a truncated reply, are encoded as {"INVALID_JSON": text}.
4. Tokens that are read from or written to the cache are not counted in `input_tokens`.
5. The status of an error is its own, except that 503 becomes 529. The message starts with the path of the field,
   because the format has no member for it.
"""

import math
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from dragoman.core.errors import DECODE_ERRORS, ContextTooLong, DragomanError, NoRoomForReply, ThreadUnsupported
from dragoman.core.events import (
    Event,
    FinishReason,
    ReasoningDelta,
    Started,
    TextDelta,
    ToolCallDelta,
    ToolCallStart,
    Usage,
)
from dragoman.core.rate_limits import RateLimitState
from dragoman.core.reply import Reply
from dragoman.core.request import GenerationRequest, Part, Reasoning, Text, ToolCall
from dragoman.protocols import json_body
from dragoman.protocols.messages.blocks import sign
from dragoman.protocols.messages.cache_control import SHORT_SECONDS

PING = b'event: ping\ndata: {"type":"ping"}\n\n'
STOP_REASONS: dict[FinishReason, str] = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "content_filter": "refusal",
}
DELTAS = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}
"""The delta type of each block type, and the name of its text."""

OVERLOADED = 529
ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    501: "invalid_request_error",
    503: "overloaded_error",
    504: "timeout_error",
}


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
            return self._start({"type": "tool_use", "id": event.id, "name": event.name, "input": {}})
        if isinstance(event, ToolCallDelta):
            return self._piece("tool_use", event.arguments)
        if isinstance(event, Started):
            usage = Usage(event.prompt_tokens, cached=event.cached_tokens, kept=event.kept_tokens)
            message = _message(self._request, [], None, None, usage)
            return _frame({"type": "message_start", "message": message}) + PING
        delta = _stop_fields(event.reason, event.stop)
        counts = _encode_usage(event.usage or Usage())
        return self._stop() + _frame({"type": "message_delta", "delta": delta, "usage": counts})

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
        start = b"" if self._open == kind else self._start(_empty_block(kind))
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
            signature = self._signature or sign("".join(self._pieces))
            delta = {"type": "signature_delta", "signature": signature}
            last = _frame({"type": "content_block_delta", "index": self._index, "delta": delta})
        elif self._open == "tool_use" and not self._pieces:
            last = self._deltas([""])
        self._open, self._signature = None, None
        self._pieces.clear()
        return last + _frame({"type": "content_block_stop", "index": self._index})

    def end(self) -> bytes:
        return _frame({"type": "message_stop"})

    def fail(self, error: DragomanError) -> bytes:
        return _frame(encode_error(error, self._request.id))


def _empty_block(kind: str) -> dict[str, Any]:
    return {"type": "text", "text": ""} if kind == "text" else {"type": "thinking", "thinking": "", "signature": ""}


def encode_reply(request: GenerationRequest, created: int, reply: Reply) -> dict[str, Any]:
    choice = reply.choices[0]
    blocks = [_block(part) for part in choice.parts]
    return _message(request, blocks, choice.reason, choice.stop, reply.usage)


def _message(
    request: GenerationRequest,
    blocks: list[dict[str, Any]],
    reason: FinishReason | None,
    stop: str | None,
    usage: Usage,
) -> dict[str, Any]:
    message = {"id": request.id, "type": "message", "role": "assistant", "model": request.model, "content": blocks}
    is_long = request.keep_seconds > SHORT_SECONDS
    created = {
        "ephemeral_5m_input_tokens": 0 if is_long else usage.kept,
        "ephemeral_1h_input_tokens": usage.kept if is_long else 0,
    }
    counts = _encode_usage(usage) | {"cache_creation": created, "service_tier": "standard"}
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


def _block(part: Part) -> dict[str, Any]:
    if isinstance(part, Text):
        return {"type": "text", "text": part.text}
    if isinstance(part, Reasoning):
        if part.signature and not part.text:
            return {"type": "redacted_thinking", "data": part.signature}
        return {"type": "thinking", "thinking": part.text, "signature": part.signature or sign(part.text)}
    if isinstance(part, ToolCall):
        return {"type": "tool_use", "id": part.id, "name": part.name, "input": _input(part.arguments)}
    raise AssertionError(f"a reply has no {type(part).__name__}")


def _input(arguments: str) -> msgspec.Raw | dict[str, str]:
    """Return the JSON as the model wrote it, without decoding its values."""
    if not arguments.strip():
        return {}
    try:
        msgspec.json.decode(arguments, type=dict[str, msgspec.Raw])
    except DECODE_ERRORS:
        return {"INVALID_JSON": arguments}
    return msgspec.Raw(arguments.encode())


def encode_count(tokens: int) -> dict[str, int]:
    return {"input_tokens": tokens}


def status(error: DragomanError) -> int:
    return OVERLOADED if error.status == 503 else error.status


def encode_error(error: DragomanError, request_id: str) -> dict[str, Any]:
    default = "invalid_request_error" if error.status < 500 else "api_error"
    encoded: dict[str, Any] = {"type": ERROR_TYPES.get(error.status, default), "message": _error_message(error)}
    if isinstance(error, ThreadUnsupported):
        encoded["details"] = {"error_code": error.code}
    return {"type": "error", "error": encoded, "request_id": request_id}


def _error_message(error: DragomanError) -> str:
    if not isinstance(error, ContextTooLong):
        return error.message if error.message.startswith(error.param or "") else f"{error.param}: {error.message}"
    # Agents compact their context when they recognize this exact message.
    if error.tokens is None or error.limit is None:
        return f"prompt is too long: {error.message}"
    reply = f" (one of {error.limit + 1} is reserved for the reply)" if isinstance(error, NoRoomForReply) else ""
    return f"prompt is too long: {error.tokens} tokens > {error.limit} maximum{reply}"


def rate_headers(rates: Sequence[RateLimitState], clock: Callable[[], float] = time.time) -> list[tuple[bytes, bytes]]:
    headers = []
    for rate in rates:
        reset = datetime.fromtimestamp(math.ceil(clock() + rate.reset), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        values = {"limit": rate.limit, "remaining": rate.remaining, "reset": reset}
        prefix = f"anthropic-ratelimit-{rate.what}"
        headers += [(f"{prefix}-{name}".encode(), str(value).encode()) for name, value in values.items()]
    return headers
