"""Converts the error responses of many servers to `DragomanError`s.

    error := {error: {message, code?, type?, param?} | text} | {type: "error", error: {…}}     OpenAI, Ollama, Anthropic
           | {object: "error", message, code, type} | {message} | {detail} | {errors: […]} | text         vLLM, proxies

The first of ERROR_RULES that matches the code, type or message of an error decides its class; otherwise the status
does. `answered` keeps the original response.
"""

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from dragoman.core.errors import (
    DECODE_ERRORS,
    Answered,
    AnswerTimeout,
    BadAnswer,
    BadRequest,
    ContextTooLong,
    DeadlineExceeded,
    DragomanError,
    InvalidSchema,
    LoopDetected,
    MethodNotAllowed,
    ModelLoading,
    ModelNotFound,
    NotFound,
    NotSupported,
    PermissionDenied,
    PreviousResponseNotFound,
    QueueFull,
    QuotaExhausted,
    RateLimited,
    RequestTimeout,
    ServerFailed,
    TokensLimited,
    TooLarge,
    Unauthorized,
    Unavailable,
    UnsupportedMedia,
    UnsupportedParameter,
)
from dragoman.protocols.client.reply_fields import excerpt
from dragoman.protocols.client.retry import retry_after

MAX_KEPT_BODY = 64 * 1024
"""How many characters of an error body `answered` keeps."""


class ErrorRule(msgspec.Struct, frozen=True):
    kind: type[DragomanError]
    names: frozenset[str] = frozenset()
    """Values of `code` and `type`."""
    patterns: tuple[re.Pattern[str], ...] = ()
    """Patterns in the messages of servers without such codes."""


def _rule(kind: type[DragomanError], names: str = "", *patterns: str) -> ErrorRule:
    compiled = tuple(re.compile(pattern, re.IGNORECASE) for pattern in patterns)
    return ErrorRule(kind, frozenset(names.split()), compiled)


