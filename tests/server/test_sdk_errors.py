"""Errors as exceptions of the official SDKs, and in Anthropic's format on the wire."""

import re
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest

from tests.protocols.anthropic_stream import read
from tests.support.raw_http import connect, raw
from tests.support.raw_http import read as receive
from tests.support.requests import recorded, talking
from tests.support.sdk import anthropic_sdk, content, sdk
from tests.support.server_process import Running, server_fixture

KEY = "sesame"
SCRIPTED = {"engine": "scripted"}
MODELS: dict[str, Any] = {
    "echo": SCRIPTED,
    "failing": SCRIPTED | {"fail_after": 0},
    "failing-late": SCRIPTED | {"fail_after": 2, "replies": [{"output": "one two three"}]},
    "crashing": SCRIPTED | {"crash_after": 0},
    "hanging": SCRIPTED | {"hang_after": 0},
    "busy": SCRIPTED | {"slots": 1, "tokens_per_second": 10, "replies": [{"output": "tick " * 400}]},
    "short": SCRIPTED | {"context": 20},
    "short-from-afar": SCRIPTED | {"context": 20, "crash_after": 1000},
    "last": SCRIPTED,
    "blind": {"engine": "tests.support.engines:Calling"},
}
VERSION = {"anthropic-version": "2023-06-01"}


def said(text: Any) -> Any:
    return [{"role": "user", "content": text}]


HELLO: dict[str, Any] = {"model": "echo", "max_tokens": 10, "messages": said("hello")}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
SEEING = {"messages": said([IMAGE]), "model": "blind"}
STRICT = {"x-dragoman-strict": "true"}


LIMITS = {"queue": 0, "stall_seconds": 1, "body_bytes": 10_000, "header_bytes": 4096}
strained = server_fixture({"models": MODELS, "default": "echo", "api_keys": [KEY], "limits": LIMITS})


@pytest.fixture(scope="module")
def chat(strained: Running) -> Iterator[openai.OpenAI]:
    with sdk(strained, key=KEY) as client:
        yield client


@pytest.fixture(scope="module")
def messages(strained: Running) -> Iterator[anthropic.Anthropic]:
    with anthropic_sdk(strained, key=KEY) as client:
        yield client


@pytest.fixture(scope="module")
def http(strained: Running) -> Iterator[httpx.Client]:
    with talking(strained, {"x-api-key": KEY}) as client:
        yield client


