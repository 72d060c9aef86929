"""Chat completions, as one who asks: requests out, replies in.

    stream := chunk* "[DONE]"?
    chunk  := {choices: [{delta, finish_reason}], usage?} | error

Rules
1. Only the choice 0 is read; one is asked for.
2. The reason for the end comes before the usage, so a reply is complete at `[DONE]` or where the stream ends; one that
   has given no reason until then was cut off.
3. A chunk that has a whole `message` or a `text` where others have a `delta` is read all the same.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec

from dragoman.core.errors import DECODE_ERRORS, BadAnswer, StreamCutOff
from dragoman.core.events import Event
from dragoman.core.request import (
    Constraint,
    GenerationRequest,
    Grammar,
    Image,
    JsonObject,
    JsonSchema,
    Logprobs,
    Message,
    OneOf,
    Reasoning,
    Regex,
    Text,
    Thinking,
    Tool,
    ToolCall,
    ToolChoice,
)
from dragoman.protocols.client import error_classifier, reply_fields, request_fields, usage_fields
from dragoman.protocols.client.reply_draft import DraftReader
from dragoman.protocols.sse import Frame

PATH = "/chat/completions"
SAYS = request_fields.SAMPLING | {
    *("documents", "template_options", "stop", "stop_token_ids", "ignore_eos", "logprobs", "thinking_budget"),
    *("json_object", "json_schema", "regex", "grammar", "one_of"),
    # Not `metadata`: OpenAI takes it only of replies that it shall store.
    *("user", "prompt_cache_key", "safety_identifier", "service_tier"),
}
DONE = "[DONE]"


def encode(request: GenerationRequest, stream: bool) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": request.model or None,
        "messages": [entry for message in request.messages for entry in _entries(message)],
        "tools": [_tool(tool) for tool in request.tools] or None,
        "max_tokens": request.max_tokens,
        "stop": list(request.stop) or None,
        "stop_token_ids": list(request.stop_token_ids) or None,
        "ignore_eos": request.ignore_eos or None,
        "documents": [dict(document) for document in request.documents] or None,
        **request_fields.sampling(request.sampling),
        **_choice(request.tool_choice, request.tools),
        **_thinking(request.thinking, request.template_options),
        **_shape(request.constraint),
        **_logprobs(request.logprobs),
        **request.labels,
    }
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return {name: value for name, value in body.items() if value is not None}


def _entries(message: Message) -> list[dict[str, Any]]:
    if message.role == "tool":
        return [
            {"role": "tool", "tool_call_id": result.call_id, "content": _content(result.content)}
            for result in request_fields.results(message)
        ]
    if message.role == "assistant":
        return [_assistant(message)]
    # Few servers know of developers; all of them take a system.
    role = "system" if message.role == "developer" else message.role
    named = {"name": message.name} if message.name else {}
    return [{"role": role, **named, "content": _content(request_fields.shown(message))}]


def _assistant(message: Message) -> dict[str, Any]:
    thought = "".join(part.text for part in message.parts if isinstance(part, Reasoning))
    calls = [part for part in message.parts if isinstance(part, ToolCall)]
    entry: dict[str, Any] = {"role": "assistant", "content": message.text or (None if calls else "")}
    if thought:
        entry["reasoning_content"] = thought
    if calls:
        entry["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in calls
        ]
    return entry


def _content(parts: Sequence[Text | Image]) -> str | list[dict[str, Any]]:
    if not any(isinstance(part, Image) for part in parts):
        return "".join(part.text for part in parts if isinstance(part, Text))
    return [
        {"type": "text", "text": part.text}
        if isinstance(part, Text)
        else {"type": "image_url", "image_url": {"url": request_fields.address(part)}}
        for part in parts
    ]


def _tool(tool: Tool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    given = {name: value for name, value in function.items() if value}
    return {"type": "function", "function": {**given, "strict": True} if tool.strict else given}


def _choice(choice: ToolChoice, tools: Sequence[Tool]) -> dict[str, Any]:
    if not tools:
        return {}
    named = {"type": "function", "function": {"name": choice.name}}
    told: dict[str, Any] = {} if choice.parallel else {"parallel_tool_calls": False}
    if choice.mode != "auto":
        told["tool_choice"] = named if choice.mode == "named" else choice.mode
    return told


def _thinking(thinking: Thinking, options: Mapping[str, Any]) -> dict[str, Any]:
    switched = {} if thinking.enabled is None else {"enable_thinking": thinking.enabled}
    return {
        "reasoning_effort": thinking.effort,
        "thinking_token_budget": thinking.budget_tokens,
        "chat_template_kwargs": {**options, **switched} or None,
    }


def _shape(constraint: Constraint | None) -> dict[str, Any]:
    if isinstance(constraint, JsonSchema):
        schema = {"name": constraint.name, "schema": constraint.schema, "strict": constraint.strict}
        return {"response_format": {"type": "json_schema", "json_schema": schema}}
    if isinstance(constraint, JsonObject):
        return {"response_format": {"type": "json_object"}}
    if isinstance(constraint, Regex):
        return {"structured_outputs": {"regex": constraint.pattern}}
    if isinstance(constraint, Grammar):
        return {"structured_outputs": {"grammar": constraint.text}}
    if isinstance(constraint, OneOf):
        return {"structured_outputs": {"choice": list(constraint.choices)}}
    return {}


def _logprobs(wanted: Logprobs | None) -> dict[str, Any]:
    return {} if wanted is None else {"logprobs": True, "top_logprobs": wanted.top or None}


class _PlainDelta(msgspec.Struct, forbid_unknown_fields=True):
    content: str
    role: str | None = None
    refusal: None = None
    tool_calls: None = None
    function_call: None = None
    reasoning: None = None
    reasoning_content: None = None


class _PlainChoice(msgspec.Struct):
    delta: _PlainDelta
    index: Literal[0] = 0
    finish_reason: None = None
    logprobs: None = None
    message: None = None
    text: None = None


class _PlainChunk(msgspec.Struct):
    """A chunk that has a piece of text and nothing else, as nearly all have: it need not be searched for more."""

    choices: Annotated[list[_PlainChoice], msgspec.Meta(min_length=1, max_length=1)]
    object: Literal["chat.completion.chunk"]
    type: None = None
    error: None = None
    usage: None = None
    x_groq: None = None
    timings: None = None


_plain_chunks = msgspec.json.Decoder(_PlainChunk)


class Reader(DraftReader):
    def frame(self, frame: Frame) -> list[Event]:
        data = frame.data.strip()
        if data == DONE:
            self._close()
        elif (text := self.plain(frame)) is not None:
            self._draft.say(text)
        elif data:
            body = reply_fields.parse(data)
            error = error_classifier.of_frame(body, frame.event, data)
            if error is not None:
                raise error
            if isinstance(body, dict):
                self._chunk(body)
        return self._draft.take()

    def plain(self, frame: Frame) -> str | None:
        if frame.event:
            return None
        try:
            return _plain_chunks.decode(frame.data).choices[0].delta.content
        except DECODE_ERRORS:
            return None  # another reads it with more patience

    def whole(self, body: Mapping[str, Any]) -> list[Event]:
        if not isinstance(_choice_of(body), dict):
            raise BadAnswer(f"the reply has no choices: {reply_fields.excerpt(str(body))}")
        self._chunk(body)
        self._draft.finish()
        return self._draft.take()

    def end(self) -> list[Event]:
        self._close()
        return self._draft.take()

    def _close(self) -> None:
        if not self.knows_end:
            raise StreamCutOff("the stream ended before the reply was complete: it has no finish_reason")
        self._draft.finish()

    def _chunk(self, body: Mapping[str, Any]) -> None:
        self._count(body)
        choice = _choice_of(body)
        if choice is None:
            return
        message = choice.get("delta") or choice.get("message")
        told = choice.get("logprobs")
        self._draft.logprobs += reply_fields.logprobs(told) if told else ()
        self._message(message if isinstance(message, dict) else {})
        if isinstance(choice.get("text"), str):
            self._draft.say(choice["text"])
        reason = choice.get("finish_reason") or choice.get("done_reason")
        if reason:
            self._draft.end_with(reason, choice.get("stop_reason"))

    def _count(self, body: Mapping[str, Any]) -> None:
        groq = body.get("x_groq")
        places = (body.get("usage"), groq.get("usage") if isinstance(groq, dict) else None, body.get("timings"), body)
        for place in places:
            found = usage_fields.read(place)
            if found is not None:
                self._draft.usage = found
                return

    def _message(self, message: Mapping[str, Any]) -> None:
        draft = self._draft
        for kind, text in reply_fields.said(message):
            if kind == "thought":
                draft.think(text)
            else:
                draft.say(text)
        calls = message.get("tool_calls")
        for piece in calls if isinstance(calls, list) else ():
            if isinstance(piece, dict):
                draft.tell_calls(draft.calls.add(piece))
        legacy = message.get("function_call")
        if isinstance(legacy, dict):
            draft.tell_calls(draft.calls.add(legacy))


def _choice_of(body: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The choice that is read; Ollama's own replies are one themselves."""
    choices = body.get("choices")
    if isinstance(choices, list):
        first = (choice for choice in choices if isinstance(choice, dict) and not choice.get("index"))
        return next(first, None)
    return body if isinstance(body.get("message"), dict) else None
