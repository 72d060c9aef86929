"""OpenAI chat completions.

stream := role-chunk (content-chunk)* finish-chunk      for every choice, interleaved
          usage-chunk?  "[DONE]"
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec

from dragoman.conversation import (
    Asked,
    Constraint,
    Delivery,
    GenerationRequest,
    Image,
    JsonObject,
    JsonSchema,
    Logprobs,
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
from dragoman.errors import BadRequest
from dragoman.events import (
    Event,
    Finished,
    ReasoningDelta,
    Started,
    TextDelta,
    TokenLogprob,
    ToolCallDelta,
    ToolCallStart,
    Usage,
)
from dragoman.protocols import openai, wire
from dragoman.reply import Choice, Reply


class TextPart(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    text: str


class RefusalPart(msgspec.Struct, frozen=True, tag_field="type", tag="refusal"):
    refusal: str


class ImageAddress(msgspec.Struct, frozen=True):
    url: str
    detail: str | None = None


class ImagePart(msgspec.Struct, frozen=True, tag_field="type", tag="image_url"):
    image_url: ImageAddress


class AudioPart(msgspec.Struct, frozen=True, tag_field="type", tag="input_audio"):
    input_audio: dict[str, Any]


class FilePart(msgspec.Struct, frozen=True, tag_field="type", tag="file"):
    file: dict[str, Any]


ContentPart = TextPart | RefusalPart | ImagePart | AudioPart | FilePart


class CalledFunction(msgspec.Struct, frozen=True):
    name: str
    arguments: str | dict[str, Any] | None = None


class CallField(msgspec.Struct, frozen=True):
    function: CalledFunction
    id: str | None = None
    type: str | None = None


class MessageField(msgspec.Struct, frozen=True):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[CallField] | None = None
    tool_call_id: str | None = None
    function_call: CalledFunction | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class FunctionField(msgspec.Struct, frozen=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolField(msgspec.Struct, frozen=True):
    type: Literal["function"]
    function: FunctionField


class NamedFunction(msgspec.Struct, frozen=True):
    name: str


class NamedTool(msgspec.Struct, frozen=True):
    function: NamedFunction
    type: str = "function"


class SchemaField(msgspec.Struct, frozen=True):
    schema: dict[str, Any]
    name: str = "response"
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, frozen=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: SchemaField | None = None


class ChatFields(openai.SamplingFields, frozen=True, kw_only=True):
    messages: list[MessageField]
    max_tokens: openai.Count | None = None
    max_completion_tokens: openai.Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None
    tools: list[ToolField] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    functions: list[FunctionField] | None = None
    function_call: Literal["none", "auto"] | NamedFunction | None = None
    response_format: ResponseFormat | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high"] | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None


def decode(body: bytes) -> GenerationRequest:
    parsed = wire.parse(body)
    fields = wire.convert(parsed, ChatFields)
    if not fields.messages:
        raise BadRequest("messages: at least one message is needed", param="messages")
    asked = [Asked("chat", "messages"), *openai.asked_fields(fields, parsed)]
    messages = tuple([_message(message, f"messages[{at}]", asked) for at, message in enumerate(fields.messages)])
    _note_options(fields, asked)
    options = fields.stream_options or openai.StreamOptions()
    return GenerationRequest(
        model=fields.model or "",
        messages=messages,
        tools=_tools(fields),
        tool_choice=_tool_choice(fields),
        constraint=_constraint(fields.response_format),
        thinking=Thinking(effort=fields.reasoning_effort),
        sampling=openai.sampling(fields),
        max_tokens=fields.max_completion_tokens or fields.max_tokens,
        stop=openai.stops(fields.stop),
        stop_token_ids=tuple(fields.stop_token_ids or ()),
        ignore_eos=bool(fields.ignore_eos),
        logprobs=Logprobs(fields.top_logprobs or 0) if fields.logprobs else None,
        choices=fields.n or 1,
        delivery=Delivery(stream=bool(fields.stream), usage=bool(options.include_usage)),
        asked=tuple(asked),
    )


def _note_options(fields: ChatFields, asked: list[Asked]) -> None:
    if fields.top_logprobs is not None and not fields.logprobs:
        raise BadRequest("top_logprobs: only together with logprobs: true", param="top_logprobs")
    if fields.logprobs:
        asked.append(Asked("logprobs", "logprobs"))
    if fields.tools:
        asked.append(Asked("tools", "tools"))
    if fields.functions:
        asked.append(Asked("tools", "functions"))
    if _constraint(fields.response_format):
        asked.append(Asked("constraint", "response_format"))
    if fields.reasoning_effort:
        asked.append(Asked("thinking", "reasoning_effort"))
    if fields.store:
        asked.append(Asked("store", "store"))
    if fields.service_tier not in (None, "auto", "default"):
        asked.append(Asked("service_tier", "service_tier"))


def _message(field: MessageField, path: str, asked: list[Asked]) -> Message:
    content = _content(field.content, f"{path}.content", asked)
    if field.role == "tool" or field.role == "function":
        call_id = field.tool_call_id or field.name or ""
        result = ToolResult(call_id, tuple(part for part in content if isinstance(part, Text | Image)))
        return Message("tool", (result,), field.name)
    if field.role != "assistant":
        if field.content is None:
            raise BadRequest(f"{path}.content: a {field.role} message needs content", param=f"{path}.content")
        return Message(field.role, content, field.name)
    thought = field.reasoning_content or field.reasoning
    thoughts = (Reasoning(thought),) if thought else ()
    return Message("assistant", (*thoughts, *content, *_calls(field)), field.name)


def _calls(field: MessageField) -> tuple[ToolCall, ...]:
    calls = [(call.id, call.function) for call in field.tool_calls or ()]
    if field.function_call is not None:
        calls.append((field.function_call.name, field.function_call))
    return tuple(
        ToolCall(call_id or f"call_{at}", function.name, _arguments(function.arguments))
        for at, (call_id, function) in enumerate(calls)
    )


def _arguments(field: str | dict[str, Any] | None) -> str:
    if isinstance(field, dict):
        return msgspec.json.encode(field).decode()
    return field or "{}"


def _content(field: str | list[ContentPart] | None, path: str, asked: list[Asked]) -> tuple[Part, ...]:
    if field is None:
        return ()
    if isinstance(field, str):
        return (Text(field),)
    return tuple(_part(part, f"{path}[{at}]", asked) for at, part in enumerate(field))


def _part(part: ContentPart, path: str, asked: list[Asked]) -> Part:
    if isinstance(part, TextPart):
        return Text(part.text)
    if isinstance(part, RefusalPart):
        return Text(part.refusal)
    if isinstance(part, ImagePart):
        asked.append(Asked("images", path))
        return Image(url=part.image_url.url)
    # No value carries audio or files: the request is refused before anybody looks at the empty text.
    asked.append(Asked("audio" if isinstance(part, AudioPart) else "files", path))
    return Text("")


def _tools(fields: ChatFields) -> tuple[Tool, ...]:
    if not fields.tools and not fields.functions:
        return ()
    functions = [tool.function for tool in fields.tools or ()] + list(fields.functions or ())
    return tuple(
        Tool(function.name, function.description or "", function.parameters, bool(function.strict))
        for function in functions
    )


def _tool_choice(fields: ChatFields) -> ToolChoice:
    parallel = fields.parallel_tool_calls is not False
    choice = fields.tool_choice if fields.tool_choice is not None else fields.function_call
    if isinstance(choice, NamedTool):
        return ToolChoice("named", choice.function.name, parallel)
    if isinstance(choice, NamedFunction):
        return ToolChoice("named", choice.name, parallel)
    return ToolChoice(choice or "auto", None, parallel)


def _constraint(field: ResponseFormat | None) -> Constraint | None:
    if field is None or field.type == "text":
        return None
    if field.type == "json_object":
        return JsonObject()
    if field.json_schema is None:
        path = "response_format.json_schema"
        raise BadRequest(f"{path}: required with type json_schema", param=path)
    schema = field.json_schema
    return JsonSchema(schema.schema, schema.name, bool(schema.strict))


class ChatEncoder(openai.StreamEncoder):
    def __init__(self, request: GenerationRequest, created: int) -> None:
        super().__init__(request, created, "chat.completion.chunk")
        self._calls: dict[int, int] = {}

    def _text(self, choice: int, text: str) -> dict[str, Any]:
        return _entry(choice, {"content": text})

    def _frame(self, choice: int, event: Event) -> bytes:
        if isinstance(event, TextDelta):
            if self._plain:
                return self._text_frames(choice, [event.text]) if event.text else b""
            if not event.text and not event.logprobs:
                return b""
            return self._chunk(_entry(choice, {"content": event.text}, _logprobs(event.logprobs)))
        if isinstance(event, Started):
            return self._chunk(_entry(choice, {"role": "assistant", "content": ""}))
        if isinstance(event, ReasoningDelta):
            delta = {"reasoning_content": event.text, "reasoning": event.text}
            return self._chunk(_entry(choice, delta)) if event.text else b""
        if isinstance(event, ToolCallStart | ToolCallDelta):
            return self._chunk(_entry(choice, {"tool_calls": [self._call(choice, event)]}))
        if isinstance(event, Finished):
            self._usages.append(event.usage or Usage())
            return self._chunk(_entry(choice, {}, finish_reason=event.reason))
        return b""

    def _call(self, choice: int, event: ToolCallStart | ToolCallDelta) -> dict[str, Any]:
        if isinstance(event, ToolCallDelta):
            return {"index": self._calls[choice], "function": {"arguments": event.arguments}}
        self._calls[choice] = self._calls.get(choice, -1) + 1
        function = {"name": event.name, "arguments": ""}
        return {"index": self._calls[choice], "id": event.id, "type": "function", "function": function}


def _entry(
    choice: int, delta: dict[str, Any], logprobs: object = None, finish_reason: str | None = None
) -> dict[str, Any]:
    return {"index": choice, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}


def _logprobs(entries: Sequence[TokenLogprob]) -> dict[str, Any] | None:
    return {"content": openai.encode_logprobs(entries), "refusal": None} if entries else None


def encode_reply(request: GenerationRequest, created: int, reply: Reply) -> dict[str, Any]:
    return {
        "id": request.id,
        "object": "chat.completion",
        "created": created,
        "model": request.model,
        "choices": [_choice(choice) for choice in reply.choices],
        "usage": openai.encode_usage(reply.usage),
    }


def _choice(choice: Choice) -> dict[str, Any]:
    return {
        "index": choice.index,
        "message": _reply_message(choice),
        "logprobs": _logprobs(choice.logprobs),
        "finish_reason": choice.reason,
    }


def _reply_message(choice: Choice) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
    if choice.reasoning:
        message |= {"reasoning_content": choice.reasoning, "reasoning": choice.reasoning}
    if choice.tool_calls:
        message["content"] = choice.text or None
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in choice.tool_calls
        ]
    return message
