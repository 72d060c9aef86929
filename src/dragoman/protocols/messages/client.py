"""Client side of Anthropic messages: encodes requests and decodes replies.

    stream := message_start block* message_delta message_stop             with pings anywhere
    block  := content_block_start content_block_delta* content_block_stop

Rules
1. Leading system and developer messages become `system`. Later ones become user messages.
2. Consecutive messages of one role are merged; tool results come first in a message.
3. Reasoning is sent only with its original signature, because servers reject it without one.
4. A server continues a last message of the assistant.
5. `message_stop`, or the end of a stream after its `stop_reason`, completes a reply.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from dragoman.core.errors import DECODE_ERRORS, BadAnswer
from dragoman.core.request import (
    GenerationRequest,
    JsonSchema,
    Message,
    Part,
    Reasoning,
    Text,
    Thinking,
    Tool,
    ToolChoice,
)
from dragoman.protocols import reply_fields, request_fields
from dragoman.protocols.json_body import without_nulls
from dragoman.protocols.messages.blocks import SHORT_SECONDS, Block, encode_part
from dragoman.protocols.reply_fields import arguments_text, dict_key, object_of, text_of
from dragoman.protocols.reply_reader import ClientProtocol, NewId, ReplyReader, new_id
from dragoman.protocols.sse import SseFrame

SUPPORTED_FIELDS = frozenset(
    ("temperature", "top_p", "top_k", "seed", "stop", "thinking_budget", "json_object", "json_schema")
) | {"cache_control", "user", "prefill"}
DEFAULT_MAX_TOKENS = 4096
"""`max_tokens` is required; every Anthropic model can generate this many."""
MIN_THINKING_BUDGET = 1024
CACHEABLE = ("text", "image", "tool_use", "tool_result")
"""Block types that accept `cache_control`."""
TOOL_CHOICES = {"auto": "auto", "none": "none", "required": "any", "named": "tool"}


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
    return without_nulls(body)


def _add_cache_control(body: dict[str, Any], request: GenerationRequest) -> None:
    """Mark the ends of the prompt parts that the request wants cached."""
    control = {"type": "ephemeral"} | ({"ttl": "1h"} if request.keep_seconds > SHORT_SECONDS else {})
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
        blocks = [encode_part(part) for part in message.parts if _can_send(part)]
        if merged and merged[-1]["role"] == role:
            merged[-1]["content"] += blocks
        else:
            merged.append({"role": role, "content": blocks})
    for entry in merged:
        entry["content"].sort(key=lambda block: block["type"] != "tool_result")
    # Servers reject a message without content, but there must be at least one message.
    return [entry for entry in merged if entry["content"]] or [{"role": "user", "content": ""}]


def _can_send(part: Part) -> bool:
    """Servers reject empty texts and reasoning without a signature."""
    return part.signature is not None if isinstance(part, Reasoning) else part != Text("")


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


class MessagesReader(ReplyReader):
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

    def _read_whole(self, body: Mapping[str, Any]) -> None:
        content = body.get("content")
        if not isinstance(content, list | str):
            raise BadAnswer(f"the reply has no content: {reply_fields.excerpt(str(body))}")
        self._usage = reply_fields.read_usage(body.get("usage"))
        for at, block in enumerate(content if isinstance(content, list) else [{"type": "text", "text": content}]):
            if isinstance(block, dict):
                self._start(at, block)
                self._stop_block(at)
        if body.get("stop_reason"):
            self._set_finish_reason(body["stop_reason"], body.get("stop_sequence"))

    def _read_event(self, kind: str, body: Mapping[str, Any]) -> None:
        index, delta = dict_key(body.get("index")), object_of(body.get("delta"))
        if kind == "content_block_delta":
            self._delta(index, delta)
        elif kind == "content_block_start":
            self._start(index, object_of(body.get("content_block")))
        elif kind == "content_block_stop":
            self._stop_block(index)
        elif kind == "message_start":
            self._usage = reply_fields.read_usage(object_of(body.get("message")).get("usage"), self._usage)
        elif kind == "message_delta":
            self._usage = reply_fields.read_usage(body.get("usage"), self._usage)
            if delta.get("stop_reason"):
                self._set_finish_reason(delta["stop_reason"], delta.get("stop_sequence"))
        elif kind == "message_stop":
            self._close()

    def _start(self, index: object, block: Block) -> None:
        kind = block.get("type")
        self._open[index] = {"input": {}, **block}
        if kind == "text":
            self._add_text(text_of(block.get("text")))
        elif kind == "thinking":
            self._add_reasoning(text_of(block.get("thinking")))
            self._signature = text_of(block.get("signature"))
        elif kind == "redacted_thinking":
            self._add_reasoning("", text_of(block.get("data")) or None)
        elif kind == "tool_use":
            self._add_call(index, text_of(block.get("id")), text_of(block.get("name")), "")
        elif kind is not None:
            self._open[index] = part = dict(block)
            self.unknown_parts.append(part)

    def _delta(self, index: object, delta: Mapping[str, Any]) -> None:
        kind = delta.get("type")
        if kind == "text_delta":
            self._add_text(text_of(delta.get("text")))
        elif kind == "thinking_delta":
            self._add_reasoning(text_of(delta.get("thinking")))
        elif kind == "signature_delta":
            self._signature += text_of(delta.get("signature"))
        elif kind == "input_json_delta":
            block, piece = self._open.setdefault(index, {}), text_of(delta.get("partial_json"))
            if block.get("type") not in (None, "tool_use"):
                block.setdefault("deltas", []).append(delta)
            elif piece:
                block["input"] = None
                self._add_call(index, "", "", piece)

    def _stop_block(self, index: object) -> None:
        """Close a block. Its initial input counts if no input deltas followed."""
        block = self._open.pop(index, {})
        if block.get("type") == "tool_use" and block.get("input") is not None:
            self._add_call(index, "", "", arguments_text(block["input"] or {}))
        elif block.get("type") == "thinking" and self._signature:
            self._add_reasoning("", self._signature)
            self._signature = ""


PROTOCOL = ClientProtocol("messages", "/messages", SUPPORTED_FIELDS, encode, MessagesReader)
