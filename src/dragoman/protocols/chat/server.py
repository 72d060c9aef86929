"""Server side of chat completions: decodes requests and encodes replies, streams and errors.

    content   := text | part* | null
    assistant := reasoning? content call*
    stream    := role-chunk (content-chunk)* finish-chunk      for every choice, interleaved
                 usage-chunk?  "[DONE]"

Reasoning is read from the first of `reasoning_content`, `reasoning`, `thought`, `reasoning_details` and
`thinking_blocks` that has text. A tool result does not need a matching call.
"""

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec

from dragoman.core.errors import BadRequest, quote
from dragoman.core.events import (
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
from dragoman.core.features import Feature
from dragoman.core.reply import BETWEEN_PARTS, Choice, Reply
from dragoman.core.request import (
    Asked,
    GenerationRequest,
    Logprobs,
    Message,
    Reasoning,
    Text,
    ToolCall,
    ToolResult,
)
from dragoman.protocols import json_body, openai, response_format, thinking
from dragoman.protocols.chat import tools
from dragoman.protocols.reply_extras import encode_prompt_logprobs, encode_timings

MAX_TEMPLATE_OPTIONS = 32
MAX_OPTION_BYTES = 4096
OPTION_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")


class CalledFunction(msgspec.Struct, frozen=True):
    name: str
    arguments: str | dict[str, Any] | None = None


class CallField(msgspec.Struct, frozen=True):
    function: CalledFunction | None = None
    id: str | None = None
    type: str | None = None


class ChatMessage(msgspec.Struct, frozen=True):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: openai.Content = None
    name: str | None = None
    tool_calls: list[CallField] | None = None
    tool_call_id: str | None = None
    is_error: bool | None = None
    function_call: CalledFunction | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    thought: str | None = None
    reasoning_details: list[dict[str, Any]] | None = None
    thinking_blocks: list[dict[str, Any]] | None = None


class ChatFields(openai.TextFields, frozen=True, kw_only=True):
    messages: list[ChatMessage]
    max_tokens: openai.ReplyLimit | None = None
    max_completion_tokens: openai.ReplyLimit | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None
    prompt_logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None
    chat_template: Any = None
    documents: list[dict[str, Any]] | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: openai.Retention | None = None
    safety_identifier: str | None = None


LEGACY_TOOLS = Asked(Feature.TOOLS, "functions")
"""Asked for by a request whose reply must report calls as `function_call`."""
FEATURES = openai.FEATURES | {name: Feature(name) for name in ("logprobs", "prompt_logprobs", "documents", "store")}
FEATURES["return_token_ids"] = Feature.TOKEN_IDS
OTHER_FIELDS = tools.FIELDS | response_format.FIELDS | thinking.FIELDS
"""Fields that other modules decode."""


def decode(body: bytes) -> GenerationRequest:
    return decode_fields(json_body.parse(body))


def decode_fields(parsed: dict[str, Any]) -> GenerationRequest:
    fields = json_body.convert(parsed, ChatFields)
    if not fields.messages:
        raise BadRequest("messages: at least one message is needed", param="messages")
    if fields.chat_template is not None:
        raise BadRequest("chat_template: not accepted; the model's own template is used", param="chat_template")
    if fields.top_logprobs is not None and not fields.logprobs:
        raise BadRequest("top_logprobs: requires logprobs: true", param="top_logprobs")
    asked = [Asked(Feature.CHAT, "messages"), *openai.requested_features(fields, parsed, OTHER_FIELDS, FEATURES)]
    messages = [_message(message, f"messages[{at}]", asked) for at, message in enumerate(fields.messages)]
    others = {} if parsed.keys().isdisjoint(OTHER_FIELDS) else _decode_others(parsed, asked)
    return GenerationRequest(
        **openai.decode_common(fields),
        **others,
        messages=tuple(messages),
        documents=tuple(fields.documents or ()),
        max_tokens=openai.decode_reply_limit(fields, "max_completion_tokens", "max_tokens"),
        logprobs=_logprobs_wanted(fields),
        choices=fields.n or 1,
        delivery=openai.decode_delivery(fields),
        asked=tuple(asked),
        extra=json_body.extra_fields(parsed, asked),
    )


def _decode_others(parsed: dict[str, Any], asked: list[Asked]) -> dict[str, Any]:
    """Decode `OTHER_FIELDS`, as arguments of a `GenerationRequest`."""
    offered, choice = tools.decode(parsed, asked)
    options = parsed.get("chat_template_kwargs")
    return {
        "tools": offered,
        "tool_choice": choice,
        "constraint": response_format.decode(parsed, asked),
        "thinking": thinking.decode(parsed, asked),
        "template_options": _template_options(options, asked) if options else {},
    }


def _logprobs_wanted(fields: ChatFields) -> Logprobs | None:
    if not fields.logprobs and fields.prompt_logprobs is None:
        return None
    return Logprobs(fields.top_logprobs or 0 if fields.logprobs else None, fields.prompt_logprobs)


def _message(field: ChatMessage, path: str, asked: list[Asked]) -> Message:
    content = openai.decode_content(field.content, openai.CHAT_PARTS, f"{path}.content", asked)
    if field.role == "tool" or field.role == "function":
        call_id = field.tool_call_id or field.name or ""
        return Message("tool", (ToolResult(call_id, content, bool(field.is_error)),), field.name)
    if field.role != "assistant":
        if field.content is None:
            raise BadRequest(f"{path}.content: a {field.role} message needs content", param=f"{path}.content")
        return Message(field.role, content, field.name)
    text = field.reasoning_content or field.reasoning or field.thought
    text = text or _join_text(field.reasoning_details) or _join_text(field.thinking_blocks)
    reasoning = (Reasoning(text),) if text else ()
    return Message("assistant", (*reasoning, *content, *_calls(field, path, asked)), field.name)


def _join_text(blocks: list[dict[str, Any]] | None) -> str:
    texts = [block.get(name) for block in blocks or () for name in ("text", "thinking", "summary")]
    return "".join(text for text in texts if isinstance(text, str))


def _calls(field: ChatMessage, path: str, asked: list[Asked]) -> list[ToolCall]:
    calls = []
    for at, call in enumerate(field.tool_calls or ()):
        inner = f"{path}.tool_calls[{at}]"
        if call.function is not None:
            calls.append(_call(call.id or f"call_{at}", call.function))
        elif call.type in (None, "function"):
            raise json_body.missing_field(f"{inner}.function")
        else:
            # There is no value for other kinds of calls; the feature makes the server reject the request.
            asked.append(Asked(Feature.CUSTOM_TOOLS, f"{inner}.type"))
    if field.function_call is not None:
        calls.append(_call(field.function_call.name, field.function_call))
    return calls


def _call(call_id: str, function: CalledFunction) -> ToolCall:
    arguments = function.arguments
    text = msgspec.json.encode(arguments).decode() if isinstance(arguments, dict) else arguments or "{}"
    return ToolCall(call_id, function.name, text)


def _template_options(field: dict[str, Any], asked: list[Asked]) -> dict[str, Any]:
    """Return the template variables that `thinking` does not handle."""
    known = thinking.TemplateSwitches.__struct_fields__
    options = {name: value for name, value in field.items() if name not in known and value is not None}
    if len(options) > MAX_TEMPLATE_OPTIONS:
        raise BadRequest(f"chat_template_kwargs: at most {MAX_TEMPLATE_OPTIONS} keys", param="chat_template_kwargs")
    for name, value in options.items():
        if not OPTION_NAME.fullmatch(name):
            raise BadRequest(
                f"chat_template_kwargs: {quote(name)} is not a variable name", param="chat_template_kwargs"
            )
        path = f"chat_template_kwargs.{name}"
        if len(msgspec.json.encode(value)) > MAX_OPTION_BYTES:
            raise BadRequest(f"{path}: at most {MAX_OPTION_BYTES} bytes", param=path)
        asked.append(Asked(Feature.TEMPLATE_OPTIONS, path))
    return options


class ChatEncoder(openai.StreamEncoder):
    def __init__(self, request: GenerationRequest, created: int) -> None:
        super().__init__(request, created, "chat.completion.chunk")
        self._request = request
        self._calls: dict[int, int] = {}
        """The index of the last call of each choice."""
        self._interrupted: dict[int, bool] = {}
        """Choices that have text: whether reasoning or a call followed the last text."""
        self._ended_thoughts: dict[int, bool] = {}
        """Choices that have reasoning: whether it is followed by text, a call or a signature."""
        self._legacy = LEGACY_TOOLS in request.asked
        self._reasoning_fields = request.delivery.reasoning_fields

    def _text(self, choice: int, text: str) -> dict[str, Any]:
        return {"index": choice, "delta": {"content": text}, "logprobs": None, "finish_reason": None}

    def _text_frames(self, choice: int, texts: list[str]) -> bytes:
        if self._interrupted.get(choice):
            texts = [BETWEEN_PARTS, *texts]
        self._begin_text(choice)
        return super()._text_frames(choice, texts)

    def _frame(self, choice: int, event: Event) -> bytes:
        logprobs = reason = None
        if isinstance(event, Started):
            self._extras |= _prompt_extras(self._request, event)
            delta: dict[str, Any] | None = {"role": "assistant", "content": ""}
        elif isinstance(event, Finished):
            self._usages.append(event.usage or Usage())
            delta, reason = {}, _finish_reason(event, self._legacy)
        elif isinstance(event, TextDelta):
            delta, logprobs = self._text_delta(choice, event), _logprobs(event.logprobs)
        elif isinstance(event, ReasoningDelta):
            delta = self._reasoning_delta(choice, event)
        else:
            delta = self._call_delta(choice, event)
        token_ids = {}
        if self._delivery.token_ids:
            token_ids["token_ids"] = tokens = getattr(event, "tokens", ())
            delta = {} if delta is None and tokens else delta
        if delta is None:
            return b""
        entry = {"index": choice, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return self._chunk([entry | token_ids])

    def _text_delta(self, choice: int, event: TextDelta) -> dict[str, Any] | None:
        if not event.text:
            return {"content": ""} if event.logprobs else None
        separator = BETWEEN_PARTS if self._interrupted.get(choice) else ""
        self._begin_text(choice)
        return {"content": separator + event.text}

    def _begin_text(self, choice: int) -> None:
        self._interrupted[choice] = False
        if choice in self._ended_thoughts:
            self._ended_thoughts[choice] = True

    def _reasoning_delta(self, choice: int, event: ReasoningDelta) -> dict[str, Any] | None:
        delta = None
        if event.text:
            separator = BETWEEN_PARTS if self._ended_thoughts.get(choice) else ""
            self._ended_thoughts[choice] = False
            delta = dict.fromkeys(self._reasoning_fields, separator + event.text)
            self._interrupt(choice)
        if event.signature and choice in self._ended_thoughts:
            self._ended_thoughts[choice] = True
        return delta

    def _interrupt(self, choice: int) -> None:
        if choice in self._interrupted:
            self._interrupted[choice] = True

    def _call_delta(self, choice: int, event: ToolCallStart | ToolCallDelta) -> dict[str, Any] | None:
        """Encode a piece of a call; only the first piece has an id and a name."""
        if isinstance(event, ToolCallStart):
            self._interrupt(choice)
            if choice in self._ended_thoughts:
                self._ended_thoughts[choice] = True
            self._calls[choice] = self._calls.get(choice, -1) + 1
            opening, function = {"id": event.id, "type": "function"}, {"name": event.name, "arguments": ""}
        elif event.arguments:
            opening, function = {}, {"arguments": event.arguments}
        else:
            return None
        index = self._calls[choice]
        if self._legacy:
            # `function_call` holds one call, and such a request allows only one.
            return {"function_call": function} if index == 0 else None
        return {"tool_calls": [{"index": index, **opening, "function": function}]}


def _logprobs(entries: Sequence[TokenLogprob]) -> dict[str, Any] | None:
    return {"content": openai.encode_logprobs(entries), "refusal": None} if entries else None


def _finish_reason(ended: Finished | Choice, legacy: bool) -> str:
    return "function_call" if legacy and ended.reason == "tool_calls" else ended.unknown_reason or ended.reason


def _prompt_extras(request: GenerationRequest, started: Started) -> dict[str, Any]:
    """Return the fields of a reply about its prompt."""
    extras: dict[str, Any] = {}
    if request.delivery.token_ids:
        extras["prompt_token_ids"] = started.prompt_ids
    if request.logprobs is not None and request.logprobs.prompt is not None:
        extras["prompt_logprobs"] = encode_prompt_logprobs(started.prompt_logprobs)
    return extras


def encode_reply(request: GenerationRequest, created: int, reply: Reply) -> dict[str, Any]:
    legacy = LEGACY_TOOLS in request.asked
    first, delivery = reply.choices[0], request.delivery
    return {
        "id": request.id,
        "object": "chat.completion",
        "created": created,
        "model": request.model,
        "system_fingerprint": request.fingerprint,
        **openai.tier_field(request),
        "choices": [
            {
                "index": choice.index,
                "message": _reply_message(choice, legacy, request.delivery.reasoning_fields),
                "logprobs": _logprobs(choice.logprobs),
                "finish_reason": _finish_reason(choice, legacy),
                **({"token_ids": choice.tokens} if delivery.token_ids else {}),
            }
            for choice in reply.choices
        ],
        "usage": openai.encode_usage(reply.usage),
        **_prompt_extras(request, first.started),
        **({"timings": encode_timings(first)} if delivery.timings else {}),
    }


def _reply_message(choice: Choice, legacy: bool, reasoning_fields: Sequence[str]) -> dict[str, Any]:
    calls = choice.tool_calls
    text = BETWEEN_PARTS.join([part.text for part in choice.parts if isinstance(part, Text)])
    content = text or None if calls else text
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if reasoning := choice.reasoning:
        message |= dict.fromkeys(reasoning_fields, reasoning)
    functions = [{"name": call.name, "arguments": call.arguments} for call in calls]
    if functions and legacy:
        message["function_call"] = functions[0]
    elif functions:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": function}
            for call, function in zip(calls, functions, strict=True)
        ]
    return message
