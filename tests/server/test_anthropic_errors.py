"""Errors in Anthropic's format: through its SDK, and on the wire."""

import re
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest

from tests.protocols.anthropic_stream import read
from tests.support.anthropic_sdk import anthropic_sdk
from tests.support.requests import raw, talking
from tests.support.server_process import Running, serving

KEY = "sesame"
HELLO: dict[str, Any] = {"model": "echo", "max_tokens": 10, "messages": [{"role": "user", "content": "hello"}]}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
SEEING = {"messages": [{"role": "user", "content": [IMAGE]}]}
VERSION = {"anthropic-version": "2023-06-01"}


@pytest.fixture(scope="module")
def strained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    models = {
        "echo": {"engine": "scripted"},
        "failing": {"engine": "scripted", "fail_after": 0},
        "failing-late": {"engine": "scripted", "fail_after": 2, "replies": [{"output": "one two three"}]},
        "crashing": {"engine": "scripted", "crash_after": 0},
        "hanging": {"engine": "scripted", "hang_after": 0},
        "busy": {"engine": "scripted", "slots": 1, "tokens_per_second": 10, "replies": [{"output": "tick " * 400}]},
        "short": {"engine": "scripted", "context": 20},
        "short-from-afar": {"engine": "scripted", "context": 20, "crash_after": 1000},
        "slow-to-start": {"engine": "scripted", "prefill_seconds": 1},
        "blind": {"engine": "tests.support.engines:Calling"},
    }
    limits = {"queue": 0, "stall_seconds": 2, "body_bytes": 10_000, "keepalive_seconds": 0.3, "header_bytes": 4096}
    config = {"models": models, "default": "echo", "api_keys": [KEY], "limits": limits}
    with serving(tmp_path_factory.mktemp("strained"), config) as running:
        yield running


@pytest.fixture(scope="module")
def sdk(strained: Running) -> Iterator[anthropic.Anthropic]:
    with anthropic_sdk(strained, key=KEY) as client:
        yield client


@pytest.fixture(scope="module")
def http(strained: Running) -> Iterator[httpx.Client]:
    with talking(strained, {"x-api-key": KEY}) as client:
        yield client


