"""The statuses and bodies of errors."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from dragoman.server.auth.access import principal_of
from tests.support.requests import (
    CHAT,
    COMPLETIONS,
    HELLO,
    ask,
    eventually,
    frames,
    recorded,
    refused,
    talking,
    text_of,
)
from tests.support.server_process import Running, serving

ROUTES = pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
KEY, OTHER_KEY = "sk-first-0123456789", "sk-second-0123456789"


@pytest.fixture
def client(scripted: Running) -> Iterator[httpx.Client]:
    with talking(scripted) as made:
        yield made


WRONG_MESSAGES: list[tuple[list[Any], str]] = [
    ([*HELLO, *HELLO, *HELLO, {"role": "wizard", "content": "x"}], "messages[3].role"),
    ([{"content": "x"}], "messages[0].role"),
    ([{"role": "user"}], "messages[0].content"),
    ([*HELLO, {"role": "system", "content": None}], "messages[1].content"),
    ([{"role": "user", "content": 1}], "messages[0].content"),
    ([{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "song"}]}], "messages[0].content[1].type"),
    ([{"role": "user", "content": [{"text": "x"}]}], "messages[0].content[0].type"),
    ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
    ([{"role": "user", "content": [{"type": "text", "text": 1}]}], "messages[0].content[0].text"),
    ([{"role": "user", "content": ["x"]}], "messages[0].content[0]"),
    ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages[0].content[0].image_url.url"),
    ([{"role": "assistant", "tool_calls": [{"id": "a"}]}], "messages[0].tool_calls[0].function"),
    (["hello"], "messages[0]"),
    ([None], "messages[0]"),
]


@pytest.mark.parametrize(("messages", "param"), WRONG_MESSAGES, ids=[param for _, param in WRONG_MESSAGES])
def test_wrong_message_is_named_by_its_path(client: httpx.Client, messages: list[Any], param: str) -> None:
    message = refused(ask(client, CHAT, messages=messages), 400, param=param)
    assert message.startswith(f"{param}: ")


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("tools", [{"type": "function"}], "tools[0].function"),
        ("tools", [{"type": "function", "function": {"name": "a b"}}], "tools[0].function.name"),
        ("chat_template", "{{ messages }}", "chat_template"),
        ("tool_choice", "perhaps", "tool_choice"),
        ("response_format", {"type": "poem"}, "response_format.type"),
        ("response_format", {"type": "json_schema"}, "response_format.json_schema"),
        ("reasoning_effort", "enormous", "reasoning_effort"),
        ("metadata", [], "metadata"),
        ("max_completion_tokens", 0, "max_completion_tokens"),
    ],
)
def test_wrong_field_of_a_chat(client: httpx.Client, field: str, value: object, param: str) -> None:
    refused(ask(client, CHAT, **{field: value}), 400, param=param)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": {}}, "prompt"),
        ({"prompt": ["a", {}]}, "prompt[1]"),
        ({"prompt": [1, "a"]}, "prompt[1]"),
        ({"prompt": [[1], []]}, "prompt[1]"),
        ({"prompt": [[1], [-1]]}, "prompt[1][0]"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"best_of": 0}, "best_of"),
        ({"echo": "yes"}, "echo"),
        ({"suffix": 1}, "suffix"),
    ],
)
def test_wrong_field_of_a_completion(client: httpx.Client, fields: dict[str, Any], param: str) -> None:
    refused(ask(client, COMPLETIONS, **fields), 400, param=param)


@ROUTES
def test_unknown_model_lists_served_models(client: httpx.Client, path: str) -> None:
    message = refused(ask(client, path, model="gemini"), 404, param="model", code="model_not_found")
    assert "'gemini'" in message
    for known in ("echo", "poet", "org/nested", "gpt-*"):
        assert known in message


@pytest.mark.parametrize("path", ["/v1", "/v1/", "/v1/models/", "/v2/models", "/v1/chat", "/v1/images", "/x"])
def test_unknown_route(client: httpx.Client, path: str) -> None:
    response = client.get(path)
    refused(response, 404, code="not_found")
    refused(client.post(path, json={}), 404, code="not_found")


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("GET", CHAT, "POST"),
        ("PUT", CHAT, "POST"),
        ("DELETE", COMPLETIONS, "POST"),
        ("OPTIONS", COMPLETIONS, "POST"),
        ("POST", "/v1/models", "GET"),
        ("DELETE", "/v1/models/echo", "GET"),
        ("POST", "/health", "GET"),
        ("POST", "/", "GET"),
    ],
)
def test_wrong_method(client: httpx.Client, method: str, path: str, allow: str) -> None:
    response = client.request(method, path)
    refused(response, 405, code="method_not_allowed")
    assert response.headers["allow"] == allow


def test_head_request_without_get_route(client: httpx.Client) -> None:
    response = client.head(CHAT)
    assert (response.status_code, response.headers["allow"], response.content) == (405, "POST", b"")


@ROUTES
@pytest.mark.parametrize("stream", [False, True])
def test_failure_before_the_first_token_is_a_500(client: httpx.Client, path: str, stream: bool) -> None:
    response = ask(client, path, model="failing-at-once", stream=stream)
    refused(response, 500, code="inference_error")
    assert response.json()["error"]["type"] == "inference_error"


@ROUTES
def test_late_failure_without_a_stream_is_a_500(client: httpx.Client, path: str) -> None:
    refused(ask(client, path, model="failing"), 500, code="inference_error")


AUDIO = {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}
FILE = {"type": "file", "file": {"file_id": "f"}}


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type"),
        (CHAT, {"tools": [{"type": "web_search"}]}, "tools[0].type"),
        (CHAT, {"messages": [*HELLO, {"role": "user", "content": [AUDIO]}]}, "messages[1].content[0]"),
        (CHAT, {"messages": [{"role": "user", "content": [FILE]}]}, "messages[0].content[0]"),
    ],
)
def test_unsupported_feature_is_a_501(client: httpx.Client, path: str, fields: dict[str, Any], param: str) -> None:
    for stream in (False, True):
        response = ask(client, path, stream=stream, **fields)
        refused(response, 501, param=param, code="not_implemented")
        assert response.json()["error"]["type"] == "not_implemented"


def test_tokenize_without_support_is_a_501(client: httpx.Client) -> None:
    refused(client.post("/tokenize", json={"content": "hello"}), 501, code="not_implemented")
    refused(client.post("/detokenize", json={"tokens": [1, 2]}), 501, code="not_implemented")
    refused(client.post("/tokenize", json={}), 400, param="content")
    refused(client.post("/detokenize", json={"tokens": [-1]}), 400, param="tokens[0]")


def test_neutral_values_are_not_reported(client: httpx.Client) -> None:
    response = ask(
        client,
        CHAT,
        tools=[],
        response_format={"type": "text"},
        top_p=1,
        presence_penalty=0,
        service_tier="auto",
        logit_bias={},
        stop=None,
        seed=None,
        unheard_of=None,
        user="me",
        metadata={"a": "b"},
        n=1,
        stream=False,
    )
    assert text_of(response) == "hello"
    assert "x-dragoman-ignored" not in response.headers


class TestHonestParameters:
    @ROUTES
    @pytest.mark.parametrize("stream", [False, True])
    def test_ignored_parameters_are_named(self, client: httpx.Client, path: str, stream: bool) -> None:
        response = ask(client, path, temperature=0, top_k=5, seed=1, guess_me=True, stream=stream)
        assert response.is_success
        assert response.headers["x-dragoman-ignored"] == "temperature, top_k, seed, guess_me"

    @ROUTES
    @pytest.mark.parametrize("field", ["temperature", "min_p", "seed", "logit_bias", "stop_token_ids", "guess_me"])
    def test_strict_by_header(self, client: httpx.Client, path: str, field: str) -> None:
        values: dict[str, Any] = {"logit_bias": {"1": 1}, "stop_token_ids": [1]}
        fields = {field: values.get(field, 1)}
        strict = {"x-dragoman-strict": "true"}
        body = {"messages": HELLO, "prompt": "hello"} | fields
        del body["prompt" if path == CHAT else "messages"]
        refused(client.post(path, json=body, headers=strict), 400, param=field, code="unsupported_parameter")
        assert client.post(path, json=body, headers={"x-dragoman-strict": "false"}).is_success

    def test_logprobs(self, client: httpx.Client) -> None:
        response = ask(client, CHAT, logprobs=True, top_logprobs=2)
        assert response.headers["x-dragoman-ignored"] == "logprobs"
        response = ask(client, COMPLETIONS, logprobs=2, return_token_ids=True)
        assert response.headers["x-dragoman-ignored"] == "logprobs, return_token_ids"

    def test_server_features_are_honoured_in_strict_mode(self, client: httpx.Client) -> None:
        fields = {"messages": HELLO, "n": 2, "stop": ["o"], "max_tokens": 5, "user": "me"}
        response = client.post(CHAT, json=fields, headers={"x-dragoman-strict": "true"})
        assert text_of(response, 1) == "hell"

    def test_strict_by_configuration(self, guarded: Running) -> None:
        with talking(guarded, {"authorization": f"Bearer {KEY}"}) as client:
            refused(ask(client, CHAT, temperature=1), 400, param="temperature", code="unsupported_parameter")
            lenient = client.post(
                CHAT, json={"messages": HELLO, "temperature": 1}, headers={"x-dragoman-strict": "false"}
            )
            assert lenient.headers["x-dragoman-ignored"] == "temperature"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A strict server with keys, failing engines and short timeouts."""
    config = {
        "models": {
            "echo": {"engine": "scripted"},
            "hanging": {"engine": "scripted", "hang_after": 0},
            "hanging-later": {"engine": "scripted", "hang_after": 1, "slots": 1},
            "ticking": {
                "engine": "scripted",
                "slots": 1,
                "tokens_per_second": 20,
                "replies": [{"output": "tick " * 60}],
            },
        },
        "api_keys": [KEY, OTHER_KEY],
        "strict": True,
        "limits": {"stall_seconds": 1, "queue": 0},
    }
    with serving(tmp_path_factory.mktemp("guarded"), config) as running:
        yield running


