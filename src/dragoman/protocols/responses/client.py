"""The client side of the Responses protocol: encodes requests and reads replies.

    stream := response.created item* (response.completed | response.incomplete | response.failed)
    item   := output_item.added delta* output_item.done

Rules
1. The server stores nothing (`store` is false): each request has the whole conversation, as items without ids.
2. An item is read from its deltas; without deltas, from its `done` event; without that, from the final response.
3. Reasoning is read once, from its text or its summary, whichever comes first.
4. A reply is complete only with an event that ends the response.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from dragoman.core.errors import BadAnswer, StreamCutOff
from dragoman.core.events import Event
from dragoman.core.request import (
    Constraint,
    GenerationRequest,
    Image,
    JsonObject,
    JsonSchema,
    Message,
    Reasoning,
    Text,
    Thinking,
    Tool,
    ToolCall,
)
from dragoman.protocols.client import error_classifier, reply_fields, request_fields, usage_fields
from dragoman.protocols.client.reply_draft import BaseReplyReader
from dragoman.protocols.client.tool_calls import NewId, arguments_text, new_id
from dragoman.protocols.sse import SseFrame

PATH = "/responses"
SUPPORTED_FIELDS = (
    request_fields.SAMPLING
    | {"stop", "stop_token_ids", "ignore_eos", "json_object", "json_schema"}
    | {*("user", "metadata", "prompt_cache_key", "safety_identifier", "service_tier")}
)
ENCRYPTED = "reasoning.encrypted_content"
END_EVENTS = ("response.completed", "response.incomplete", "response.done")
FAILURE_EVENTS = ("response.failed", "response.cancelled")
TEXT_EVENTS = {"response.output_text.delta", "response.refusal.delta"}
REASONING_EVENTS = {
    "response.reasoning_text.delta": "text",
    "response.reasoning.delta": "text",
    "response.reasoning_summary_text.delta": "summary",
}


def encode(request: GenerationRequest, stream: bool) -> dict[str, Any]:
    thinks = request.thinking != Thinking()
    body: dict[str, Any] = {
        "model": request.model or None,
        "input": [item for message in request.messages for item in _items(message)],
        "store": False,
        "tools": [_tool(tool) for tool in request.tools] or None,
        "max_output_tokens": request.max_tokens,
        "stop": list(request.stop) or None,
        "stop_token_ids": list(request.stop_token_ids) or None,
        "ignore_eos": request.ignore_eos or None,
        "text": _text_format(request.constraint),
        "reasoning": _thinking(request.thinking) if thinks else None,
        # Models without reasoning reject this field.
        "include": [ENCRYPTED] if thinks and not request.thinking.is_off else None,
        "stream": stream or None,
        **request.labels,
        **request_fields.sampling_fields(request.sampling),
    }
    if request.tools:
        body["tool_choice"] = _choice(request)
        body["parallel_tool_calls"] = None if request.tool_choice.parallel else False
    return {name: value for name, value in body.items() if value is not None}


def _items(message: Message) -> Iterable[dict[str, Any]]:
    if message.role == "tool":
        for result in request_fields.tool_results(message):
            yield {
                "type": "function_call_output",
                "call_id": result.call_id,
                "output": _content(result.content, "input"),
            }
        return
    if message.role != "assistant":
        yield {
            "type": "message",
            "role": message.role,
            "content": _content(request_fields.text_and_images(message), "input"),
        }
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


def _content(parts: Iterable[Text | Image], side: str) -> str | list[dict[str, Any]]:
    parts = list(parts)
    if not any(isinstance(part, Image) for part in parts):
        return "".join(part.text for part in parts if isinstance(part, Text))
    return [
        {"type": f"{side}_text", "text": part.text}
        if isinstance(part, Text)
        else {"type": f"{side}_image", "image_url": request_fields.image_url(part), "detail": "auto"}
        for part in parts
    ]


def _tool(tool: Tool) -> dict[str, Any]:
    fields = {"type": "function", "name": tool.name, "parameters": tool.parameters or request_fields.EMPTY_SCHEMA}
    if tool.description:
        fields["description"] = tool.description
    return {**fields, "strict": tool.strict}


def _choice(request: GenerationRequest) -> Any:
    choice = request.tool_choice
    if choice.mode == "named":
        return {"type": "function", "name": choice.name}
    return None if choice.mode == "auto" else choice.mode


def _thinking(thinking: Thinking) -> dict[str, Any]:
    return {"effort": "none" if thinking.is_off else thinking.effort or "medium"}


def _text_format(constraint: Constraint | None) -> dict[str, Any] | None:
    if isinstance(constraint, JsonSchema):
        fields = {"name": constraint.name, "schema": constraint.schema, "strict": constraint.strict}
        return {"format": {"type": "json_schema", **fields}}
    return {"format": {"type": "json_object"}} if isinstance(constraint, JsonObject) else None


class ResponsesReader(BaseReplyReader):
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
        return self._draft.finished

    def read_frame(self, frame: SseFrame) -> list[Event]:
        data = frame.data.strip()
        if not data or data == "[DONE]":
            return []
        body = reply_fields.parse(data)
        error = error_classifier.error_from_frame(body, frame.event, data)
        if error is not None:
            raise error
        if isinstance(body, dict):
            self._event(_text(body.get("type")) or frame.event, body, data)
        return self._draft.take_events()

    def read_body(self, body: Mapping[str, Any]) -> list[Event]:
        if not isinstance(body.get("output"), list):
            raise BadAnswer(f"the response has no output: {reply_fields.excerpt(str(body))}")
        self._conclude(body, reply_fields.excerpt(str(body)))
        return self._draft.take_events()

    def end(self) -> list[Event]:
        if not self.finished:
            raise StreamCutOff("the stream ended before the response was complete")
        return self._draft.take_events()

    def _event(self, kind: str, body: Mapping[str, Any], text: str) -> None:
        at = self._item_key(body, _object(body.get("item")))
        if kind in TEXT_EVENTS:
            self._seen.add(at)
            self._draft.add_text(_text(body.get("delta")))
        elif kind in REASONING_EVENTS:
            self._reasoning(at, REASONING_EVENTS[kind], body)
        elif kind == "response.output_item.added":
            self._added(at, _object(body.get("item")))
        elif kind == "response.function_call_arguments.delta":
            self._seen.add(at)
            self._draft.add_events(self._draft.calls.add_piece(at, "", "", _text(body.get("delta"))))
        elif kind == "response.output_item.done":
            self._item(at, _object(body.get("item")))
        elif kind in END_EVENTS or kind in FAILURE_EVENTS:
            self._conclude(_object(body.get("response")), text)

    def _item_key(self, body: Mapping[str, Any], item: Mapping[str, Any]) -> object:
        """Return the key of an item: its id, or its index until an id is known. Some servers omit one of them, or send
        the index 0 for every item."""
        item_id = reply_fields.dict_key(body.get("item_id") or item.get("id"))
        index = reply_fields.dict_key(body.get("output_index"))
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
        self._draft.add_reasoning("\n\n" * is_next_part + _text(body.get("delta")))

    def _added(self, at: object, item: Mapping[str, Any]) -> None:
        if item.get("type") == "function_call":
            # Arguments here are those of the whole call and come again in the `done` event.
            self._call(at, item, "")

    def _call(self, at: object, item: Mapping[str, Any], arguments: str) -> None:
        call_id = _text(item.get("call_id")) or _text(item.get("id"))
        self._draft.add_events(self._draft.calls.add_piece(at, call_id, _text(item.get("name")), arguments))

    def _item(self, at: object, item: Mapping[str, Any]) -> None:
        """Read a complete item, unless its deltas have been read."""
        kind, is_new = item.get("type"), at not in self._seen
        self._seen.add(at)
        if kind == "function_call":
            self._call(at, item, arguments_text(item.get("arguments")) or "{}" if is_new else "")
        elif kind == "message" and is_new:
            for _, text in reply_fields.content(item.get("content")):
                self._draft.add_text(text)
        elif kind == "reasoning":
            parts = item.get("content") or item.get("summary") if is_new else ()
            text = "\n\n".join(text for _, text in reply_fields.content(parts))
            self._draft.add_reasoning(text, _text(item.get("encrypted_content")) or None)

    def _conclude(self, response: Mapping[str, Any], text: str) -> None:
        draft, status = self._draft, response.get("status")
        draft.usage = usage_fields.read_usage(response.get("usage"), draft.usage)
        error = error_classifier.error_from_frame(response, "error" if status == "failed" else "", text)
        if error is not None:
            raise error
        output = response.get("output")
        for index, item in enumerate(output if isinstance(output, list) else ()):
            if isinstance(item, dict):
                at = self._item_key({"output_index": index}, item)
                if at not in self._seen:
                    self._item(at, item)
        reason = _object(response.get("incomplete_details")).get("reason") if status == "incomplete" else None
        if status in (None, "completed", "incomplete"):
            draft.set_finish_reason(reason or ("length" if status == "incomplete" else "stop"))
            draft.finish()
            return
        raise BadAnswer(f"the response has the status {str(status)[:50]!r}, expected completed or incomplete")


def _object(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""
