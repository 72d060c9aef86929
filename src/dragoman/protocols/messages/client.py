"""Client side of Anthropic messages: encodes requests and decodes replies.

    stream := message_start block* message_delta message_stop             with pings anywhere
    block  := content_block_start content_block_delta* content_block_stop

Rules
1. Leading system and developer messages become `system`. Later ones become user messages.
2. Consecutive messages of one role are merged; tool results come first in a message.
3. Reasoning is sent only with its original signature, because servers reject it without one.
4. `message_stop`, or the end of a stream after its `stop_reason`, completes a reply.
"""

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from dragoman.core.errors import DECODE_ERRORS, BadAnswer, StreamCutOff
from dragoman.core.events import Event
from dragoman.core.request import (
    GenerationRequest,
    Image,
    JsonSchema,
    Message,
    Part,
    Reasoning,
    Text,
    Thinking,
    Tool,
    ToolCall,
    ToolChoice,
    ToolResult,
)
from dragoman.protocols.client import error_classifier, reply_fields, request_fields, usage_fields
from dragoman.protocols.client.reply_draft import BaseReplyReader
from dragoman.protocols.client.tool_calls import NewId, arguments_text, new_id
from dragoman.protocols.sse import SseFrame

PATH = "/messages"
SUPPORTED_FIELDS = frozenset(
    {
        *("temperature", "top_p", "top_k", "seed", "stop", "thinking_budget", "json_object", "json_schema"),
        *("cache_control", "user"),
    }
)
LONG_SECONDS = 300.0
"""A longer time needs `ttl: 1h`."""
DEFAULT_MAX_TOKENS = 4096
"""`max_tokens` is required; every Anthropic model can generate this many."""
MIN_THINKING_BUDGET = 1024
CACHEABLE = ("text", "image", "tool_use", "tool_result")
"""Block types that accept `cache_control`."""
TOOL_CHOICES = {"auto": "auto", "none": "none", "required": "any", "named": "tool"}

Block = dict[str, Any]


def encode(request: GenerationRequest, stream: bool) -> dict[str, Any]:
    messages = list(request.messages)
    system: list[str] = []
    while messages and messages[0].role in ("system", "developer"):
        system.append(messages.pop(0).text)
    limit = request.max_tokens or DEFAULT_MAX_TOKENS
    body: dict[str, Any] = {
        "model": request.model,
        "max_tokens": limit,
        "system": "\n\n".join(system) or None,
        "messages": _merge_messages(messages),
        "tools": [_tool(tool) for tool in request.tools] or None,
        "tool_choice": _tool_choice(request.tool_choice) if request.tools else None,
        "thinking": _thinking(request.thinking, limit),
        "output_config": _output_config(request),
        "stop_sequences": list(request.stop) or None,
        "stream": stream or None,
        "metadata": {"user_id": request.labels["user"]} if "user" in request.labels else None,
        **request_fields.sampling_fields(request.sampling),
    }
    _add_cache_control(body, request)
    return {name: value for name, value in body.items() if value is not None}


def _add_cache_control(body: dict[str, Any], request: GenerationRequest) -> None:
    """Mark the ends of the prompt parts that the request wants cached."""
    control = {"type": "ephemeral"} | ({"ttl": "1h"} if request.keep_seconds > LONG_SECONDS else {})
    if "tools" in request.keep_at and body["tools"]:
        body["tools"][-1]["cache_control"] = control
    if "system" in request.keep_at and body["system"]:
        body["system"] = [{"type": "text", "text": body["system"], "cache_control": control}]
    last = body["messages"][-1]["content"]
    if "messages" in request.keep_at and isinstance(last, list) and last[-1]["type"] in CACHEABLE:
        last[-1]["cache_control"] = control


def _merge_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    merged: list[dict[str, Any]] = []
    for message in messages:
        role = "assistant" if message.role == "assistant" else "user"
        blocks = [block for part in message.parts for block in _blocks(part)]
        if merged and merged[-1]["role"] == role:
            merged[-1]["content"] += blocks
        else:
            merged.append({"role": role, "content": blocks})
    for entry in merged:
        entry["content"].sort(key=lambda block: block["type"] != "tool_result")
    # Servers reject a message without content, but there must be at least one message.
    return [entry for entry in merged if entry["content"]] or [{"role": "user", "content": ""}]