ERROR_RULES = (
    _rule(
        QuotaExhausted,
        "insufficient_quota billing_error billing_not_active insufficient_balance",
        r"exceeded your current quota",  # OpenAI
        r"credit balance is too low",  # Anthropic
        r"insufficient (balance|credits)",  # DeepSeek, OpenRouter
    ),
    _rule(
        ContextTooLong,
        "context_length_exceeded exceed_context_size_error model_context_window_exceeded context_window_exceeded "
        "ContextWindowExceededError prompt_too_long",
        r"maximum context length",  # OpenAI, vLLM, SGLang, Mistral, OpenRouter, Dragoman
        r"exceeds the context window",  # OpenAI Responses
        r"reduce the length of the (messages|prompt|input)",  # OpenAI, Groq
        r"prompt is too long",  # Anthropic
        r"exceed context limit",  # Anthropic
        r"longer than the (maximum model length|model's context length)",  # vLLM, SGLang
        r"exceeds? the available context size",  # llama.cpp
        r"(input|prompt)( length)? exceeds( the)?( maximum)? context (length|window)",  # Ollama
        r"context (size|length|window) (has been )?exceeded",  # llama.cpp, LM Studio
        r"greater than the context length|context length of only",  # LM Studio
        r"maximum prompt length is \d",  # xAI
        r"input token count.*exceeds the maximum",  # Gemini
        r"`?inputs`? tokens \+ `?max_new_tokens`? must be <=",  # TGI
        r"must be less than max_seq_len",
        r"input is too long for requested model",  # Bedrock
        r"too large for model with \d+ maximum context",  # Mistral
        r"exceeded model token limit",  # Kimi
    ),
    _rule(
        ModelNotFound,
        "model_not_found model_not_exist",
        r"\bmodels? [`'\"][^`'\"]*[`'\"] (does not exist|not found|is not found|is not served|not loaded)",
        r"the model `?[^ ]+`? does not exist",  # OpenAI, vLLM
        r"model .{0,200} not found",  # Ollama, llama.cpp
        r"try pulling it first",  # Ollama
        r"^model: ",  # Anthropic, with the name alone
        r"is not a valid model( id)?|invalid model name|no such model|unknown model",  # OpenRouter, LiteLLM
    ),
    _rule(PreviousResponseNotFound, "previous_response_not_found"),
    _rule(
        ModelLoading,
        "model_loading",
        r"^loading model",  # llama.cpp
        r"model is (currently )?loading|still loading",
    ),
    _rule(
        QueueFull,
        "overloaded_error overloaded engine_overloaded",
        r"maximum pending requests exceeded",  # Ollama
        r"\boverloaded\b|server is busy|server busy|at capacity|queue is full",
    ),
    _rule(TokensLimited, "tokens"),  # OpenAI and Dragoman, as the type beside `rate_limit_exceeded`
    _rule(RateLimited, "rate_limit_exceeded rate_limit_error rate_limited too_many_requests requests", r"rate limit"),
    _rule(
        Unauthorized,
        "invalid_api_key authentication_error invalid_authentication",
        r"(incorrect|invalid|missing|no) api[ -]?key|invalid x-api-key",
    ),
    _rule(PermissionDenied, "permission_error permission_denied insufficient_permissions"),
    _rule(InvalidSchema, "invalid_schema invalid_json_schema invalid_function_parameters"),
    _rule(
        UnsupportedParameter,
        "unsupported_parameter unknown_parameter unsupported_value",
        r"extra inputs are not permitted|extra_forbidden|unrecognized request argument",
    ),
    _rule(TooLarge, "request_too_large"),
    _rule(LoopDetected, "loop_detected", r"\bleads back to (the model )?itself\b"),
    _rule(DeadlineExceeded, "deadline_exceeded"),
    _rule(AnswerTimeout, "timeout_error timeout"),
)
BY_STATUS: dict[int, type[DragomanError]] = {
    401: Unauthorized,
    402: QuotaExhausted,
    403: PermissionDenied,
    404: NotFound,
    405: MethodNotAllowed,
    408: RequestTimeout,
    413: TooLarge,
    415: UnsupportedMedia,
    429: RateLimited,
    501: NotSupported,
    503: Unavailable,
    504: AnswerTimeout,
    529: QueueFull,
}
IN_ANY_STATUS = (ContextTooLong, ModelNotFound, QuotaExhausted, ModelLoading, QueueFull)
"""Recognised by message whatever the status: Ollama answers most errors with 500, Groq a long prompt with 429."""
TOKEN_PATTERNS = (
    r"(\d+) tokens? > \d+ maximum",
    r"exceed context limit: (\d+) \+",
    r"request \((\d+) tokens\)",
    r"input \((\d+) tokens\) is longer",
    r"(\d+) in the (?:messages|prompt)",
    r"\((\d+) in your prompt",
    r"resulted in (\d+) tokens",
    r"(?:has|contains(?: at least)?) (\d+)(?: input)? tokens",
    r"the (?:prompt|input) has (\d+)",
    r"requested (?:about )?(\d+) tokens",
    r"decoder prompt \(length (\d+)\)",
    r"token count \((\d+)\) exceeds",
    r"keep the first (\d+) tokens",
    r"prompt_tokens \((\d+)\)",
)
LIMIT_PATTERNS = (
    r"tokens? > (\d+) maximum",
    r"exceed context limit: \d+ \+ \d+ > (\d+)",
    r"context size \((\d+) tokens\)",
    r"context length \((\d+) tokens\)",
    r"maximum context length (?:is|of) (\d+)",
    r"maximum model length of (\d+)",
    r"context length of only (\d+)",
    r"tokens allowed \(?(\d+)",
    r"with (\d+) maximum context length",
    r"maximum prompt length is (\d+)",
    r"max_seq_len \((\d+)\)",
)


class ErrorFields(msgspec.Struct, frozen=True):
    """The fields of an error, in whatever format it was sent."""

    message: str = ""
    code: str | None = None
    type: str | None = None
    param: str | None = None
    status: int | None = None
    """The status in the body, if any."""
    request_id: str | None = None
    tokens: int | None = None
    limit: int | None = None


def error_from_response(status: int, headers: Mapping[str, str], body: bytes) -> DragomanError:
    """Classify an error response. Header names are in lower case."""
    text = body[:MAX_KEPT_BODY].decode("utf-8", "replace")
    try:
        fields = parse_error(msgspec.json.decode(body))
    except DECODE_ERRORS:
        fields = ErrorFields("" if text.lstrip().startswith("<") else excerpt(text.strip()))
    request_id = headers.get("x-request-id") or headers.get("request-id") or fields.request_id
    answered = Answered(status, text, fields.code, fields.type, request_id)
    if 300 <= status < 400:
        location = headers.get("location", "no location")
        message = f"the server redirects ({status}) to {location[:200]}; redirects are not followed"
        return _attach(BadAnswer(message), answered)
    return _attach(_error(fields, status, retry_after(headers)), answered)