class TestKeys:
    @pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/tokenize", "/v1/models", "/v1/models/echo", "/nowhere"])
    @pytest.mark.parametrize(
        "headers",
        [
            {},
            {"authorization": ""},
            {"authorization": "Bearer"},
            {"authorization": f"Bearer {KEY[:-1]}0"},
            {"authorization": f"Bearer {KEY}0"},
            {"authorization": f"Bearer {KEY[:-1]}"},
            {"authorization": f"Basic {KEY}"},
            {"authorization": KEY},
            {"authorization": "Bearer ' OR '1'='1"},
            {"x-api-key": KEY.upper()},
            {"x-api-key": f"{KEY}, {KEY}"},
            {"authorization": f"Bearer {KEY}", "x-api-key": OTHER_KEY},
            {"authorization": f"Bearer {KEY}", "x-api-key": "wrong"},
        ],
        ids=str,
    )
    def test_wrong_key(self, guarded: Running, path: str, headers: dict[str, str]) -> None:
        with talking(guarded, headers) as client:
            response = client.get(path) if path.startswith("/v1/models") else client.post(path, json={})
            message = refused(response, 401, code="invalid_api_key")
            assert response.json()["error"]["type"] == "authentication_error"
            assert KEY[:-1] not in message

    @pytest.mark.parametrize(
        ("headers", "principal"),
        [
            ({"authorization": f"Bearer {KEY}"}, principal_of(KEY)),
            ({"authorization": f"bearer  {OTHER_KEY}"}, principal_of(OTHER_KEY)),
            ({"x-api-key": OTHER_KEY}, principal_of(OTHER_KEY)),
            ({"authorization": f"Bearer {KEY}", "x-api-key": KEY}, principal_of(KEY)),
        ],
    )
    def test_right_key(self, guarded: Running, headers: dict[str, str], principal: str) -> None:
        with talking(guarded, headers) as client:
            response = ask(client, CHAT)
            assert text_of(response) == "hello"
            [record] = recorded(guarded, id=response.headers["x-request-id"])
            assert record["principal"] == principal

    @pytest.mark.parametrize("path", ["/", "/health", "/ready"])
    def test_open_paths_need_no_key(self, guarded: Running, path: str) -> None:
        with talking(guarded) as client:
            assert client.get(path).status_code == 200

    def test_keys_are_never_logged(self, guarded: Running) -> None:
        written = guarded.event_log.read_text() + guarded.log.read_text()
        assert KEY not in written
        assert OTHER_KEY not in written


