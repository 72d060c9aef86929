"""What went wrong, from the words that servers have for it.

    error := {error: {message, code?, type?, param?} | text} | {type: "error", error: {…}}     OpenAI, Ollama, Anthropic
           | {object: "error", message, code, type} | {message} | {detail} | {errors: […]} | text         vLLM, proxies

The first row of WORDS that fits an error's code, type or message says what it is; otherwise its status does. `answered`
keeps all that the server said.
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

MOST_BODY = 64 * 1024
"""Of an error's body, how much is kept."""


class Wording(msgspec.Struct, frozen=True):
    kind: type[DragomanError]
    names: frozenset[str] = frozenset()
    """Codes and types that mean it,"""
    words: tuple[re.Pattern[str], ...] = ()
    """and what is found in the messages of those who have no name for it."""


def _row(kind: type[DragomanError], names: str = "", *words: str) -> Wording:
    return Wording(kind, frozenset(names.split()), tuple(re.compile(word, re.IGNORECASE) for word in words))


WORDS = (
    _row(
        QuotaExhausted,
        "insufficient_quota billing_error billing_not_active insufficient_balance",
        r"exceeded your current quota",  # OpenAI
        r"credit balance is too low",  # Anthropic
        r"insufficient (balance|credits)",  # DeepSeek, OpenRouter
    ),
    _row(
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
    _row(
        ModelNotFound,
        "model_not_found model_not_exist",
        r"\bmodels? [`'\"][^`'\"]*[`'\"] (does not exist|not found|is not found|is not served|not loaded)",
        r"the model `?[^ ]+`? does not exist",  # OpenAI, vLLM
        r"model .{0,200} not found",  # Ollama, llama.cpp
        r"try pulling it first",  # Ollama
        r"^model: ",  # Anthropic, with the name alone
        r"is not a valid model( id)?|invalid model name|no such model|unknown model",  # OpenRouter, LiteLLM
    ),
    _row(PreviousResponseNotFound, "previous_response_not_found"),
    _row(
        ModelLoading,
        "model_loading",
        r"^loading model",  # llama.cpp
        r"model is (currently )?loading|still loading",
    ),
    _row(
        QueueFull,
        "overloaded_error overloaded engine_overloaded",
        r"maximum pending requests exceeded",  # Ollama
        r"\boverloaded\b|server is busy|server busy|at capacity|queue is full",
    ),
    _row(TokensLimited, "tokens"),  # OpenAI and Dragoman, as the type beside `rate_limit_exceeded`
    _row(RateLimited, "rate_limit_exceeded rate_limit_error rate_limited too_many_requests requests", r"rate limit"),
    _row(
        Unauthorized,
        "invalid_api_key authentication_error invalid_authentication",
        r"(incorrect|invalid|missing|no) api[ -]?key|invalid x-api-key",
    ),
    _row(PermissionDenied, "permission_error permission_denied insufficient_permissions"),
    _row(InvalidSchema, "invalid_schema invalid_json_schema invalid_function_parameters"),
    _row(
        UnsupportedParameter,
        "unsupported_parameter unknown_parameter unsupported_value",
        r"extra inputs are not permitted|extra_forbidden|unrecognized request argument",
    ),
    _row(TooLarge, "request_too_large"),
    _row(LoopDetected, "loop_detected", r"\bleads back to (the model )?itself\b"),
    _row(DeadlineExceeded, "deadline_exceeded"),
    _row(AnswerTimeout, "timeout_error timeout"),
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
OF_THE_REQUEST = (ContextTooLong, ModelNotFound, QuotaExhausted, ModelLoading, QueueFull)
"""What messages are looked through for, whatever the status: Ollama says 500 for nearly everything, Groq 429 for what
is too long."""
TOKENS = (
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
LIMITS = (
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


class Told(msgspec.Struct, frozen=True):
    """An error as it was sent, whatever its shape."""

    message: str = ""
    code: str | None = None
    type: str | None = None
    param: str | None = None
    status: int | None = None
    """Where the error itself has one."""
    request_id: str | None = None
    tokens: int | None = None
    limit: int | None = None


def of_response(status: int, headers: Mapping[str, str], body: bytes) -> DragomanError:
    """The error that an answer with this status is. Names of headers are in lower case."""
    text = body[:MOST_BODY].decode("utf-8", "replace")
    try:
        told = tell(msgspec.json.decode(body))
    except DECODE_ERRORS:
        told = Told("" if text.lstrip().startswith("<") else excerpt(text.strip()))
    request_id = headers.get("x-request-id") or headers.get("request-id") or told.request_id
    answered = Answered(status, text, told.code, told.type, request_id)
    if 300 <= status < 400:
        where = headers.get("location", "nowhere")
        return _with(BadAnswer(f"the server sends us elsewhere ({status}, to {where[:200]})"), answered)
    return _with(_error(told, status, retry_after(headers)), answered)


def of_frame(body: object, event: str, text: str, request_id: str | None = None) -> DragomanError | None:
    """The error that a frame of a stream is; None for any other frame."""
    if not _is_error(body, event):
        return None
    told = tell(body)
    answered = Answered(200, text[:MOST_BODY], told.code, told.type, told.request_id or request_id)
    return _with(_error(told, told.status or 500, None), answered)


def _is_error(body: object, event: str) -> bool:
    if event == "error":
        return True
    if not isinstance(body, dict):
        return False
    return bool(body.get("error")) or "error" in (body.get("type"), body.get("object"))


def tell(body: object) -> Told:
    if isinstance(body, list) and body:
        body = body[0]
    if not isinstance(body, dict):
        return Told(body if isinstance(body, str) else "")
    several = body.get("errors")
    inner = body.get("error") or (several[0] if isinstance(several, list) and several else None) or body
    if not isinstance(inner, dict):
        return Told(str(inner), request_id=_word(body.get("request_id")))
    code = inner.get("code")
    return Told(
        message=_message(inner) or _message(body),
        code=_word(code) or _detail(inner),
        type=_word(inner.get("type")),
        param=_word(inner.get("param")),
        status=code if isinstance(code, int) and 400 <= code < 600 else None,
        request_id=_word(body.get("request_id")),
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


def _detail(inner: Mapping[str, Any]) -> str | None:
    details = inner.get("details")
    return _word(details.get("error_code")) if isinstance(details, dict) else None


def _word(value: object) -> str | None:
    if isinstance(value, bool) or not isinstance(value, str | int):
        return None
    return str(value)


def _number(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _error(told: Told, status: int, wait: float | None) -> DragomanError:
    kind = _kind(told, status)
    words = told.message[:2000].strip() or f"the server answered {status} without a word"
    if kind is ContextTooLong:
        tokens = told.tokens or _found(TOKENS, told.message)
        return ContextTooLong(words, param=told.param, tokens=tokens, limit=told.limit or _found(LIMITS, told.message))
    if issubclass(kind, Unavailable):
        return kind(words, param=told.param, retry_after=1 if wait is None else wait)
    return kind(words, param=told.param, retry_after=wait)


def _kind(told: Told, status: int) -> type[DragomanError]:
    names = {name for name in (told.code, told.type) if name}
    for row in WORDS:
        if names & row.names:
            return row.kind
    for row in WORDS:
        fits_status = row.kind in OF_THE_REQUEST or status in (200, 400, 422, 500, row.kind.status)
        if fits_status and any(word.search(told.message) for word in row.words):
            return row.kind
    if status in BY_STATUS:
        return BY_STATUS[status]
    return BadRequest if 400 <= status < 500 else ServerFailed


def _found(patterns: tuple[str, ...], message: str) -> int | None:
    plain = message.replace(",", "")
    for pattern in patterns:
        match = re.search(pattern, plain, re.IGNORECASE)
        if match:
            # More digits are no count, and too many cannot be read at all.
            return int(match[1][:18])
    return None


def _with(error: DragomanError, answered: Answered) -> DragomanError:
    error.answered = answered
    return error