def _blocks(part: Part) -> list[Block]:
    if isinstance(part, Text):
        return [{"type": "text", "text": part.text}] if part.text else []
    if isinstance(part, Image):
        return [{"type": "image", "source": _source(part)}]
    if isinstance(part, Reasoning):
        return _reasoning(part)
    if isinstance(part, ToolCall):
        return [{"type": "tool_use", "id": part.id, "name": part.name, "input": _input(part.arguments)}]
    return [_result(part)]


def _source(image: Image) -> dict[str, Any]:
    if image.data is not None:
        data = base64.b64encode(image.data).decode()
        return {"type": "base64", "media_type": image.media_type or "image/png", "data": data}
    head, comma, data = (image.url or "").partition(",")
    if comma and head.startswith("data:") and head.endswith(";base64"):
        return {"type": "base64", "media_type": head[5:-7], "data": data}
    return {"type": "url", "url": image.url}


def _reasoning(part: Reasoning) -> list[Block]:
    if part.signature is None:
        return []
    if not part.text:
        return [{"type": "redacted_thinking", "data": part.signature}]
    return [{"type": "thinking", "thinking": part.text, "signature": part.signature}]


def _input(arguments: str) -> Any:
    try:
        return msgspec.json.decode(arguments or "{}", type=dict[str, Any])
    except DECODE_ERRORS:
        return {"INVALID_JSON": arguments}


def _result(result: ToolResult) -> Block:
    block: Block = {"type": "tool_result", "tool_use_id": result.call_id}
    content = [inner for part in result.content for inner in _blocks(part)]
    if content:
        block["content"] = content
    return {**block, "is_error": True} if result.is_error else block


def _tool(tool: Tool) -> dict[str, Any]:
    encoded = {"name": tool.name, "input_schema": tool.parameters or request_fields.EMPTY_SCHEMA}
    if tool.description:
        encoded["description"] = tool.description
    return {**encoded, "strict": True} if tool.strict else encoded


def _tool_choice(choice: ToolChoice) -> dict[str, Any] | None:
    encoded: dict[str, Any] = {"type": TOOL_CHOICES[choice.mode]}
    if choice.mode == "named":
        encoded["name"] = choice.name
    if not choice.parallel and choice.mode != "none":
        encoded["disable_parallel_tool_use"] = True
    return None if encoded == {"type": "auto"} else encoded