TOOL = {"type": "custom", "custom": {"name": "f"}}
PARTS = [{"type": "text", "text": "a"}, {"type": "smell"}]
OPENAI: dict[str, tuple[dict[str, Any], type[openai.APIStatusError], int, str, str | None]] = {
    "value": ({"temperature": 9}, openai.BadRequestError, 400, "invalid_value", "temperature"),
    "path": ({"messages": said(PARTS)}, openai.BadRequestError, 400, "invalid_value", "messages[0].content[1].type"),
    "context": (
        {"model": "short", "messages": said("x" * 100)},
        *(openai.BadRequestError, 400, "context_length_exceeded", "messages"),
    ),
    "strict": ({"seed": 1, "extra_headers": STRICT}, openai.BadRequestError, 400, "unsupported_parameter", "seed"),
    "no such model": ({"model": "gpt-9"}, openai.NotFoundError, 404, "model_not_found", "model"),
    "too large": ({"messages": said("x" * 20_000)}, openai.APIStatusError, 413, "request_too_large", None),
    "engine fails": ({"model": "failing"}, openai.InternalServerError, 500, "inference_error", None),
    "not supported": ({"tools": [TOOL]}, openai.InternalServerError, 501, "not_implemented", "tools[0].type"),
    "engine dies": ({"model": "crashing"}, openai.InternalServerError, 502, "engine_died", None),
    "engine hangs": ({"model": "hanging"}, openai.InternalServerError, 504, "engine_timeout", None),
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("name", OPENAI)
def test_openai_errors(chat: openai.OpenAI, stream: bool, name: str) -> None:
    fields, kind, status, code, param = OPENAI[name]
    with pytest.raises(kind) as raised:
        chat.chat.completions.create(**HELLO | {"stream": stream} | fields)
    error = raised.value
    assert (type(error), error.status_code, error.code, error.param) == (kind, status, code, param)
    assert error.request_id
    assert error.type
    assert code != "context_length_exceeded" or "maximum context length" in error.message
    assert code != "model_not_found" or "echo" in error.message


TOO_LONG = "^prompt is too long: 25 tokens > 19 maximum$"
ANTHROPIC: dict[str, tuple[dict[str, Any], type[anthropic.APIStatusError], str, str]] = {
    "value": ({"extra_body": {"temperature": 9}}, anthropic.BadRequestError, "invalid_request_error", "temperature: "),
    "limit": (
        {"stop_sequences": ["x"] * 100},
        *(anthropic.BadRequestError, "invalid_request_error", "^stop_sequences: at most 32 stop strings"),
    ),
    **{
        model: (
            {"messages": said("x" * 100), "model": model},
            *(anthropic.BadRequestError, "invalid_request_error", TOO_LONG),
        )
        for model in ("short", "short-from-afar")
    },
    "strict": (
        {"extra_body": {"temperature": 0.5}, "extra_headers": STRICT},
        *(anthropic.BadRequestError, "invalid_request_error", "'temperature'"),
    ),
    "no such model": ({"model": "claude"}, anthropic.NotFoundError, "not_found_error", "models: echo, "),
    "too large": (
        {"messages": said("x" * 20_000)},
        *(anthropic.ContentTooLargeError, "request_too_large", "larger than 10000 bytes"),
    ),
    "engine fails": ({"model": "failing"}, anthropic.InternalServerError, "api_error", "fails after 0"),
    "not supported": (
        SEEING,
        *(anthropic.HTTPNotImplementedError, "invalid_request_error", re.escape("messages[0].content[0]")),
    ),
    "engine dies": ({"model": "crashing"}, anthropic.InternalServerError, "api_error", "died"),
    "engine hangs": ({"model": "hanging"}, anthropic.GatewayTimeoutError, "timeout_error", "produced nothing"),
}


@pytest.mark.parametrize("name", ANTHROPIC)
def test_anthropic_errors(messages: anthropic.Anthropic, name: str) -> None:
    fields, kind, told, words = ANTHROPIC[name]
    with pytest.raises(kind) as raised:
        messages.messages.create(**HELLO | fields)
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


def test_full_queue(chat: openai.OpenAI, messages: anthropic.Anthropic) -> None:
    busy = HELLO | {"model": "busy"}
    with chat.chat.completions.create(**busy, stream=True) as stream:
        next(stream)
        with pytest.raises(openai.InternalServerError) as raised:
            chat.chat.completions.create(**busy)
        assert (raised.value.status_code, raised.value.code) == (503, "overloaded")
        with pytest.raises(anthropic.OverloadedError) as overloaded:
            messages.messages.create(**busy)
        assert (overloaded.value.status_code, overloaded.value.type) == (529, "overloaded_error")
        for response in (raised.value.response, overloaded.value.response):
            assert int(response.headers["retry-after"]) >= 1
        assert next(stream).choices[0].delta.content
    # The SDKs retry, and by then the other client has disconnected.
    once = busy | {"max_tokens": 1}
    assert content(chat.with_options(max_retries=5).chat.completions.create(**once)) == "tick"
    assert messages.with_options(max_retries=5).messages.create(**once).content[0].type == "text"


def test_keys(strained: Running) -> None:
    with sdk(strained, key="open") as client:
        for call in (client.models.list, lambda: client.completions.create(model="echo", prompt="x")):
            with pytest.raises(openai.AuthenticationError) as raised:
                call()
            assert (raised.value.status_code, raised.value.code) == (401, "invalid_api_key")
    with talking(strained, {"x-api-key": "open"}) as http:
        refused(http.post("/v1/messages", json=HELLO), 401, "authentication_error")
        refused(http.get("/v1/models", headers=VERSION), 401, "authentication_error")
    bearer = {"authorization": f"Bearer {KEY}"}
    for headers in ({"x-api-key": KEY}, bearer, bearer | {"x-api-key": KEY}):
        with talking(strained, headers) as http:
            assert http.post("/v1/messages?beta=true", json=HELLO).status_code == 200


def test_error_after_first_byte(chat: openai.OpenAI, messages: anthropic.Anthropic, http: httpx.Client) -> None:
    late = HELLO | {"model": "failing-late"}
    with chat.chat.completions.create(**late, stream=True) as stream:
        pieces = [next(stream).choices[0].delta.content for _ in range(3)]
        with pytest.raises(openai.APIError, match="fails after 2 tokens") as raised:
            next(stream)
        assert not isinstance(raised.value, openai.APIStatusError)
        assert raised.value.code == "inference_error"
    assert pieces == ["", "one ", "two "]
    with messages.messages.create(**late, stream=True) as events, pytest.raises(anthropic.APIStatusError):
        list(events)
    response = http.post("/v1/messages", json=late | {"stream": True})
    assert response.status_code == 200
    payloads = read(response.content)
    assert [payload["type"] for payload in payloads][-2:] == ["content_block_delta", "error"]
    assert payloads[-1]["error"] == {"type": "api_error", "message": "the script fails after 2 tokens"}
    assert payloads[-1]["request_id"] == response.headers["request-id"]


def test_client_timeout(scripted: Running) -> None:
    with sdk(scripted, timeout=0.3) as client, pytest.raises(openai.APITimeoutError):
        client.chat.completions.create(model="slow", messages=said("hello"))
    assert recorded(scripted, status=499, model="slow")


def refused(response: httpx.Response, status: int, kind: str) -> str:
    """The message of an error in Anthropic's format."""
    assert response.status_code == status, response.text
    body = response.json()
    assert list(body) == ["type", "error", "request_id"]
    assert (body["type"], body["error"]["type"]) == ("error", kind)
    assert body["request_id"] == response.headers["request-id"] == response.headers["x-request-id"]
    message: str = body["error"]["message"]
    return message


def test_anthropic_errors_before_routing(strained: Running, http: httpx.Client) -> None:
    for path in ("/v1/messages/nope", "/v1/messages/nope?a=b"):
        refused(http.post(path, json={}), 404, "not_found_error")
        refused(http.get(path), 404, "not_found_error")
    refused(http.get("/v1/nothing", headers=VERSION), 404, "not_found_error")
    refused(http.get("/v1/messages"), 405, "invalid_request_error")
    refused(http.get("/v1/models/nothing", headers=VERSION), 404, "not_found_error")
    refused(http.post("/v1/messages", json=HELLO, headers={"host": "!"}), 400, "invalid_request_error")
    refused(http.post("/v1/messages", content=b"{"), 400, "invalid_request_error")
    text = {"content-type": "text/plain"}
    refused(http.post("/v1/messages", content=b"{}", headers=text), 415, "invalid_request_error")
    assert list(http.get("/v1/nothing").json()) == ["error"]
    assert list(http.post("/v1/chat/completions", json={}, headers=VERSION).json()) == ["error"]
    with talking(strained) as anonymous:
        assert anonymous.head("/").status_code == 200


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/nope"])
def test_anthropic_errors_of_malformed_requests(strained: Running, path: str) -> None:
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nx-api-key: {KEY}\r\n".encode()
    refused(raw(strained, head + b"broken\r\n\r\n").response, 400, "invalid_request_error")
    with connect(strained) as sock:
        sock.sendall(head + b"x: " + b"y" * 1000)
        # Time for the server to parse the start before the rest arrives. It has nothing to answer yet.
        sock.settimeout(0.3)
        with pytest.raises(TimeoutError):
            sock.recv(1)
        sock.sendall(b"y" * 5000)
        refused(receive(sock).response, 431, "invalid_request_error")
    chunked = raw(strained, head + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n").response
    if path == "/v1/messages":
        refused(chunked, 400, "invalid_request_error")


def test_501_is_not_retried(http: httpx.Client) -> None:
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        response = http.post(path, json=HELLO | SEEING)
        assert "messages[0].content[0]" in refused(response, 501, "invalid_request_error")
        assert response.headers["x-should-retry"] == "false"
    refused(http.post("/v1/messages/count_tokens", json=HELLO | {"model": "blind"}), 501, "invalid_request_error")


def test_model_list_pagination(http: httpx.Client) -> None:
    def page(query: str) -> httpx.Response:
        return http.get(f"/v1/models?{query}", headers=VERSION)

    last = page("after_id=last").json()
    assert ([model["id"] for model in last["data"]], last["has_more"]) == (["blind"], False)
    beyond = page("after_id=blind").json()
    assert beyond == {"data": [], "has_more": False, "first_id": None, "last_id": None}
    first = page("before_id=failing&limit=5").json()
    assert ([model["id"] for model in first["data"]], first["has_more"]) == (["echo"], False)
    for query in ("limit=0", "limit=x", "limit=1001", "after_id=x"):
        param = query.partition("=")[0]
        assert refused(page(query), 400, "invalid_request_error").startswith(f"{param}: ")


def test_ignored_parameters_are_reported(http: httpx.Client) -> None:
    fields = {"temperature": 0.5, "top_k": 3, "speed": "fast", "metadata": {"user_id": "u"}}
    response = http.post("/v1/messages", json=HELLO | fields)
    assert response.headers["x-dragoman-ignored"] == "temperature, top_k, speed"
    strict = http.post("/v1/messages", json=HELLO | fields, headers=STRICT)
    assert "temperature" in refused(strict, 400, "invalid_request_error")


@pytest.mark.parametrize("version", ["2023-01-01", "2023-06-01", "2026-10-21"])
def test_version_and_beta_headers(http: httpx.Client, version: str) -> None:
    headers = {"anthropic-version": version, "anthropic-beta": "unheard-of-2030-01-01,other"}
    response = http.post("/v1/messages?beta=true", json=HELLO, headers=headers)
    assert response.json()["content"] == [{"type": "text", "text": "hello"}]
    assert response.headers["request-id"] == response.json()["id"]
