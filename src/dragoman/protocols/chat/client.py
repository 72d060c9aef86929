"""Client side of chat completions and of completions: encodes requests and decodes replies.

    stream := chunk* "[DONE]"?
    chunk  := {choices: [{delta, finish_reason}], usage?} | error

Rules
1. A request asks for one choice, and only choice 0 is read.
2. The finish reason comes before the usage, so a reply is complete at `[DONE]` or at the end of the stream. A stream
   without a finish reason was cut off.
3. A chunk may have a whole `message` or, as in completions, a `text` instead of a `delta`.
4. `echo` is not sent with a completion: the caller already has the prompt.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec

from dragoman.core.errors import DECODE_ERRORS, BadAnswer
from dragoman.core.request import (
    Constraint,
    GenerationRequest,
    Grammar,
    JsonObject,
    JsonSchema,
    Logprobs,
    Message,
    OneOf,
    Part,
    Reasoning,
    Regex,
    Thinking,
    Tool,
    ToolCall,
    ToolChoice,
)
from dragoman.protocols import reply_fields, request_fields
from dragoman.protocols.json_body import without_nulls
from dragoman.protocols.reply_fields import arguments_text, list_of, object_of, text_of
from dragoman.protocols.reply_reader import ClientProtocol, ReplyReader
from dragoman.protocols.sse import SseFrame

SUPPORTED_FIELDS = request_fields.SAMPLING | {
    *("documents", "template_options", "stop", "stop_token_ids", "ignore_eos", "logprobs", "thinking_budget"),
    *("json_object", "json_schema", "regex", "grammar", "one_of", "prefill"),
    # Without `metadata`: OpenAI accepts it only for stored replies.
    *("user", "prompt_cache_key", "safety_identifier", "service_tier"),
}
COMPLETION_FIELDS = request_fields.SAMPLING | {
    *("prompts", "suffix", "stop", "stop_token_ids", "ignore_eos", "logprobs", "user")
}


def encode(request: GenerationRequest, stream: bool) -> dict[str, Any]:
    body: dict[str, Any] = {
        **_common_fields(request, stream),
        "messages": [encoded for message in request.messages for encoded in _messages(message)],
        "tools": [_tool(tool) for tool in request.tools] or None,
        **({"continue_final_message": True, "add_generation_prompt": False} if request.continues_last else {}),
        "documents": [dict(document) for document in request.documents] or None,
        **_tool_choice(request.tool_choice, request.tools),
        **_thinking(request.thinking, request.template_options),
        **_response_format(request.constraint),
        **_logprobs(request.logprobs),
    }
    return without_nulls(body)


def encode_completion(request: GenerationRequest, stream: bool) -> dict[str, Any]:
    prompt = request.prompt
    body: dict[str, Any] = {
        **_common_fields(request, stream),
        "prompt": prompt if isinstance(prompt, str) else list(prompt or ()),
        "suffix": request.suffix,
        "logprobs": None if request.logprobs is None else request.logprobs.top,
    }
    return without_nulls(body)


def _common_fields(request: GenerationRequest, stream: bool) -> dict[str, Any]:
    options = {"include_usage": True} if stream else None
    return {
        **request_fields.common_fields(request, stream),
        "max_tokens": request.max_tokens,
        "stream_options": options,
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
    return [{"role": role, **name, "content": _content(message.parts)}]


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


def _content(parts: Sequence[Part]) -> str | list[dict[str, Any]]:
    return request_fields.encode_content(parts, "text", lambda url: {"type": "image_url", "image_url": {"url": url}})


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
    return (
        {} if requested is None or requested.top is None else {"logprobs": True, "top_logprobs": requested.top or None}
    )


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
    thought: None = None
    x_groq: None = None
    timings: None = None


_plain_chunks = msgspec.json.Decoder(_PlainChunk)


class ChatReader(ReplyReader):
    ends_with_done = True

    def plain_text(self, frame: SseFrame) -> str | None:
        if frame.event:
            return None
        try:
            return _plain_chunks.decode(frame.data).choices[0].delta.content
        except DECODE_ERRORS:
            return None

    def _read_whole(self, body: Mapping[str, Any]) -> None:
        choice = _first_choice(body)
        if choice is None:
            raise BadAnswer(f"the reply has no choices: {reply_fields.excerpt(str(body))}")
        self._read_event("", body)
        if self._reason is None and "" in (_message(choice).get("content"), choice.get("text")):
            self._set_finish_reason("stop")

    def _read_event(self, kind: str, body: Mapping[str, Any]) -> None:
        for field in (body.get("usage"), object_of(body.get("x_groq")).get("usage"), body.get("timings"), body):
            usage = reply_fields.read_usage(field)
            if usage is not None:
                self._usage, self._has_stray_usage = usage, field is body
                break
        choice = _first_choice(body)
        if choice is None:
            return
        self._add_reasoning(text_of(body.get("thought")))
        self._logprobs += reply_fields.logprobs(choice.get("logprobs"))
        self._read_message(_message(choice))
        if isinstance(choice.get("text"), str):
            self._add_text(choice["text"])
        reason = choice.get("finish_reason") or choice.get("done_reason")
        if reason:
            self._set_finish_reason(reason, choice.get("stop_reason"))

    def _read_message(self, message: Mapping[str, Any]) -> None:
        for kind, text in reply_fields.message_texts(message):
            if kind == "thought":
                self._add_reasoning(text)
            else:
                self._add_text(text)
        self.unknown_parts += reply_fields.unknown_parts(message.get("content"))
        for call in [*list_of(message.get("tool_calls")), message.get("function_call")]:
            if isinstance(call, dict):
                function = call["function"] if isinstance(call.get("function"), dict) else call
                name, arguments = _name(function.get("name")), arguments_text(function.get("arguments"))
                self._add_call(call.get("index"), _name(call.get("id")), name, arguments)


def _message(choice: Mapping[str, Any]) -> Mapping[str, Any]:
    message = choice.get("delta") or choice.get("message") or {}
    if not isinstance(message, dict):
        raise BadAnswer(f"the message of the reply is not an object: {reply_fields.excerpt(str(message))}")
    return message


def _name(value: object) -> str:
    """Return a name or an id, which some servers send as a number."""
    return "" if value is None else str(value)


def _first_choice(body: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return choice 0. A reply in Ollama's own format is a choice itself."""
    choices = body.get("choices")
    if isinstance(choices, list):
        return next((choice for choice in choices if isinstance(choice, dict) and not choice.get("index")), None)
    return body if isinstance(body.get("message"), dict) else None


PROTOCOL = ClientProtocol("chat", "/chat/completions", SUPPORTED_FIELDS, encode, ChatReader)
COMPLETIONS = ClientProtocol("completions", "/completions", COMPLETION_FIELDS, encode_completion, ChatReader)
