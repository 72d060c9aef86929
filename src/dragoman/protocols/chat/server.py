"""Server side of chat completions: decodes requests and encodes replies, streams and errors.

stream := role-chunk (content-chunk)* finish-chunk      for every choice, interleaved
          usage-chunk?  "[DONE]"

The fields of a request are decoded in `conversation` (messages), `tools`, `response_format`, `thinking` and `openai`
(sampling).
"""

import re
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec

from dragoman.core.errors import BadRequest, quote
from dragoman.core.events import (
    Event,
    Finished,
    FinishReason,
    ReasoningDelta,
    Started,
    TextDelta,
    TokenLogprob,
    ToolCallDelta,
    ToolCallStart,
    Usage,
)
from dragoman.core.reply import Choice, Reply
from dragoman.core.request import Asked, Delivery, GenerationRequest, Logprobs, Text
from dragoman.protocols import json_body, openai, thinking_fields
from dragoman.protocols.chat import conversation, response_format, tools

MAX_TEMPLATE_OPTIONS = 32
MAX_OPTION_BYTES = 4096
BETWEEN_TEXTS = "\n\n"
"""Joins texts that reasoning or a call separated: a message has only one content."""
OPTION_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")


class ChatFields(openai.SamplingFields, frozen=True, kw_only=True):
    messages: list[conversation.ChatMessage]
    max_tokens: openai.Count | None = None
    max_completion_tokens: openai.Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None
    chat_template: Any = None
    documents: list[dict[str, Any]] | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: openai.Retention | None = None
    safety_identifier: str | None = None


CHAT = Asked("chat", "messages")
OTHER_FIELDS = tools.FIELDS | response_format.FIELDS | thinking_fields.FIELDS


def decode(body: bytes) -> GenerationRequest:
    parsed = json_body.parse(body)
    fields = json_body.convert(parsed, ChatFields)
    _check(fields)
    asked = [CHAT, *openai.requested_features(fields, parsed, OTHER_FIELDS)]
    messages = [conversation.decode(message, f"messages[{at}]", asked) for at, message in enumerate(fields.messages)]
    _note_options(fields, asked)
    offered, choice = tools.decode(parsed, asked)
    options = fields.stream_options or openai.ChatStreamOptions()
    return GenerationRequest(
        model=fields.model or "",
        messages=tuple(messages),
        tools=offered,
        tool_choice=choice,
        constraint=response_format.decode(parsed, asked),
        thinking=thinking_fields.decode(parsed, asked),
        documents=tuple(fields.documents or ()),
        template_options=_template_options(parsed.get("chat_template_kwargs"), asked),
        sampling=openai.decode_sampling(fields),
        keep_seconds=openai.retention_seconds(fields.prompt_cache_retention),
        labels=openai.decode_labels(fields),
        max_tokens=fields.max_completion_tokens or fields.max_tokens,
        stop=openai.decode_stops(fields.stop),
        stop_token_ids=tuple(fields.stop_token_ids or ()),
        ignore_eos=bool(fields.ignore_eos),
        logprobs=Logprobs(fields.top_logprobs or 0) if fields.logprobs else None,
        choices=fields.n or 1,
        delivery=Delivery(stream=bool(fields.stream), usage=bool(options.include_usage)),
        asked=tuple(asked),
    )


def _check(fields: ChatFields) -> None:
    if not fields.messages:
        raise BadRequest("messages: at least one message is needed", param="messages")
    if fields.chat_template is not None:
        raise BadRequest("chat_template: not accepted; the model's own template is used", param="chat_template")
    if fields.top_logprobs is not None and not fields.logprobs:
        raise BadRequest("top_logprobs: requires logprobs: true", param="top_logprobs")


def _note_options(fields: ChatFields, asked: list[Asked]) -> None:
    asked += [Asked(name, name) for name in ("logprobs", "documents", "store") if getattr(fields, name)]
    if fields.service_tier not in (None, "auto", "default"):
        asked.append(Asked("service_tier", "service_tier"))


def _template_options(field: dict[str, Any] | None, asked: list[Asked]) -> dict[str, Any]:
    """Return the template variables that `thinking` does not handle."""
    if field is None:
        return {}
    known = thinking_fields.TemplateSwitches.__struct_fields__
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
        asked.append(Asked("template_options", path))
    return options


