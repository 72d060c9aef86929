"""Errors on the wire: encodes our own, and converts the error responses of many servers to `DragomanError`s.

    error := {error: {message, code?, type?, param?} | text} | {type: "error", error: {…}}     OpenAI, Ollama, Anthropic
           | {object: "error", message, code, type} | {message} | {detail} | {errors: […]} | text         vLLM, proxies

Rules
1. The first of ERROR_RULES that matches the code, type or message of an error decides its class; otherwise the status
   does. `answered` keeps the original response.
2. For Anthropic's clients, the status of an error is its own, except that 503 becomes 529. The message starts with the
   path of the field, because the format has no member for it.
"""

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from dragoman.core import errors
from dragoman.core.errors import DECODE_ERRORS, Answered, DragomanError
from dragoman.protocols.reply_fields import excerpt, list_of, object_of
from dragoman.protocols.retry import retry_after

OVERLOADED = 529
ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    501: "invalid_request_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""The types of Anthropic's errors by status."""
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
        errors.QuotaExhausted,
        "insufficient_quota billing_error billing_not_active insufficient_balance",
        r"exceeded your current quota",  # OpenAI
        r"credit balance is too low",  # Anthropic
        r"insufficient (balance|credits)",  # DeepSeek, OpenRouter
    ),
    _rule(
        errors.ContextTooLong,
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
        r"input token count.{0,200}exceeds the maximum",  # Gemini
        r"`?inputs`? tokens \+ `?max_new_tokens`? must be <=",  # TGI
        r"must be less than max_seq_len",
        r"input is too long for requested model",  # Bedrock
        r"too large for model with \d+ maximum context",  # Mistral
        r"exceeded model token limit",  # Kimi
    ),
    _rule(
        errors.ModelNotFound,
        "model_not_found model_not_exist",
        r"\bmodels? [`'\"][^`'\"]*[`'\"] (does not exist|not found|is not found|is not served|not loaded)",
        r"the model `?[^ ]+`? does not exist",  # OpenAI, vLLM
        r"model .{0,200} not found",  # Ollama, llama.cpp
        r"try pulling it first",  # Ollama
        r"^model: ",  # Anthropic, with the name alone
        r"is not a valid model( id)?|invalid model name|no such model|unknown model",  # OpenRouter, LiteLLM
    ),
    _rule(errors.PreviousResponseNotFound, "previous_response_not_found"),
    _rule(
        errors.ModelLoading,
        "model_loading",
        r"^loading model",  # llama.cpp
        r"model is (currently )?loading|still loading",
    ),
    _rule(errors.ResourceUnavailable, "resource_unavailable"),
    _rule(
        errors.QueueFull,
        "overloaded_error overloaded engine_overloaded",
        r"maximum pending requests exceeded",  # Ollama
        r"\boverloaded\b|server is busy|server busy|at capacity|queue is full",
    ),
    _rule(errors.TokensLimited, "tokens"),  # OpenAI and Dragoman, as the type beside `rate_limit_exceeded`
    _rule(
        errors.RateLimited,
        "rate_limit_exceeded rate_limit_error rate_limited too_many_requests requests",
        r"rate limit",
    ),
    _rule(
        errors.Unauthorized,
        "invalid_api_key authentication_error invalid_authentication",
        r"(incorrect|invalid|missing|no) api[ -]?key|invalid x-api-key",
    ),
    _rule(errors.PermissionDenied, "permission_error permission_denied insufficient_permissions"),
    _rule(errors.InvalidSchema, "invalid_schema invalid_json_schema invalid_function_parameters"),
    _rule(
        errors.UnsupportedParameter,
        "unsupported_parameter unknown_parameter unsupported_value",
        r"extra inputs are not permitted|extra_forbidden|unrecognized request argument",
    ),
    _rule(errors.TooLarge, "request_too_large"),
    _rule(errors.LoopDetected, "loop_detected", r"\bleads back to (the model )?itself\b"),
    _rule(errors.DeadlineExceeded, "deadline_exceeded"),
    _rule(errors.AnswerTimeout, "timeout_error timeout"),
)
BY_STATUS: dict[int, type[DragomanError]] = {
    401: errors.Unauthorized,
    402: errors.QuotaExhausted,
    403: errors.PermissionDenied,
    404: errors.NotFound,
    405: errors.MethodNotAllowed,
    408: errors.RequestTimeout,
    413: errors.TooLarge,
    415: errors.UnsupportedMedia,
    429: errors.RateLimited,
    501: errors.NotSupported,
    503: errors.Unavailable,
    504: errors.AnswerTimeout,
    529: errors.QueueFull,
}
IN_ANY_STATUS = (
    errors.ContextTooLong,
    errors.ModelNotFound,
    errors.QuotaExhausted,
    errors.ModelLoading,
    errors.QueueFull,
)
"""Recognised by message whatever the status: Ollama answers most errors with 500, Groq a long prompt with 429."""
# A pattern that starts with digits may match only at the first digit of a number: else the search is quadratic.
TOKEN_PATTERNS = (
    r"(?<!\d)(\d+) tokens? > \d+ maximum",
    r"exceed context limit: (\d+) \+",
    r"request \((\d+) tokens\)",
    r"input \((\d+) tokens\) is longer",
    r"(?<!\d)(\d+) in the (?:messages|prompt)",
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
    if 300 <= status < 400:
        location = headers.get("location", "no location")
        message = f"the server redirects ({status}) to {location[:200]}; redirects are not followed"
        error: DragomanError = errors.BadAnswer(message)
    else:
        error = _error(fields, status, retry_after(headers))
    error.answered = Answered(status, text, fields.code, fields.type, request_id)
    return error


def error_from_frame(body: object, event: str, text: str, request_id: str | None = None) -> DragomanError | None:
    """Classify an error frame of a stream; None for any other frame."""
    found = object_of(body)
    if not (event == "error" or found.get("error") or "error" in (found.get("type"), found.get("object"))):
        return None
    fields = parse_error(body)
    error = _error(fields, fields.status or 500, None)
    error.answered = Answered(200, text[:MAX_KEPT_BODY], fields.code, fields.type, fields.request_id or request_id)
    return error


def parse_error(body: object) -> ErrorFields:
    if isinstance(body, list) and body:
        body = body[0]
    if not isinstance(body, dict):
        return ErrorFields(body if isinstance(body, str) else "")
    inner = body.get("error") or next(iter(list_of(body.get("errors"))), None) or body
    if not isinstance(inner, dict):
        return ErrorFields(str(inner), request_id=_string(body.get("request_id")))
    code = inner.get("code")
    return ErrorFields(
        message=_message(inner) or _message(body),
        code=_string(code) or _string(object_of(inner.get("details")).get("error_code")),
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


def _string(value: object) -> str | None:
    if isinstance(value, bool) or not isinstance(value, str | int):
        return None
    return str(value)


def _number(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _error(fields: ErrorFields, status: int, delay: float | None) -> DragomanError:
    kind = _kind(fields, status)
    message = fields.message[:2000].strip() or f"the server answered {status} without a message"
    if kind is errors.ContextTooLong:
        tokens = fields.tokens or _find_number(TOKEN_PATTERNS, fields.message)
        limit = fields.limit or _find_number(LIMIT_PATTERNS, fields.message)
        return errors.ContextTooLong(message, param=fields.param, tokens=tokens, limit=limit)
    if issubclass(kind, errors.Unavailable) and delay is None:
        delay = 1
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
    return errors.BadRequest if 400 <= status < 500 else errors.ServerFailed


def _find_number(patterns: tuple[str, ...], message: str) -> int | None:
    plain = message.replace(",", "")
    for pattern in patterns:
        match = re.search(pattern, plain, re.IGNORECASE)
        if match:
            # Longer numbers are not token counts, and int() rejects very long ones.
            return int(match[1][:18])
    return None


def encode_openai_error(error: DragomanError) -> dict[str, Any]:
    return {"error": {"message": error.message, "type": error.type, "param": error.param, "code": error.code}}


def anthropic_status(error: DragomanError) -> int:
    return OVERLOADED if error.status == 503 else error.status


def encode_anthropic_error(error: DragomanError, request_id: str) -> dict[str, Any]:
    default = "invalid_request_error" if error.status < 500 else "api_error"
    encoded: dict[str, Any] = {"type": ERROR_TYPES.get(error.status, default), "message": _anthropic_message(error)}
    if isinstance(error, errors.ThreadUnsupported):
        encoded["details"] = {"error_code": error.code}
    return {"type": "error", "error": encoded, "request_id": request_id}


def _anthropic_message(error: DragomanError) -> str:
    if not isinstance(error, errors.ContextTooLong):
        return error.message if error.message.startswith(error.param or "") else f"{error.param}: {error.message}"
    # Agents compact their context when they recognize this exact message.
    if error.tokens is None or error.limit is None:
        return f"prompt is too long: {error.message}"
    reply = f" (one of {error.limit + 1} is reserved for the reply)" if isinstance(error, errors.NoRoomForReply) else ""
    return f"prompt is too long: {error.tokens} tokens > {error.limit} maximum{reply}"
