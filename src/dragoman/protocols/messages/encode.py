"""A reply as a message, whole or as a stream.

    stream  := message_start ping block* message_delta message_stop
    block   := content_block_start content_block_delta* content_block_stop
    message := text | thinking | redacted_thinking | tool_use blocks, in the order of the reply

Rules
1. One block is open at a time; its index is its place in the message.
2. The last delta of a thought is its signature: ours, or that of the server which the thought came from. A call without
   arguments has one delta, which is empty.
3. Input that is no JSON object, which only a reply that was cut short can have, is told as {"INVALID_JSON": text}.
4. What comes from the cache, or is kept there because the request wants it, is not counted among `input_tokens`.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from dragoman.core.errors import DECODE_ERRORS, DragomanError
from dragoman.core.events import (
    Event,
    Finished,
    FinishReason,
    ReasoningDelta,
    Started,
    TextDelta,
    ToolCallDelta,
    ToolCallStart,
    Usage,
)
from dragoman.core.reply import Reply
from dragoman.core.request import GenerationRequest, Part, Reasoning, Text, ToolCall
from dragoman.protocols import json_body
from dragoman.protocols.messages import errors
from dragoman.protocols.messages.cache_control import SHORT_SECONDS
from dragoman.protocols.messages.signature import sign

PING = b'event: ping\ndata: {"type":"ping"}\n\n'
REASONS: dict[FinishReason, str] = {
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
"""What a piece of a block is called, and its text."""


def _frame(payload: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (payload["type"].encode(), msgspec.json.encode(payload))


class MessagesEncoder:
    def __init__(self, request: GenerationRequest, created: int) -> None:
        self._request = request
        self._open: str | None = None
        self._index = -1
        self._pieces: list[str] = []
        """Of the thought or the call that is open."""
        self._signature: str | None = None
        """What another server wrote under the thought that is open."""

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
            return self._thought(event)
        if isinstance(event, ToolCallStart):
            return self._start({"type": "tool_use", "id": event.id, "name": event.name, "input": {}})
        if isinstance(event, ToolCallDelta):
            return self._piece("tool_use", event.arguments)
        if isinstance(event, Started):
            usage = Usage(event.prompt_tokens, cached=event.cached_tokens, kept=event.kept_tokens)
            message = _message(self._request, [], None, None, usage)
            return _frame({"type": "message_start", "message": message}) + PING
        return self._stop() + self._ending(event)

    def _thought(self, event: ReasoningDelta) -> bytes:
        if not event.signature:
            return self._piece("thinking", event.text)
        if not event.text and self._open != "thinking":
            redacted = {"type": "redacted_thinking", "data": event.signature}
            return self._start(redacted) + self._stop()
        told = self._piece("thinking", event.text)
        self._signature = event.signature
        return told + self._stop()

    def _piece(self, kind: str, text: str) -> bytes:
        if not text:
            return b""
        begun = b"" if self._open == kind else self._start(_empty(kind))
        if kind != "text":
            self._pieces.append(text)
        return begun + self._deltas([text])

    def _start(self, block: dict[str, Any]) -> bytes:
        stopped = self._stop()
        self._open = block["type"]
        self._index += 1
        return stopped + _frame({"type": "content_block_start", "index": self._index, "content_block": block})

    def _deltas(self, texts: Sequence[str]) -> bytes:
        """A frame for each text, of which nearly all there is consists: only the texts are put between the same."""
        kind, field = DELTAS[self._open or "text"]
        head = (
            b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":{"type":"%b","%b":"'
            % (*(self._index, kind.encode(), field.encode()),)
        )
        tail = b'"}}\n\n'
        return head + json_body.between_texts(texts, tail + head) + tail

    def _stop(self) -> bytes:
        if self._open is None:
            return b""
        last = b""
        if self._open == "thinking":
            written = self._signature or sign("".join(self._pieces))
            signed = {"type": "signature_delta", "signature": written}
            last = _frame({"type": "content_block_delta", "index": self._index, "delta": signed})
        elif self._open == "tool_use" and not self._pieces:
            last = self._deltas([""])
        self._open, self._signature = None, None
        self._pieces.clear()
        return last + _frame({"type": "content_block_stop", "index": self._index})

    def _ending(self, finished: Finished) -> bytes:
        delta = _stopped(finished.reason, finished.stop)
        return _frame({"type": "message_delta", "delta": delta, "usage": _counts(finished.usage or Usage())})

    def end(self) -> bytes:
        return _frame({"type": "message_stop"})

    def fail(self, error: DragomanError) -> bytes:
        return _frame(errors.encode_error(error, self._request.id))


def _empty(kind: str) -> dict[str, Any]:
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
    lasting = request.keep_seconds > SHORT_SECONDS
    created = {
        "ephemeral_5m_input_tokens": 0 if lasting else usage.kept,
        "ephemeral_1h_input_tokens": usage.kept if lasting else 0,
    }
    counts = _counts(usage) | {"cache_creation": created, "service_tier": "standard"}
    return message | _stopped(reason, stop) | {"usage": counts}


def _stopped(reason: FinishReason | None, stop: str | None) -> dict[str, Any]:
    at_stop = reason == "stop" and stop is not None
    told = None if reason is None else "stop_sequence" if at_stop else REASONS[reason]
    details = {"type": "refusal", "category": None, "explanation": None} if told == "refusal" else None
    return {"stop_reason": told, "stop_sequence": stop if at_stop else None, "stop_details": details}


def _counts(usage: Usage) -> dict[str, Any]:
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
    """The JSON as the model wrote it, which need not be read to be told."""
    if not arguments.strip():
        return {}
    try:
        msgspec.json.decode(arguments, type=dict[str, msgspec.Raw])
    except DECODE_ERRORS:
        return {"INVALID_JSON": arguments}
    return msgspec.Raw(arguments.encode())


def encode_count(tokens: int) -> dict[str, int]:
    return {"input_tokens": tokens}