@pytest.fixture(scope="module")
def mortal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server with models whose processes crash."""
    config = {
        "models": {
            "echo": {"engine": "scripted"},
            "crashing-at-once": {"engine": "scripted", "crash_after": 0},
            "crashing": {
                "engine": "scripted",
                "crash_after": 3,
                "replies": [{"match": "die", "output": "one two three four"}],
            },
        }
    }
    with serving(tmp_path_factory.mktemp("mortal"), config) as running:
        yield running


class TestSilence:
    @pytest.fixture
    def client(self, guarded: Running) -> Iterator[httpx.Client]:
        with talking(guarded, {"authorization": f"Bearer {KEY}"}) as made:
            yield made

    @ROUTES
    @pytest.mark.parametrize("stream", [False, True])
    def test_before_the_first_token_is_a_504(self, client: httpx.Client, path: str, stream: bool) -> None:
        begun = time.monotonic()
        refused(ask(client, path, model="hanging", stream=stream), 504, code="engine_timeout")
        assert time.monotonic() - begun > 0.9

    def test_in_mid_stream_is_an_error_frame_and_frees_the_slot(self, client: httpx.Client) -> None:
        for _ in range(2):
            response = ask(client, CHAT, model="hanging-later", stream=True)
            assert response.status_code == 200
            *_, content, last = frames(response.text)
            assert content["choices"][0]["delta"]["content"] == "hell"
            assert last["error"]["code"] == "engine_timeout"


class TestDeath:
    @pytest.fixture
    def client(self, mortal: Running) -> Iterator[httpx.Client]:
        with talking(mortal) as made:
            yield made

    def test_before_the_first_token_is_a_502(self, client: httpx.Client) -> None:
        for stream in (False, True):
            response = ask(client, COMPLETIONS, model="crashing-at-once", stream=stream)
            refused(response, 502, code="engine_died")
        assert text_of(ask(client, CHAT)) == "hello"

    def test_without_a_stream_is_a_502_and_the_engine_comes_back(self, mortal: Running, client: httpx.Client) -> None:
        refused(ask(client, COMPLETIONS, model="crashing", prompt="die"), 502, code="engine_died")
        assert text_of(ask(client, COMPLETIONS, model="crashing", prompt="a")) == "a"
        assert eventually(lambda: bool(mortal.children()))

    def test_in_mid_stream_is_an_error_frame(self, client: httpx.Client) -> None:
        response = ask(client, COMPLETIONS, model="crashing", prompt="die", stream=True)
        assert response.status_code == 200
        *content, last = frames(response.text)
        assert "".join(chunk["choices"][0]["text"] for chunk in content) == "one two thre"
        assert last["error"]["code"] == "engine_died"


def test_full_queue_is_a_503_with_retry_after(guarded: Running) -> None:
    key = {"x-api-key": KEY}
    with talking(guarded, key) as client, talking(guarded, key) as other:
        with client.stream("POST", CHAT, json={"model": "ticking", "messages": HELLO, "stream": True}) as first:
            response = ask(other, CHAT, model="ticking")
            refused(response, 503, code="overloaded")
            assert int(response.headers["retry-after"]) >= 1
            assert first.read().endswith(b"data: [DONE]\n\n")
        assert text_of(ask(other, CHAT, model="ticking", max_tokens=1)) == "tick"


def test_queue_timeout_is_a_503(tmp_path: Path) -> None:
    ticking = {"engine": "scripted", "slots": 1, "tokens_per_second": 5, "replies": [{"output": "tick " * 3000}]}
    config = {"models": {"ticking": ticking}, "limits": {"queue": 1, "queue_seconds": 0.3}}
    with (
        serving(tmp_path, config) as running,
        talking(running) as client,
        talking(running) as other,
        client.stream("POST", CHAT, json={"messages": HELLO, "stream": True}) as first,
    ):
        assert first.status_code == 200
        response = ask(other, CHAT)
        refused(response, 503, code="overloaded")
        assert int(response.headers["retry-after"]) >= 1