def _thinking(thinking: Thinking, limit: int) -> dict[str, Any] | None:
    if thinking.is_off:
        return {"type": "disabled"}
    if thinking.enabled is None and thinking.budget_tokens is None:
        return None
    budget = thinking.budget_tokens or max(MIN_THINKING_BUDGET, limit // 2)
    return {"type": "enabled", "budget_tokens": budget}


def _output_config(request: GenerationRequest) -> dict[str, Any] | None:
    config: dict[str, Any] = {}
    if request.constraint is not None:
        schema = request.constraint.schema if isinstance(request.constraint, JsonSchema) else {"type": "object"}
        config["format"] = {"type": "json_schema", "schema": schema}
    if request.thinking.effort not in (None, "none"):
        config["effort"] = "low" if request.thinking.effort == "minimal" else request.thinking.effort
    return config or None


class _PlainDelta(msgspec.Struct, tag_field="type", tag="text_delta", forbid_unknown_fields=True):
    text: str


class _PlainEvent(msgspec.Struct, tag_field="type", tag="content_block_delta"):
    """An event with a piece of text and nothing else, which is the common case."""

    delta: _PlainDelta
    error: None = None


_plain_events = msgspec.json.Decoder(_PlainEvent)


class MessagesReader(BaseReplyReader):
    def __init__(self, make_id: NewId = new_id, check_calls: bool = True) -> None:
        super().__init__(make_id, check_calls)
        self._open: dict[object, Block] = {}
        """The open blocks by index, each as its start event had it."""
        self._signature = ""

    def plain_text(self, frame: SseFrame) -> str | None:
        if frame.event not in ("", "content_block_delta"):
            return None
        try:
            return _plain_events.decode(frame.data).delta.text
        except DECODE_ERRORS:
            return None

    def read_frame(self, frame: SseFrame) -> list[Event]:
        data = frame.data.strip()
        if not data or data == "[DONE]":
            return []
        body = reply_fields.parse(data)
        error = error_classifier.error_from_frame(body, frame.event, data)
        if error is not None:
            raise error
        if isinstance(body, dict):
            self._event(body.get("type") or frame.event, body)
        return self._draft.take_events()

    def read_body(self, body: Mapping[str, Any]) -> list[Event]:
        content = body.get("content")
        if not isinstance(content, list | str):
            raise BadAnswer(f"the reply has no content: {reply_fields.excerpt(str(body))}")
        self._draft.usage = usage_fields.read_usage(body.get("usage"))
        for at, block in enumerate(content if isinstance(content, list) else [{"type": "text", "text": content}]):
            if isinstance(block, dict):
                self._start(at, block)
                self._stop(at)
        self._draft.set_finish_reason(body.get("stop_reason") or "end_turn", body.get("stop_sequence"))
        self._draft.finish()
        return self._draft.take_events()

    def end(self) -> list[Event]:
        self._close()
        return self._draft.take_events()

    def _close(self) -> None:
        if not self.can_finish:
            raise StreamCutOff("the stream ended before the reply was complete: it has no stop_reason")
        self._draft.finish()

    def _event(self, kind: object, body: Mapping[str, Any]) -> None:
        draft = self._draft
        if kind == "content_block_delta":
            self._delta(reply_fields.dict_key(body.get("index")), _object(body.get("delta")))
        elif kind == "content_block_start":
            self._start(reply_fields.dict_key(body.get("index")), _object(body.get("content_block")))
        elif kind == "content_block_stop":
            self._stop(reply_fields.dict_key(body.get("index")))
        elif kind == "message_start":
            draft.usage = usage_fields.read_usage(_object(body.get("message")).get("usage"), draft.usage)
        elif kind == "message_delta":
            delta = _object(body.get("delta"))
            draft.usage = usage_fields.read_usage(body.get("usage"), draft.usage)
            if delta.get("stop_reason"):
                draft.set_finish_reason(delta["stop_reason"], delta.get("stop_sequence"))
        elif kind == "message_stop":
            self._close()

    def _start(self, index: object, block: Block) -> None:
        draft, kind = self._draft, block.get("type")
        self._open[index] = {"input": {}, **block}
        if kind == "text":
            draft.add_text(_text(block.get("text")))
        elif kind == "thinking":
            draft.add_reasoning(_text(block.get("thinking")))
            self._signature = _text(block.get("signature"))
        elif kind == "redacted_thinking":
            draft.add_reasoning("", _text(block.get("data")) or None)
        elif kind == "tool_use":
            draft.add_events(draft.calls.add_piece(index, _text(block.get("id")), _text(block.get("name")), ""))

    def _delta(self, index: object, delta: Mapping[str, Any]) -> None:
        draft, kind = self._draft, delta.get("type")
        if kind == "text_delta":
            draft.add_text(_text(delta.get("text")))
        elif kind == "thinking_delta":
            draft.add_reasoning(_text(delta.get("thinking")))
        elif kind == "signature_delta":
            self._signature += _text(delta.get("signature"))
        elif kind == "input_json_delta":
            piece = _text(delta.get("partial_json"))
            if piece:
                self._open.setdefault(index, {})["input"] = None
                draft.add_events(draft.calls.add_piece(index, "", "", piece))

    def _stop(self, index: object) -> None:
        """Close a block. Its initial input counts if no input deltas followed."""
        draft, block = self._draft, self._open.pop(index, {})
        if block.get("type") == "tool_use" and block.get("input") is not None:
            draft.add_events(draft.calls.add_piece(index, "", "", arguments_text(block["input"] or {})))
        elif block.get("type") == "thinking" and self._signature:
            draft.add_reasoning("", self._signature)
            self._signature = ""


def _object(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""
