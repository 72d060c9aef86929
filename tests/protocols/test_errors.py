"""Classifies error responses of real servers."""

import json
import time
from typing import Any

import pytest

from dragoman.core import errors
from dragoman.protocols import reply_fields
from dragoman.protocols.errors import MAX_KEPT_BODY, error_from_response


def openai(message: str, kind: str | None = None, code: Any = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def anthropic(kind: str, message: str) -> dict[str, Any]:
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": "req_1"}


TOO_LONG: dict[str, tuple[int | None, int | None]] = {
    # OpenAI
    "This model's maximum context length is 8192 tokens. However, your messages resulted in 8545 tokens.": (8545, 8192),
    "Your input exceeds the context window of this model. Please adjust your input and try again.": (None, None),
    # vLLM
    "This model's maximum context length is 4096 tokens. However, you requested 5000 tokens "
    "(4900 in the messages, 100 in the completion).": (4900, 4096),
    "This model's maximum context length is 16384 tokens. However, you requested 8192 output tokens and your prompt "
    "contains at least 8193 input tokens, for a total of at least 16385 tokens.": (8193, 16384),
    "The decoder prompt (length 5000) is longer than the maximum model length of 4096.": (5000, 4096),
    # llama.cpp
    "the request exceeds the available context size, try increasing it": (None, None),
    # Anthropic
    "prompt is too long: 210000 tokens > 200000 maximum": (210000, 200000),
    "input length and `max_tokens` exceed context limit: 188240 + 21333 > 200000, decrease it": (188240, 200000),
    # Ollama, SGLang, LM Studio, Mistral, Gemini
    "the input length exceeds the context length": (None, None),
    "The input (5000 tokens) is longer than the model's context length (4096 tokens).": (5000, 4096),
    "Trying to keep the first 111490 tokens when context the overflows. However, the model is loaded with "
    "context length of only 32768 tokens, which is not enough.": (111490, 32768),
    "Prompt contains 40000 tokens, too large for model with 32768 maximum context length": (40000, 32768),
    "The input token count (2,000,000) exceeds the maximum number of tokens allowed (1,048,576).": (2000000, 1048576),
    # Dragoman
    "this model's maximum context length is 20 tokens, but the prompt has 25": (25, 20),
}


@pytest.mark.parametrize("message", TOO_LONG)
def test_context_too_long(message: str) -> None:
    bodies = (openai(message), {"object": "error", "message": message, "code": 400}, {"error": message})
    for status, body in zip((400, 400, 500), bodies, strict=True):
        error = error_from_response(status, {}, json.dumps(body).encode())
        assert isinstance(error, errors.ContextTooLong), error
        assert (error.tokens, error.limit) == TOO_LONG[message]


def test_context_too_long_by_code() -> None:
    counts = {"n_prompt_tokens": 5000, "n_ctx": 4096}
    body = {"error": {"code": 400, "message": "no", "type": "exceed_context_size_error", **counts}}
    error = error_from_response(400, {}, json.dumps(body).encode())
    assert isinstance(error, errors.ContextTooLong)
    assert (error.tokens, error.limit) == (5000, 4096)
    body = openai("Please reduce the length of the messages or completion.", code="context_length_exceeded")
    assert isinstance(error_from_response(429, {}, json.dumps(body).encode()), errors.ContextTooLong)


ERRORS: dict[type[errors.DragomanError], list[tuple[int, object]]] = {
    errors.ModelNotFound: [
        (404, openai("The model `gpt-9` does not exist or you do not have access to it.", code="model_not_found")),
        (404, openai("The model `mine` does not exist.", "NotFoundError", 404)),
        (404, {"object": "error", "message": "The model `mine` does not exist.", "code": 404}),
        (404, {"error": 'model "llama9" not found, try pulling it first'}),
        (404, openai("model 'llama9' not found", "api_error")),
        (404, anthropic("not_found_error", "model: claude-9")),
        (400, openai("mine is not a valid model ID", code=400)),
    ],
    errors.NotFound: [
        (404, {"detail": "Not Found"}),
        (404, "404 page not found"),
        (404, "<html><h1>Not Found</h1></html>"),
        (404, openai("Unknown request URL: POST /v1/messages", "invalid_request_error", "unknown_url")),
    ],
    errors.MethodNotAllowed: [(405, {"detail": "Method Not Allowed"})],
    errors.RateLimited: [
        (429, openai("Rate limit reached for gpt-4 in organization o on tokens per min", code="rate_limit_exceeded")),
        (429, anthropic("rate_limit_error", "This request would exceed your organization's rate limit")),
        (429, ""),
        (429, openai("rate limit reached: 5 requests per minute", "requests", "rate_limit_exceeded")),
    ],
    errors.TokensLimited: [(429, openai("rate limit reached: 50 tokens per minute", "tokens", "rate_limit_exceeded"))],
    errors.QuotaExhausted: [
        (429, openai("You exceeded your current quota, please check your plan", code="insufficient_quota")),
        (400, anthropic("invalid_request_error", "Your credit balance is too low to access the Anthropic API.")),
        (402, openai("Insufficient Balance")),
    ],
    errors.ResourceUnavailable: [
        (429, openai("the queue of this model is full (64 requests wait)", code="resource_unavailable")),
    ],
    errors.QueueFull: [
        (529, anthropic("overloaded_error", "Overloaded")),
        (503, {"error": "server busy, please try again.  maximum pending requests exceeded"}),
    ],
    errors.ModelLoading: [(503, {"error": {"code": 503, "message": "Loading model", "type": "unavailable_error"}})],
    errors.Unavailable: [(503, "upstream connect error")],
    errors.Unauthorized: [
        (401, openai("Incorrect API key provided: sk-x.", code="invalid_api_key")),
        (401, anthropic("authentication_error", "invalid x-api-key")),
        (401, {"error": "Unauthorized"}),
    ],
    errors.PermissionDenied: [
        (403, anthropic("permission_error", "Your API key does not have permission")),
        (403, openai("not for admin", "invalid_request_error", "insufficient_permissions")),
    ],
    errors.DeadlineExceeded: [
        (504, openai("the request took longer than 5 s", "inference_error", "deadline_exceeded"))
    ],
    errors.TooLarge: [(413, anthropic("request_too_large", "Request exceeds the maximum size"))],
    errors.UnsupportedParameter: [
        (400, openai("Unrecognized request argument supplied: top_k", "invalid_request_error")),
        (400, anthropic("invalid_request_error", "min_p: Extra inputs are not permitted")),
    ],
    errors.BadRequest: [
        (422, {"detail": [{"loc": ["body", "messages"], "msg": "Field required"}]}),
        (418, "I'm a teapot"),
    ],
    errors.ServerFailed: [
        (500, {"error": {"message": "boom", "code": 500}}),
        (500, [{"error": {"message": "boom"}}]),
        (502, "<html>Bad Gateway</html>"),
    ],
    errors.NotSupported: [(501, openai("embeddings are not made here"))],
    errors.AnswerTimeout: [(504, "")],
}


@pytest.mark.parametrize(
    ("kind", "status", "body"), [(kind, *case) for kind, cases in ERRORS.items() for case in cases]
)
def test_other_errors(kind: type[errors.DragomanError], status: int, body: object) -> None:
    data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
    error = error_from_response(status, {}, data)
    assert type(error) is kind, error.message
    assert error.message
    assert error.answered is not None
    assert error.answered.status == status


def test_server_response_is_kept() -> None:
    body = json.dumps(openai("no", "invalid_request_error", "odd")).encode()
    error = error_from_response(400, {"x-request-id": "r1"}, body)
    assert error.answered == errors.Answered(400, body.decode(), "odd", "invalid_request_error", "r1")
    limited = error_from_response(429, {"request-id": "r2", "retry-after": "7"}, b"{}")
    assert limited.answered is not None
    assert (limited.answered.request_id, limited.retry_after) == ("r2", 7)
    assert limited.message == "the server answered 429 without a message"
    within = error_from_response(401, {}, json.dumps(anthropic("authentication_error", "no")).encode())
    assert within.answered is not None
    assert within.answered.request_id == "req_1"


def test_long_body_is_truncated() -> None:
    error = error_from_response(500, {}, b"x" * 1_000_000)
    assert error.answered is not None
    assert len(error.answered.body) == MAX_KEPT_BODY
    assert len(error.message) < 1000


def test_redirect_is_an_error() -> None:
    error = error_from_response(307, {"location": "http://169.254.169.254/"}, b"")
    assert isinstance(error, errors.BadAnswer)


@pytest.mark.parametrize("body", [{"errors": 5}, {"errors": "no"}, {"errors": []}, "\u2028", {"error": " "}])
def test_error_without_message(body: Any) -> None:
    error = error_from_response(422, {}, json.dumps(body).encode())
    assert error.status == 400
    assert error.message.strip()


@pytest.mark.parametrize(
    "message", [f"This model's maximum context length is {'9' * 60_000} tokens.", "input token count " * 3_000]
)
def test_long_message_is_searched_quickly(message: str) -> None:
    begun = time.thread_time()
    error = error_from_response(400, {}, json.dumps(openai(message)).encode())
    assert time.thread_time() - begun < 1
    assert len(error.message) < 3_000


def test_error_body_that_is_not_utf8() -> None:
    error = error_from_response(500, {}, b"\xff\xed{")
    assert isinstance(error, errors.ServerFailed)


def test_reply_that_is_not_utf8() -> None:
    with pytest.raises(errors.BadAnswer, match="invalid JSON"):
        reply_fields.parse(b'{"choices": "\xed"}')
