"""Client side of chat completions: encodes requests and decodes replies.

    stream := chunk* "[DONE]"?
    chunk  := {choices: [{delta, finish_reason}], usage?} | error

Rules
1. A request asks for one choice, and only choice 0 is read.
2. The finish reason comes before the usage, so a reply is complete at `[DONE]` or at the end of the stream. A stream
   without a finish reason was cut off.
3. A chunk may have a whole `message` or a `text` instead of a `delta`.
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
from dragoman.protocols.client.reply_draft import BaseReplyReader
from dragoman.protocols.sse import SseFrame

PATH = "/chat/completions"
SUPPORTED_FIELDS = request_fields.SAMPLING | {
    *("documents", "template_options", "stop", "stop_token_ids", "ignore_eos", "logprobs", "thinking_budget"),
    *("json_object", "json_schema", "regex", "grammar", "one_of"),
    # Without `metadata`: OpenAI accepts it only for stored replies.
    *("user", "prompt_cache_key", "safety_identifier", "service_tier"),
}
DONE = "[DONE]"


def encode(request: GenerationRequest, stream: bool) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": request.model or None,
        "messages": [encoded for message in request.messages for encoded in _messages(message)],
        "tools": [_tool(tool) for tool in request.tools] or None,
        "documents": [dict(document) for document in request.documents] or None,
        **generation_fields(request, stream),
        **_tool_choice(request.tool_choice, request.tools),
        **_thinking(request.thinking, request.template_options),
        **_response_format(request.constraint),
        **_logprobs(request.logprobs),
        **request.labels,
    }
    return {name: value for name, value in body.items() if value is not None}


def generation_fields(request: GenerationRequest, stream: bool) -> dict[str, Any]:
    """Encode the fields that chat completions and completions share; None marks an absent field."""
    return {
        "max_tokens": request.max_tokens,
        "stop": list(request.stop) or None,
        "stop_token_ids": list(request.stop_token_ids) or None,
        "ignore_eos": request.ignore_eos or None,
        **request_fields.sampling_fields(request.sampling),
        "stream": stream or None,
        "stream_options": {"include_usage": True} if stream else None,
    }


def _messages(message: Message) -> list[dict[str, Any]]:
    if message.role == "tool":
        return [
            {"role": "tool", "tool_call_id": result.call_id, "content": _content(result.content)}
            for result in request_fields.tool_results(message)
        ]
    if message.role == "assistant":
        return [_assistant(message)]
    # Few servers support the developer role; all support the system role.
    role = "system" if message.role == "developer" else message.role
    name = {"name": message.name} if message.name else {}
    return [{"role": role, **name, "content": _content(request_fields.text_and_images(message))}]


def _assistant(message: Message) -> dict[str, Any]:
    reasoning = "".join(part.text for part in message.parts if isinstance(part, Reasoning))
    calls = [part for part in message.parts if isinstance(part, ToolCall)]
    encoded: dict[str, Any] = {"role": "assistant", "content": message.text or (None if calls else "")}
    if reasoning:
        encoded["reasoning_content"] = reasoning
    if calls:
        encoded["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in calls
        ]
    return encoded


def _content(parts: Sequence[Text | Image]) -> str | list[dict[str, Any]]:
    if not any(isinstance(part, Image) for part in parts):
        return "".join(part.text for part in parts if isinstance(part, Text))
    return [
        {"type": "text", "text": part.text}
        if isinstance(part, Text)
        else {"type": "image_url", "image_url": {"url": request_fields.image_url(part)}}
        for part in parts
    ]


def _tool(tool: Tool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    function |= {"strict": True} if tool.strict else {}
    return {"type": "function", "function": {name: value for name, value in function.items() if value}}


def _tool_choice(choice: ToolChoice, tools: Sequence[Tool]) -> dict[str, Any]:
    if not tools:
        return {}
    fields: dict[str, Any] = {} if choice.parallel else {"parallel_tool_calls": False}
    if choice.mode == "named":
        fields["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    elif choice.mode != "auto":
        fields["tool_choice"] = choice.mode
    return fields


def _thinking(thinking: Thinking, options: Mapping[str, Any]) -> dict[str, Any]:
    switch = {} if thinking.enabled is None else {"enable_thinking": thinking.enabled}
    return {
        "reasoning_effort": thinking.effort,
        "thinking_token_budget": thinking.budget_tokens,
        "chat_template_kwargs": {**options, **switch} or None,
    }


def _response_format(constraint: Constraint | None) -> dict[str, Any]:
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


def _logprobs(requested: Logprobs | None) -> dict[str, Any]:
    return {} if requested is None else {"logprobs": True, "top_logprobs": requested.top or None}


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
    """A chunk with a piece of text and nothing else, which is the common case and is decoded quickly."""

    choices: Annotated[list[_PlainChoice], msgspec.Meta(min_length=1, max_length=1)]
    object: Literal["chat.completion.chunk"]
    type: None = None
    error: None = None
    usage: None = None
    x_groq: None = None
    timings: None = None


_plain_chunks = msgspec.json.Decoder(_PlainChunk)


class ChatReader(BaseReplyReader):
    def read_frame(self, frame: SseFrame) -> list[Event]:
        data = frame.data.strip()
        if data == DONE:
            self._close()
        elif (text := self.plain_text(frame)) is not None:
            self._draft.add_text(text)
        elif data:
            body = reply_fields.parse(data)
            error = error_classifier.error_from_frame(body, frame.event, data)
            if error is not None:
                raise error
            if isinstance(body, dict):
                self._chunk(body)
        return self._draft.take_events()

    def plain_text(self, frame: SseFrame) -> str | None:
        if frame.event:
            return None
        try:
            return _plain_chunks.decode(frame.data).choices[0].delta.content
        except DECODE_ERRORS:
            return None

    def read_body(self, body: Mapping[str, Any]) -> list[Event]:
        if not isinstance(_first_choice(body), dict):
            raise BadAnswer(f"the reply has no choices: {reply_fields.excerpt(str(body))}")
        self._chunk(body)
        self._draft.finish()
        return self._draft.take_events()

    def end(self) -> list[Event]:
        self._close()
        return self._draft.take_events()

    def _close(self) -> None:
        if not self.can_finish:
            raise StreamCutOff("the stream ended before the reply was complete: it has no finish_reason")
        self._draft.finish()

    def _chunk(self, body: Mapping[str, Any]) -> None:
        self._read_usage(body)
        choice = _first_choice(body)
        if choice is None:
            return
        message = choice.get("delta") or choice.get("message")
        logprobs = choice.get("logprobs")
        self._draft.logprobs += reply_fields.logprobs(logprobs) if logprobs else ()
        self._read_message(message if isinstance(message, dict) else {})
        if isinstance(choice.get("text"), str):
            self._draft.add_text(choice["text"])
        reason = choice.get("finish_reason") or choice.get("done_reason")
        if reason:
            self._draft.set_finish_reason(reason, choice.get("stop_reason"))

    def _read_usage(self, body: Mapping[str, Any]) -> None:
        groq = body.get("x_groq")
        groq_usage = groq.get("usage") if isinstance(groq, dict) else None
        for field in (body.get("usage"), groq_usage, body.get("timings"), body):
            usage = usage_fields.read_usage(field)
            if usage is not None:
                self._draft.usage = usage
                return

    def _read_message(self, message: Mapping[str, Any]) -> None:
        draft = self._draft
        for kind, text in reply_fields.message_texts(message):
            if kind == "thought":
                draft.add_reasoning(text)
            else:
                draft.add_text(text)
        calls = message.get("tool_calls")
        for call in [*(calls if isinstance(calls, list) else ()), message.get("function_call")]:
            if isinstance(call, dict):
                draft.add_events(draft.calls.add(call))


def _first_choice(body: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return choice 0. A reply in Ollama's own format is a choice itself."""
    choices = body.get("choices")
    if isinstance(choices, list):
        return next((choice for choice in choices if isinstance(choice, dict) and not choice.get("index")), None)
    return body if isinstance(body.get("message"), dict) else None