def error_from_frame(body: object, event: str, text: str, request_id: str | None = None) -> DragomanError | None:
    """Classify an error frame of a stream; None for any other frame."""
    if not _is_error(body, event):
        return None
    fields = parse_error(body)
    answered = Answered(200, text[:MAX_KEPT_BODY], fields.code, fields.type, fields.request_id or request_id)
    return _attach(_error(fields, fields.status or 500, None), answered)


def _is_error(body: object, event: str) -> bool:
    if event == "error":
        return True
    if not isinstance(body, dict):
        return False
    return bool(body.get("error")) or "error" in (body.get("type"), body.get("object"))


def parse_error(body: object) -> ErrorFields:
    if isinstance(body, list) and body:
        body = body[0]
    if not isinstance(body, dict):
        return ErrorFields(body if isinstance(body, str) else "")
    several = body.get("errors")
    inner = body.get("error") or (several[0] if isinstance(several, list) and several else None) or body
    if not isinstance(inner, dict):
        return ErrorFields(str(inner), request_id=_string(body.get("request_id")))
    code = inner.get("code")
    return ErrorFields(
        message=_message(inner) or _message(body),
        code=_string(code) or _detail_code(inner),
        type=_string(inner.get("type")),
        param=_string(inner.get("param")),
        status=code if isinstance(code, int) and 400 <= code < 600 else None,
        request_id=_string(body.get("request_id")),
        tokens=_number(inner.get("n_prompt_tokens")),
        limit=_number(inner.get("n_ctx")),
    )


def _message(body: Mapping[str, Any]) -> str:
    for name in ("message", "detail", "error", "msg"):
        found = body.get(name)
        if isinstance(found, str) and found:
            return found
        if isinstance(found, list | dict) and found and name != "error":
            return excerpt(msgspec.json.encode(found))
    return ""


def _detail_code(inner: Mapping[str, Any]) -> str | None:
    details = inner.get("details")
    return _string(details.get("error_code")) if isinstance(details, dict) else None


def _string(value: object) -> str | None:
    if isinstance(value, bool) or not isinstance(value, str | int):
        return None
    return str(value)


def _number(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _error(fields: ErrorFields, status: int, delay: float | None) -> DragomanError:
    kind = _kind(fields, status)
    message = fields.message[:2000].strip() or f"the server answered {status} without a message"
    if kind is ContextTooLong:
        tokens = fields.tokens or _find_number(TOKEN_PATTERNS, fields.message)
        return ContextTooLong(
            message,
            param=fields.param,
            tokens=tokens,
            limit=fields.limit or _find_number(LIMIT_PATTERNS, fields.message),
        )
    if issubclass(kind, Unavailable):
        return kind(message, param=fields.param, retry_after=1 if delay is None else delay)
    return kind(message, param=fields.param, retry_after=delay)


def _kind(fields: ErrorFields, status: int) -> type[DragomanError]:
    names = {name for name in (fields.code, fields.type) if name}
    for rule in ERROR_RULES:
        if names & rule.names:
            return rule.kind
    for rule in ERROR_RULES:
        fits_status = rule.kind in IN_ANY_STATUS or status in (200, 400, 422, 500, rule.kind.status)
        if fits_status and any(pattern.search(fields.message) for pattern in rule.patterns):
            return rule.kind
    if status in BY_STATUS:
        return BY_STATUS[status]
    return BadRequest if 400 <= status < 500 else ServerFailed


def _find_number(patterns: tuple[str, ...], message: str) -> int | None:
    plain = message.replace(",", "")
    for pattern in patterns:
        match = re.search(pattern, plain, re.IGNORECASE)
        if match:
            # Longer numbers are not token counts, and int() rejects very long ones.
            return int(match[1][:18])
    return None


def _attach(error: DragomanError, answered: Answered) -> DragomanError:
    error.answered = answered
    return error
