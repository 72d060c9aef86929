"""OpenAI Responses, as one who asks: requests out, replies in.

    stream := response.created item* (response.completed | response.incomplete | response.failed)
    item   := output_item.added delta* output_item.done

Rules
1. Nothing is kept over there (`store` is false): the whole conversation goes along, as items without ids.
2. An item is told by its deltas; of one that had none, what it is when it is done; of one that nobody mentioned, what
   the response has in the end.
3. A thought is told once, as its text or as its summary, whichever comes first.
4. Only an event that ends the response completes a reply.
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
from dragoman.protocols.client.reply_draft import DraftReader
from dragoman.protocols.client.tool_calls import NewId, arguments_text, new_id
from dragoman.protocols.sse import Frame

PATH = "/responses"
SAYS = (
    request_fields.SAMPLING
    | {"stop", "stop_token_ids", "ignore_eos", "json_object", "json_schema"}
    | {*("user", "metadata", "prompt_cache_key", "safety_identifier", "service_tier")}
)
SEALED = "reasoning.encrypted_content"
ENDS = ("response.completed", "response.incomplete", "response.done")
FAILED = ("response.failed", "response.cancelled")
TEXTS = {"response.output_text.delta", "response.refusal.delta"}
THOUGHTS = {
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
        "text": _shape(request.constraint),
        "reasoning": _thinking(request.thinking) if thinks else None,
        # Models that do not think refuse to hear of it.
        "include": [SEALED] if thinks and not request.thinking.is_off else None,
        "stream": stream or None,
        **request.labels,
        **request_fields.sampling(request.sampling),
    }
    if request.tools:
        body["tool_choice"] = _choice(request)
        body["parallel_tool_calls"] = None if request.tool_choice.parallel else False
    return {name: value for name, value in body.items() if value is not None}


def _items(message: Message) -> Iterable[dict[str, Any]]:
    if message.role == "tool":
        for result in request_fields.results(message):
            yield {
                "type": "function_call_output",
                "call_id": result.call_id,
                "output": _content(result.content, "input"),
            }
        return
    if message.role != "assistant":
        yield {"type": "message", "role": message.role, "content": _content(request_fields.shown(message), "input")}
        return
    for part in message.parts:
        if isinstance(part, Reasoning):
            yield _thought(part)
        elif isinstance(part, ToolCall):
            call = {"type": "function_call", "call_id": part.id, "name": part.name}
            yield {**call, "arguments": part.arguments or "{}"}
        elif isinstance(part, Text):
            content = [{"type": "output_text", "text": part.text, "annotations": []}]
            yield {"type": "message", "role": "assistant", "content": content}


def _thought(part: Reasoning) -> dict[str, Any]:
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
        else {"type": f"{side}_image", "image_url": request_fields.address(part), "detail": "auto"}
        for part in parts
    ]


def _tool(tool: Tool) -> dict[str, Any]:
    told = {"type": "function", "name": tool.name, "parameters": tool.parameters or request_fields.TOOL_ARGUMENTS}
    if tool.description:
        told["description"] = tool.description
    return {**told, "strict": tool.strict}


def _choice(request: GenerationRequest) -> Any:
    choice = request.tool_choice
    if choice.mode == "named":
        return {"type": "function", "name": choice.name}
    return None if choice.mode == "auto" else choice.mode


def _thinking(thinking: Thinking) -> dict[str, Any]:
    return {"effort": "none" if thinking.is_off else thinking.effort or "medium"}


def _shape(constraint: Constraint | None) -> dict[str, Any] | None:
    if isinstance(constraint, JsonSchema):
        told = {"name": constraint.name, "schema": constraint.schema, "strict": constraint.strict}
        return {"format": {"type": "json_schema", **told}}
    return {"format": {"type": "json_object"}} if isinstance(constraint, JsonObject) else None


class Reader(DraftReader):
    def __init__(self, make_id: NewId = new_id, check_calls: bool = True) -> None:
        super().__init__(make_id, check_calls)
        self._names: dict[object, object] = {}
        """The first name of an item at each index."""
        self._told: set[object] = set()
        """Items that have said something, or are done."""
        self._thoughts: dict[object, str] = {}
        """How the thoughts are told, as text or as a summary, by item,"""
        self._paragraph: dict[object, object] = {}
        """and which part of a summary was told last."""

    @property
    def knows_end(self) -> bool:
        return self._draft.finished

    def frame(self, frame: Frame) -> list[Event]:
        data = frame.data.strip()
        if not data or data == "[DONE]":
            return []
        body = reply_fields.parse(data)
        error = error_classifier.of_frame(body, frame.event, data)
        if error is not None:
            raise error
        if isinstance(body, dict):
            self._event(_text(body.get("type")) or frame.event, body, data)
        return self._draft.take()

    def whole(self, body: Mapping[str, Any]) -> list[Event]:
        if not isinstance(body.get("output"), list):
            raise BadAnswer(f"the response has no output: {reply_fields.excerpt(str(body))}")
        self._conclude(body, reply_fields.excerpt(str(body)))
        return self._draft.take()

    def end(self) -> list[Event]:
        if not self.finished:
            raise StreamCutOff("the stream ended before the response was complete")
        return self._draft.take()

    def _event(self, kind: str, body: Mapping[str, Any], text: str) -> None:
        at = self._place(body, _object(body.get("item")))
        if kind in TEXTS:
            self._told.add(at)
            self._draft.say(_text(body.get("delta")))
        elif kind in THOUGHTS:
            self._thought(at, THOUGHTS[kind], body)
        elif kind == "response.output_item.added":
            self._added(at, _object(body.get("item")))
        elif kind == "response.function_call_arguments.delta":
            self._told.add(at)
            self._draft.tell_calls(self._draft.calls.take(at, "", "", _text(body.get("delta"))))
        elif kind == "response.output_item.done":
            self._item(at, _object(body.get("item")))
        elif kind in ENDS or kind in FAILED:
            self._conclude(_object(body.get("response")), text)

    def _place(self, body: Mapping[str, Any], item: Mapping[str, Any]) -> object:
        """What an item is known by: its id, or its index until somebody tells an id. Servers leave out the one or the
        other, or say index 0 of everything."""
        name, index = (
            reply_fields.key(body.get("item_id") or item.get("id")),
            reply_fields.key(body.get("output_index")),
        )
        if index is None:
            return name
        known = self._names.setdefault(index, index if name is None else name)
        return known if name is None or known == index else name

    def _thought(self, at: object, kind: str, body: Mapping[str, Any]) -> None:
        if self._thoughts.setdefault(at, kind) != kind:
            return
        self._told.add(at)
        part = body.get("summary_index")
        parted = self._paragraph.setdefault(at, part) != part
        self._paragraph[at] = part
        self._draft.think("\n\n" * parted + _text(body.get("delta")))

    def _added(self, at: object, item: Mapping[str, Any]) -> None:
        if item.get("type") == "function_call":
            # Arguments that are here already are those of the whole call, and come again when it is done.
            self._call(at, item, "")

    def _call(self, at: object, item: Mapping[str, Any], arguments: str) -> None:
        call_id = _text(item.get("call_id")) or _text(item.get("id"))
        self._draft.tell_calls(self._draft.calls.take(at, call_id, _text(item.get("name")), arguments))

    def _item(self, at: object, item: Mapping[str, Any]) -> None:
        """An item that is done: all of it, unless it has been told."""
        kind, is_new = item.get("type"), at not in self._told
        self._told.add(at)
        if kind == "function_call":
            self._call(at, item, arguments_text(item.get("arguments")) or "{}" if is_new else "")
        elif kind == "message" and is_new:
            for _, text in reply_fields.content(item.get("content")):
                self._draft.say(text)
        elif kind == "reasoning":
            told = item.get("content") or item.get("summary") if is_new else ()
            self._draft.think(_paragraphs(told), _text(item.get("encrypted_content")) or None)

    def _conclude(self, response: Mapping[str, Any], text: str) -> None:
        draft, status = self._draft, response.get("status")
        draft.usage = usage_fields.read(response.get("usage"), draft.usage)
        error = error_classifier.of_frame(response, "error" if status == "failed" else "", text)
        if error is not None:
            raise error
        output = response.get("output")
        for index, item in enumerate(output if isinstance(output, list) else ()):
            if isinstance(item, dict):
                at = self._place({"output_index": index}, item)
                if at not in self._told:
                    self._item(at, item)
        why = _object(response.get("incomplete_details")).get("reason") if status == "incomplete" else None
        if status in (None, "completed", "incomplete"):
            draft.end_with(why or ("length" if status == "incomplete" else "stop"))
            draft.finish()
            return
        raise BadAnswer(f"the response is not complete, but {str(status)[:50]}")


def _paragraphs(parts: object) -> str:
    """The texts of a thought; those of a summary stand apart."""
    texts = [text for _, text in reply_fields.content(parts)]
    return "\n\n".join(texts)


def _object(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""
