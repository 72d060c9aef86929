"""Errors as exceptions of the official SDK."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.support.openai_sdk import Asking, content, sdk
from tests.support.requests import recorded
from tests.support.server_process import Running, serving


@pytest.fixture(scope="module")
def strained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server with short timeouts, a small context and keys."""
    models = {
        "echo": {"engine": "scripted"},
        "failing": {"engine": "scripted", "fail_after": 0},
        "failing-late": {"engine": "scripted", "fail_after": 2, "replies": [{"output": "one two three"}]},
        "crashing": {"engine": "scripted", "crash_after": 0},
        "hanging": {"engine": "scripted", "hang_after": 0},
        "busy": {"engine": "scripted", "slots": 1, "tokens_per_second": 10, "replies": [{"output": "tick " * 400}]},
        "short": {"engine": "scripted", "context": 20},
    }
    limits = {"queue": 0, "stall_seconds": 2, "body_bytes": 10_000}
    config = {"models": models, "default": "echo", "api_keys": ["sesame"], "limits": limits}
    with serving(tmp_path_factory.mktemp("strained"), config) as running:
        yield running


@pytest.fixture(scope="module")
def strained_client(strained: Running) -> Iterator[openai.OpenAI]:
    with sdk(strained, key="sesame") as client:
        yield client


TOOL = {"type": "custom", "custom": {"name": "f"}}
ERRORS: list[tuple[str, dict[str, Any], type[openai.APIStatusError], int, str, str | None]] = [
    ("value", {"temperature": 9}, openai.BadRequestError, 400, "invalid_value", "temperature"),
    (
        "path",
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "smell"}]}]},
        openai.BadRequestError,
        400,
        "invalid_value",
        "messages[0].content[1].type",
    ),
    (
        "context",
        {"model": "short", "messages": [{"role": "user", "content": "x" * 100}]},
        openai.BadRequestError,
        400,
        "context_length_exceeded",
        "messages",
    ),
    (
        "strict",
        {"seed": 1, "extra_headers": {"x-dragoman-strict": "true"}},
        openai.BadRequestError,
        400,
        "unsupported_parameter",
        "seed",
    ),
    ("no such model", {"model": "gpt-9"}, openai.NotFoundError, 404, "model_not_found", "model"),
    (
        "too large",
        {"messages": [{"role": "user", "content": "x" * 20_000}]},
        openai.APIStatusError,
        413,
        "request_too_large",
        None,
    ),
    ("engine fails", {"model": "failing"}, openai.InternalServerError, 500, "inference_error", None),
    ("not supported", {"tools": [TOOL]}, openai.InternalServerError, 501, "not_implemented", "tools[0].type"),
    ("engine dies", {"model": "crashing"}, openai.InternalServerError, 502, "engine_died", None),
    ("engine hangs", {"model": "hanging"}, openai.InternalServerError, 504, "engine_timeout", None),
]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("fields", "kind", "status", "code", "param"), [row[1:] for row in ERRORS], ids=[row[0] for row in ERRORS]
)
def test_errors(
    strained_client: openai.OpenAI,
    stream: bool,
    fields: dict[str, Any],
    kind: type[openai.APIStatusError],
    status: int,
    code: str,
    param: str | None,
) -> None:
    asked: dict[str, Any] = {
        "model": "echo",
        "messages": [{"role": "user", "content": "hello"}],
        "stream": stream,
    } | fields
    with pytest.raises(kind) as raised:
        strained_client.chat.completions.create(**asked)
    error = raised.value
    assert (type(error), error.status_code, error.code, error.param) == (kind, status, code, param)
    assert error.request_id
    assert error.type
    if code == "context_length_exceeded":
        assert "maximum context length" in error.message
    if code == "model_not_found":
        assert "echo" in error.message


def test_full_queue_is_503_with_retry_after(strained_client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "hello"}]
    with strained_client.chat.completions.create(model="busy", messages=messages, stream=True) as stream:
        next(stream)
        with pytest.raises(openai.InternalServerError) as raised:
            strained_client.chat.completions.create(model="busy", messages=messages)
        assert (raised.value.status_code, raised.value.code) == (503, "overloaded")
        assert int(raised.value.response.headers["retry-after"]) >= 1
        assert next(stream).choices[0].delta.content
    # The SDK retries, and by then the other client has disconnected.
    patient = strained_client.with_options(max_retries=5)
    assert content(patient.chat.completions.create(model="busy", messages=messages, max_tokens=1)) == "tick"


def test_keys(strained: Running) -> None:
    with sdk(strained, key="open") as client:
        for call in (client.models.list, lambda: client.completions.create(model="echo", prompt="x")):
            with pytest.raises(openai.AuthenticationError) as raised:
                call()
            assert (raised.value.status_code, raised.value.code) == (401, "invalid_api_key")
    with sdk(strained, key="sesame") as client:
        assert client.models.retrieve("echo").id == "echo"


def test_error_after_first_byte_breaks_the_stream(strained_client: openai.OpenAI) -> None:
    with strained_client.chat.completions.create(
        model="failing-late", messages=[{"role": "user", "content": "hello"}], stream=True
    ) as stream:
        pieces = [next(stream).choices[0].delta.content for _ in range(3)]
        with pytest.raises(openai.APIError, match="fails after 2 tokens") as raised:
            next(stream)
        assert not isinstance(raised.value, openai.APIStatusError)
        assert raised.value.code == "inference_error"
    assert pieces == ["", "one ", "two "]


def test_client_timeout(scripted: Running) -> None:
    with sdk(scripted, timeout=0.3) as client, pytest.raises(openai.APITimeoutError):
        client.chat.completions.create(model="slow", messages=[{"role": "user", "content": "hello"}])
    assert recorded(scripted, status=499, model="slow")


def test_invalid_parameters_of_a_real_model(smol: Asking) -> None:
    wrong: list[tuple[dict[str, Any], str, str]] = [
        ({"logit_bias": {"49152": 1}}, "logit_bias", "vocabulary of 49152 tokens"),
        ({"top_logprobs": 2}, "top_logprobs", "logprobs: true"),
        ({"max_tokens": 1, "messages": [{"role": "user", "content": "word " * 2100}]}, "messages", "2048 tokens"),
    ]
    for fields, param, words in wrong:
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError, match=words) as raised:
                smol.chat("hello", stream=stream, **fields)
            assert raised.value.param == param
    assert raised.value.code == "context_length_exceeded"
    assert "maximum context length" in raised.value.message