LONG = {"messages": [{"role": "user", "content": "x" * 100}]}
ERRORS: dict[str, tuple[dict[str, Any], type[anthropic.APIStatusError], str, str]] = {
    "value": ({"extra_body": {"temperature": 9}}, anthropic.BadRequestError, "invalid_request_error", "temperature: "),
    "limit": (
        {"stop_sequences": ["x"] * 100},
        anthropic.BadRequestError,
        "invalid_request_error",
        "^stop_sequences: at most 32 stop strings",
    ),
    "context": (
        LONG | {"model": "short"},
        anthropic.BadRequestError,
        "invalid_request_error",
        "^prompt is too long: 25 tokens > 19 maximum$",
    ),
    "context of a worker": (
        LONG | {"model": "short-from-afar"},
        anthropic.BadRequestError,
        "invalid_request_error",
        "^prompt is too long: 25 tokens > 19 maximum$",
    ),
    "strict": (
        {"extra_body": {"temperature": 0.5}, "extra_headers": {"x-dragoman-strict": "true"}},
        anthropic.BadRequestError,
        "invalid_request_error",
        "'temperature'",
    ),
    "no such model": ({"model": "claude"}, anthropic.NotFoundError, "not_found_error", "models: echo, "),
    "too large": (
        {"messages": [{"role": "user", "content": "x" * 20_000}]},
        anthropic.ContentTooLargeError,
        "request_too_large",
        "larger than 10000 bytes",
    ),
    "engine fails": ({"model": "failing"}, anthropic.InternalServerError, "api_error", "fails after 0"),
    "not supported": (
        SEEING | {"model": "blind"},
        anthropic.HTTPNotImplementedError,
        "invalid_request_error",
        re.escape("messages[0].content[0]"),
    ),
    "engine dies": ({"model": "crashing"}, anthropic.InternalServerError, "api_error", "died"),
    "engine hangs": (
        {"model": "hanging"},
        anthropic.GatewayTimeoutError,
        "timeout_error",
        "produced nothing",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_error_types_and_statuses(sdk: anthropic.Anthropic, name: str) -> None:
    fields, kind, told, words = ERRORS[name]
    with pytest.raises(kind) as raised:
        sdk.messages.create(**HELLO | fields)
    error = raised.value
    assert (type(error), error.type) == (kind, told)
    assert error.request_id
    assert error.response.headers["x-request-id"] == error.request_id
    assert re.search(words, error.api_message or "")
    body: Any = error.body
    assert body == {
        "type": "error",
        "error": {"type": told, "message": error.api_message},
        "request_id": error.request_id,
    }


def test_full_queue_is_529_with_retry_after(sdk: anthropic.Anthropic) -> None:
    busy = HELLO | {"model": "busy"}
    with sdk.messages.create(**busy, stream=True) as stream:
        next(stream)
        with pytest.raises(anthropic.OverloadedError) as raised:
            sdk.messages.create(**busy)
        assert (raised.value.status_code, raised.value.type) == (529, "overloaded_error")
        assert int(raised.value.response.headers["retry-after"]) >= 1
    patient = sdk.with_options(max_retries=5)
    assert patient.messages.create(**busy | {"max_tokens": 1}).content[0].type == "text"


def test_missing_and_wrong_keys(strained: Running) -> None:
    for given in (
        {"x-api-key": "open"},
        {"authorization": "Bearer open"},
        {"authorization": f"Bearer {KEY}", "x-api-key": "x"},
        {},
    ):
        with talking(strained, given) as client:
            refused(client.post("/v1/messages", json=HELLO), 401, "authentication_error")
            refused(client.get("/v1/models", headers=VERSION), 401, "authentication_error")
    for given in (
        {"x-api-key": KEY},
        {"authorization": f"Bearer {KEY}"},
        {"authorization": f"Bearer {KEY}", "x-api-key": KEY},
    ):
        with talking(strained, given) as client:
            assert client.post("/v1/messages?beta=true", json=HELLO).status_code == 200


def refused(response: httpx.Response, status: int, kind: str) -> str:
    assert response.status_code == status, response.text
    body = response.json()
    assert list(body) == ["type", "error", "request_id"]
    assert (body["type"], body["error"]["type"]) == ("error", kind)
    assert body["request_id"] == response.headers["request-id"] == response.headers["x-request-id"]
    message: str = body["error"]["message"]
    return message


def test_errors_before_routing(http: httpx.Client) -> None:
    refused(http.post("/v1/messages/batches", json={}), 404, "not_found_error")
    refused(http.get("/v1/files", headers=VERSION), 404, "not_found_error")
    refused(http.get("/v1/messages"), 405, "invalid_request_error")
    refused(http.get("/v1/models/nothing", headers=VERSION), 404, "not_found_error")
    refused(http.post("/v1/messages", json=HELLO, headers={"host": "!"}), 400, "invalid_request_error")
    refused(http.post("/v1/messages", content=b"{"), 400, "invalid_request_error")
    refused(
        http.post("/v1/messages", content=b"{}", headers={"content-type": "text/plain"}), 415, "invalid_request_error"
    )
    assert list(http.get("/v1/files").json()) == ["error"]
    assert list(http.post("/v1/chat/completions", json={}, headers=VERSION).json()) == ["error"]


def test_headers_too_large(strained: Running) -> None:
    lines = b"Host: localhost\r\nanthropic-version: 2023-06-01\r\n"
    answer = raw(strained, b"POST /v1/messages HTTP/1.1\r\n" + lines + b"x: " + b"y" * 5000 + b"\r\n\r\n")
    refused(answer.response, 431, "invalid_request_error")


def test_501_is_not_retried(http: httpx.Client) -> None:
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        response = http.post(path, json=HELLO | SEEING | {"model": "blind"})
        assert "messages[0].content[0]" in refused(response, 501, "invalid_request_error")
        assert response.headers["x-should-retry"] == "false"
    refused(http.post("/v1/messages/count_tokens", json=HELLO | {"model": "blind"}), 501, "invalid_request_error")


def test_model_list_pagination(http: httpx.Client) -> None:
    def page(query: str) -> httpx.Response:
        return http.get(f"/v1/models?{query}", headers=VERSION)

    last = page("after_id=slow-to-start").json()
    assert ([model["id"] for model in last["data"]], last["has_more"]) == (["blind"], False)
    beyond = page("after_id=blind").json()
    assert beyond == {"data": [], "has_more": False, "first_id": None, "last_id": None}
    first = page("before_id=failing&limit=5").json()
    assert ([model["id"] for model in first["data"]], first["has_more"]) == (["echo"], False)
    for query, param in [
        ("limit=0", "limit"),
        ("limit=x", "limit"),
        ("limit=1001", "limit"),
        ("after_id=x", "after_id"),
    ]:
        assert refused(page(query), 400, "invalid_request_error").startswith(f"{param}: ")


def test_error_after_first_byte(http: httpx.Client, sdk: anthropic.Anthropic) -> None:
    response = http.post("/v1/messages", json=HELLO | {"model": "failing-late", "stream": True})
    assert response.status_code == 200
    payloads = read(response.content)
    assert [payload["type"] for payload in payloads][-2:] == ["content_block_delta", "error"]
    assert payloads[-1]["error"] == {"type": "api_error", "message": "the script fails after 2 tokens"}
    assert payloads[-1]["request_id"] == response.headers["request-id"]
    with (
        sdk.messages.create(**HELLO | {"model": "failing-late"}, stream=True) as stream,
        pytest.raises(anthropic.APIStatusError),
    ):
        list(stream)


def test_long_prefill_sends_comments(http: httpx.Client) -> None:
    response = http.post("/v1/messages", json=HELLO | {"model": "slow-to-start", "stream": True})
    assert response.text.startswith(": keep-alive\n\n")
    assert read(response.content)[-1] == {"type": "message_stop"}


def test_ignored_parameters_are_reported(http: httpx.Client) -> None:
    fields = {"temperature": 0.5, "top_k": 3, "speed": "fast", "metadata": {"user_id": "u"}}
    response = http.post("/v1/messages", json=HELLO | fields)
    assert response.headers["x-dragoman-ignored"] == "temperature, top_k, speed"
    begun = HELLO["messages"] + [{"role": "assistant", "content": "Well,"}]
    assert http.post("/v1/messages", json=HELLO | {"messages": begun}).headers["x-dragoman-ignored"] == "messages[1]"
    strict = http.post("/v1/messages", json=HELLO | fields, headers={"x-dragoman-strict": "true"})
    assert "temperature" in refused(strict, 400, "invalid_request_error")


@pytest.mark.parametrize("version", ["2023-01-01", "2023-06-01", "2026-10-21"])
def test_version_and_beta_headers(http: httpx.Client, version: str) -> None:
    headers = {"anthropic-version": version, "anthropic-beta": "unheard-of-2030-01-01,other"}
    response = http.post("/v1/messages?beta=true", json=HELLO, headers=headers)
    assert response.json()["content"] == [{"type": "text", "text": "hello"}]
    assert response.headers["request-id"] == response.json()["id"]


def test_head_request_to_root(strained: Running) -> None:
    with talking(strained) as client:
        assert client.head("/").status_code == 200
