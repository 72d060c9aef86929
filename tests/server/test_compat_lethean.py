"""What clients of Lethean's Go server rely on: served by Dragoman, and by Dragoman in front of such a server."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from dragoman import Client
from dragoman.core.errors import BadAnswer, BadRequest, ModelNotFound
from tests.support.compat_servers import CITY, LETHEAN_TOKENS, THOUGHT, CompatServer, lethean
from tests.support.requests import CHAT, HELLO, ask, frames, refused, talking, text_of
from tests.support.server_process import Running, Serving

CHANNELS = "<|channel>thought\nA capital.<|channel>assistant\nParis."


@pytest.fixture(scope="module")
def upstream() -> Iterator[CompatServer]:
    with CompatServer(lethean).running() as server:
        yield server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, serving: Serving, upstream: CompatServer) -> Iterator[Running]:
    relayed = {"engine": "upstream", "url": upstream.url, "protocol": "chat"}
    config = {
        "models": {
            "gemma": relayed,
            "other": relayed | {"model": "missing"},
            "channels": {"engine": "scripted", "format": "channel", "chunk": 3, "replies": [{"output": CHANNELS}]},
            "echo": {"engine": "scripted"},
        },
    }
    with serving(tmp_path_factory.mktemp("lethean"), config) as running:
        yield running


@pytest.fixture
def client(server: Running) -> Iterator[httpx.Client]:
    with talking(server) as made:
        yield made


def message(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()["choices"][0]["message"]
    return found


def joined(response: httpx.Response, field: str) -> str:
    *chunks, done = frames(response.text)
    assert done == "[DONE]"
    return "".join(choice["delta"].get(field) or "" for chunk in chunks for choice in chunk["choices"])


def test_request_fields_of_the_handler_are_passed_on(client: httpx.Client, upstream: CompatServer) -> None:
    upstream.requests.clear()
    fields = {"temperature": 0, "top_p": 0.5, "top_k": 3, "max_tokens": 7, "user": "me"}
    assert message(ask(client, CHAT, model="gemma", **fields))["content"] == CITY
    assert fields.items() <= upstream.bodies[-1].items()


@pytest.mark.parametrize(("limit", "reason"), [(LETHEAN_TOKENS, "length"), (50, "stop")])
def test_usage_and_finish_reason_of_a_whole_reply(
    client: httpx.Client, upstream: CompatServer, limit: int, reason: str
) -> None:
    for is_streamed in (False, True, False):
        upstream.requests.clear()
        response = ask(client, CHAT, model="gemma", max_tokens=limit, stream=is_streamed)
        if is_streamed:
            assert frames(response.text)[-2]["choices"][0]["finish_reason"] == reason
            assert len(upstream.requests) <= 2
            continue
        reply = response.json()
        assert reply["choices"][0]["finish_reason"] == reason
        assert (reply["usage"]["prompt_tokens"], reply["usage"]["completion_tokens"]) == (9, LETHEAN_TOKENS)
        assert ["stream" in body for body in upstream.bodies] == [False]


def test_unknown_fields_are_left_out_and_this_is_remembered(client: httpx.Client, upstream: CompatServer) -> None:
    for _ in range(2):
        upstream.requests.clear()
        assert joined(ask(client, CHAT, model="gemma", stream=True), "content") == CITY
    [body] = upstream.bodies
    assert "stream_options" not in body
    ignored = ask(client, CHAT, model="gemma", seed=1, presence_penalty=0.5)
    assert message(ignored)["content"] == CITY
    assert {"seed", "presence_penalty"} <= set(ignored.headers["x-dragoman-ignored"].split(", "))
    count = len(upstream.requests)
    ask(client, CHAT, model="gemma", seed=1, presence_penalty=0.5)
    assert len(upstream.requests) == count + 1


def test_reasoning_of_earlier_turns_is_left_out(client: httpx.Client) -> None:
    earlier = {"role": "assistant", "content": CITY, "reasoning_content": THOUGHT}
    assert text_of(ask(client, CHAT, model="gemma", messages=[*HELLO, earlier, *HELLO])) == CITY


def test_stop_strings_instead_of_numeric_ids(client: httpx.Client) -> None:
    assert text_of(ask(client, CHAT, model="gemma", stop=["is"])) == "Par"
    assert text_of(ask(client, CHAT, model="echo", stop=["l"])) == "he"


@pytest.mark.parametrize("model", ["gemma", "channels"])
def test_hidden_channel_is_a_field_of_its_own_in_replies_and_chunks(client: httpx.Client, model: str) -> None:
    whole = message(ask(client, CHAT, model=model))
    assert (whole["content"].strip(), whole["reasoning_content"].strip()) == (CITY, THOUGHT)
    streamed = ask(client, CHAT, model=model, stream=True)
    assert joined(streamed, "content").strip() == CITY
    assert joined(streamed, "reasoning_content").strip() == THOUGHT


def test_model_name_is_trimmed_and_case_does_not_matter(client: httpx.Client) -> None:
    assert text_of(ask(client, CHAT, model=" Echo ")) == "hello"


def test_errors_name_the_field_of_a_message(client: httpx.Client) -> None:
    body = [*HELLO, {"role": "alien", "content": "x"}]
    assert "role" in refused(ask(client, CHAT, model="echo", messages=body), 400, param="messages[1].role")


def test_error_of_an_unknown_model(client: httpx.Client) -> None:
    refused(ask(client, CHAT, model="nothing"), 404, param="model", code="model_not_found")


def test_explicit_zero_and_one_token_limit_are_honoured(client: httpx.Client) -> None:
    response = ask(client, CHAT, model="echo", temperature=0, max_tokens=1)
    assert response.json()["choices"][0]["finish_reason"] == "length"
    assert response.json()["usage"]["completion_tokens"] == 1


def test_finish_reason_error_of_the_handler_is_an_error(client: httpx.Client) -> None:
    response = ask(client, CHAT, model="gemma", messages=[{"role": "user", "content": "fail"}])
    refused(response, 502)


def test_client_of_the_handler(upstream: CompatServer) -> None:
    with Client(upstream.url, model="gemma", protocol="chat") as client:
        with client.stream("hello") as events:
            list(events)
        for reply in (client.complete("hello", temperature=0, top_k=1), events.reply()):
            assert (reply.text, reply.reasoning, reply.reason) == (CITY, THOUGHT, "stop")
            assert (reply.id, reply.model) == ("chatcmpl-1760000000000000000", "gemma")
        with client.stream("hello") as events:
            list(events)
        assert "stream_options" not in upstream.bodies[-1]


def test_client_gets_errors_of_the_handler(upstream: CompatServer) -> None:
    with Client(upstream.url, model="gemma", protocol="chat") as client:
        # An option is never dropped silently.
        with pytest.raises(BadRequest, match="invalid request body"):
            client.complete("hello", seed=1)
        with pytest.raises(ModelNotFound):
            client.complete("hello", model="nothing")
        with client.stream("fail") as events, pytest.raises(BadAnswer, match="aborted"):
            list(events)
