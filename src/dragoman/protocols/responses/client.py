"""The client side of the Responses protocol: encodes requests and reads replies.

    stream := response.created item* (response.completed | response.incomplete | response.failed)
    item   := output_item.added delta* output_item.done

Rules
1. The server stores nothing (`store` is false): each request has the whole conversation, as items without ids.
2. An item is read from its deltas; without deltas, from its `done` event; without that, from the final response.
3. Reasoning is read once, from its text or its summary, whichever comes first.
4. A reply is complete only with an event that ends the response.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dragoman.core.errors import BadAnswer
from dragoman.core.request import (
    Constraint,
    GenerationRequest,
    JsonObject,
    JsonSchema,
    Message,
    Part,
    Reasoning,
    Text,
    Thinking,
    Tool,
    ToolCall,
)
from dragoman.protocols import reply_fields, request_fields
from dragoman.protocols.errors import error_from_frame
from dragoman.protocols.json_body import without_nulls
from dragoman.protocols.reply_fields import arguments_text, dict_key, list_of, object_of, text_of
from dragoman.protocols.reply_reader import ClientProtocol, NewId, ReplyReader, new_id

SUPPORTED_FIELDS = request_fields.SAMPLING | {
    *("stop", "stop_token_ids", "ignore_eos", "json_object", "json_schema"),
    *("user", "metadata", "prompt_cache_key", "safety_identifier", "service_tier"),
}
ENCRYPTED = "reasoning.encrypted_content"
END_EVENTS = {"response.completed", "response.incomplete", "response.done", "response.failed", "response.cancelled"}
TEXT_EVENTS = {"response.output_text.delta", "response.refusal.delta"}
REASONING_EVENTS = {
    "response.reasoning_text.delta": "text",
    "response.reasoning.delta": "text",
    "response.reasoning_summary_text.delta": "summary",
}


def encode(request: GenerationRequest, stream: bool) -> dict[str, Any]:
    thinking, choice = request.thinking, request.tool_choice
    thinks = thinking != Thinking()
    effort = "none" if thinking.is_off else thinking.effort or "medium"
    body: dict[str, Any] = {
        **request_fields.common_fields(request, stream),
        "input": [item for message in request.messages for item in _items(message)],
        "store": False,
        "tools": [_tool(tool) for tool in request.tools] or None,
        "max_output_tokens": request.max_tokens,
        "text": _text_format(request.constraint),
        "reasoning": {"effort": effort} if thinks else None,
        # Models without reasoning reject this field.
        "include": [ENCRYPTED] if thinks and not thinking.is_off else None,
    }
    if request.tools:
        named = {"type": "function", "name": choice.name}
        body["tool_choice"] = named if choice.mode == "named" else None if choice.mode == "auto" else choice.mode
        body["parallel_tool_calls"] = None if choice.parallel else False
    return without_nulls(body)


def _items(message: Message) -> Iterable[dict[str, Any]]:
    if message.role == "tool":
        for result in request_fields.tool_results(message):
            yield {"type": "function_call_output", "call_id": result.call_id, "output": _content(result.content)}
        return
    if message.role != "assistant":
        yield {"type": "message", "role": message.role, "content": _content(message.parts)}
        return
    for part in message.parts:
        if isinstance(part, Reasoning):
            yield _reasoning(part)
        elif isinstance(part, ToolCall):
            call = {"type": "function_call", "call_id": part.id, "name": part.name}
            yield {**call, "arguments": part.arguments or "{}"}
        elif isinstance(part, Text):
            content = [{"type": "output_text", "text": part.text, "annotations": []}]
            yield {"type": "message", "role": "assistant", "content": content}


def _reasoning(part: Reasoning) -> dict[str, Any]:
    if part.signature is None:
        content = [{"type": "reasoning_text", "text": part.text}]
        return {"type": "reasoning", "summary": [], "content": content}
    summary = [{"type": "summary_text", "text": part.text}] if part.text else []
    return {"type": "reasoning", "summary": summary, "encrypted_content": part.signature}


def _content(parts: Sequence[Part]) -> str | list[dict[str, Any]]:
    return request_fields.encode_content(
        parts, "input_text", lambda url: {"type": "input_image", "image_url": url, "detail": "auto"}
    )


def _tool(tool: Tool) -> dict[str, Any]:
    fields = {"type": "function", "name": tool.name, "parameters": tool.parameters or request_fields.EMPTY_SCHEMA}
    if tool.description:
        fields["description"] = tool.description
    return {**fields, "strict": tool.strict}


def _text_format(constraint: Constraint | None) -> dict[str, Any] | None:
    if isinstance(constraint, JsonSchema):
        fields = {"name": constraint.name, "schema": constraint.schema, "strict": constraint.strict}
        return {"format": {"type": "json_schema", **fields}}
    return {"format": {"type": "json_object"}} if isinstance(constraint, JsonObject) else None


class ResponsesReader(ReplyReader):
    def __init__(self, make_id: NewId = new_id, check_calls: bool = True) -> None:
        super().__init__(make_id, check_calls)
        self._first_keys: dict[object, object] = {}
        """The first key of an item at each output index."""
        self._seen: set[object] = set()
        """Items that have had deltas or are done."""
        self._reasoning_kinds: dict[object, str] = {}
        """By item, whether its reasoning is read from the text or the summary."""
        self._summary_index: dict[object, object] = {}
        """By item, the latest part of its summary."""

    @property
    def can_finish(self) -> bool:
        return self.finished

    def _read_whole(self, body: Mapping[str, Any]) -> None:
        output = body.get("output")
        if not isinstance(output, list) or not (output or body.get("status")):
            raise BadAnswer(f"the response has no output: {reply_fields.excerpt(str(body))}")
        self._conclude(body)

    def _read_event(self, kind: str, body: Mapping[str, Any]) -> None:
        item, delta = object_of(body.get("item")), text_of(body.get("delta"))
        at = self._item_key(body, item)
        if kind in TEXT_EVENTS:
            self._seen.add(at)
            self._add_text(delta)
        elif kind in REASONING_EVENTS:
            self._reasoning(at, REASONING_EVENTS[kind], body)
        elif kind == "response.output_item.added":
            if item.get("type") == "function_call":
                # Arguments here are those of the whole call and come again in the `done` event.
                self._call(at, item, "")
        elif kind == "response.function_call_arguments.delta":
            self._seen.add(at)
            self._add_call(at, "", "", delta)
        elif kind == "response.output_item.done":
            self._item(at, item)
        elif kind in END_EVENTS:
            self._conclude(object_of(body.get("response")))

    def _item_key(self, body: Mapping[str, Any], item: Mapping[str, Any]) -> object:
        """Return the key of an item: its id, or its index until an id is known. Some servers omit one of them, or send
        the index 0 for every item."""
        item_id = dict_key(body.get("item_id") or item.get("id"))
        index = dict_key(body.get("output_index"))
        if index is None:
            return item_id
        first = self._first_keys.setdefault(index, index if item_id is None else item_id)
        return first if item_id is None or first == index else item_id

    def _reasoning(self, at: object, kind: str, body: Mapping[str, Any]) -> None:
        if self._reasoning_kinds.setdefault(at, kind) != kind:
            return
        self._seen.add(at)
        part = body.get("summary_index")
        is_next_part = self._summary_index.setdefault(at, part) != part
        self._summary_index[at] = part
        self._add_reasoning("\n\n" * is_next_part + text_of(body.get("delta")))

    def _call(self, at: object, item: Mapping[str, Any], arguments: str) -> None:
        call_id = text_of(item.get("call_id")) or text_of(item.get("id"))
        self._add_call(at, call_id, text_of(item.get("name")), arguments)

    def _item(self, at: object, item: Mapping[str, Any]) -> None:
        """Read a complete item, unless its deltas have been read."""
        kind, is_new = item.get("type"), at not in self._seen
        self._seen.add(at)
        if kind == "function_call":
            self._call(at, item, arguments_text(item.get("arguments")) or "{}" if is_new else "")
        elif kind == "message" and is_new:
            for _, text in reply_fields.content(item.get("content")):
                self._add_text(text)
        elif kind == "reasoning":
            parts = item.get("content") or item.get("summary") if is_new else ()
            text = "\n\n".join(text for _, text in reply_fields.content(parts))
            self._add_reasoning(text, text_of(item.get("encrypted_content")) or None)
        elif kind != "message" and is_new:
            self.unknown_parts.append(item)

    def _conclude(self, response: Mapping[str, Any]) -> None:
        status = response.get("status")
        self._usage = reply_fields.read_usage(response.get("usage"), self._usage)
        error = error_from_frame(response, "error" if status == "failed" else "", reply_fields.excerpt(str(response)))
        if error is not None:
            raise error
        for index, item in enumerate(list_of(response.get("output"))):
            if isinstance(item, dict):
                at = self._item_key({"output_index": index}, item)
                if at not in self._seen:
                    self._item(at, item)
        if status not in (None, "completed", "incomplete"):
            raise BadAnswer(f"the response has the status {str(status)[:50]!r}, expected completed or incomplete")
        reason = object_of(response.get("incomplete_details")).get("reason") if status == "incomplete" else None
        self._set_finish_reason(reason or ("length" if status == "incomplete" else "stop"))
        self._finish()


PROTOCOL = ClientProtocol("responses", "/responses", SUPPORTED_FIELDS, encode, ResponsesReader)