class ChatEncoder(openai.StreamEncoder):
    def __init__(self, request: GenerationRequest, created: int) -> None:
        super().__init__(request, created, "chat.completion.chunk")
        self._calls: dict[int, int] = {}
        """The index of the last call of each choice."""
        self._with_text: set[int] = set()
        """Choices that have text."""
        self._interrupted: set[int] = set()
        """Choices with text that was followed by reasoning or a call."""
        self._legacy = tools.is_legacy(request)

    def _text(self, choice: int, text: str) -> dict[str, Any]:
        return _entry(choice, {"content": text})

    def _text_frames(self, choice: int, texts: list[str]) -> bytes:
        self._with_text.add(choice)
        return super()._text_frames(choice, [self._separator(choice), *texts] if choice in self._interrupted else texts)

    def _interrupt(self, choice: int) -> None:
        if choice in self._with_text:
            self._interrupted.add(choice)

    def _separator(self, choice: int) -> str:
        """Return the separator between the next text and an earlier one, if anything came between them."""
        if choice not in self._interrupted:
            return ""
        self._interrupted.remove(choice)
        return BETWEEN_TEXTS

    def _frame(self, choice: int, event: Event) -> bytes:
        if isinstance(event, TextDelta):
            if self._plain:
                return self._text_frames(choice, [event.text]) if event.text else b""
            if not event.text and not event.logprobs:
                return b""
            text = event.text
            if text:
                self._with_text.add(choice)
                text = self._separator(choice) + text
            return self._chunk(_entry(choice, {"content": text}, _logprobs(event.logprobs)))
        if isinstance(event, Started):
            return self._chunk(_entry(choice, {"role": "assistant", "content": ""}))
        if isinstance(event, ReasoningDelta):
            if not event.text:
                return b""
            self._interrupt(choice)
            return self._chunk(_entry(choice, {"reasoning_content": event.text, "reasoning": event.text}))
        if isinstance(event, ToolCallStart):
            self._interrupt(choice)
            self._calls[choice] = self._calls.get(choice, -1) + 1
            return self._call_frame(choice, {"name": event.name, "arguments": ""}, event.id)
        if isinstance(event, ToolCallDelta):
            return self._call_frame(choice, {"arguments": event.arguments}) if event.arguments else b""
        if isinstance(event, Finished):
            self._usages.append(event.usage or Usage())
            return self._chunk(_entry(choice, {}, finish_reason=_finish_reason(event.reason, self._legacy)))
        return b""

    def _call_frame(self, choice: int, function: dict[str, str], call_id: str | None = None) -> bytes:
        """Encode a piece of the current call; only the first piece has an id."""
        index = self._calls[choice]
        if self._legacy:
            # `function_call` holds one call, and such a request allows only one.
            return self._chunk(_entry(choice, {"function_call": function})) if index == 0 else b""
        opening = {} if call_id is None else {"id": call_id, "type": "function"}
        return self._chunk(_entry(choice, {"tool_calls": [{"index": index, **opening, "function": function}]}))


def _entry(
    choice: int, delta: dict[str, Any], logprobs: object = None, finish_reason: str | None = None
) -> dict[str, Any]:
    return {"index": choice, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}


def _logprobs(entries: Sequence[TokenLogprob]) -> dict[str, Any] | None:
    return {"content": openai.encode_logprobs(entries), "refusal": None} if entries else None


def _finish_reason(reason: FinishReason, legacy: bool) -> str:
    return "function_call" if legacy and reason == "tool_calls" else reason


def encode_reply(request: GenerationRequest, created: int, reply: Reply) -> dict[str, Any]:
    legacy = tools.is_legacy(request)
    return {
        "id": request.id,
        "object": "chat.completion",
        "created": created,
        "model": request.model,
        "choices": [_choice(choice, legacy) for choice in reply.choices],
        "usage": openai.encode_usage(reply.usage),
    }


def _choice(choice: Choice, legacy: bool) -> dict[str, Any]:
    return {
        "index": choice.index,
        "message": _reply_message(choice, legacy),
        "logprobs": _logprobs(choice.logprobs),
        "finish_reason": _finish_reason(choice.reason, legacy),
    }


def _reply_message(choice: Choice, legacy: bool) -> dict[str, Any]:
    calls = choice.tool_calls
    text = BETWEEN_TEXTS.join([part.text for part in choice.parts if isinstance(part, Text)])
    content = text or None if calls else text
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if reasoning := choice.reasoning:
        message |= {"reasoning_content": reasoning, "reasoning": reasoning}
    functions = [{"name": call.name, "arguments": call.arguments} for call in calls]
    if functions and legacy:
        message["function_call"] = functions[0]
    elif functions:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": function}
            for call, function in zip(calls, functions, strict=True)
        ]
    return message
