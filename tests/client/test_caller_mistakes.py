"""Invalid arguments of the clients."""

import asyncio
from typing import Any

import pytest

from dragoman import AsyncClient, Client
from dragoman.core.errors import BadRequest, ConfigError, StreamCutOff, Unreachable
from dragoman.core.request import ToolChoice
from tests.support.bad_server import HELLO, BadServer

NOWHERE = "http://127.0.0.1:9"


@pytest.mark.parametrize(
    "arguments",
    [
        {"url": "nonsense"},
        {"protocol": "bogus"},
        {"api_key": "schlüssel"},
        {"api_key": "a\nb: c"},
        {"headers": {"x-a": "ü"}},
    ],
)
def test_invalid_client_arguments(arguments: dict[str, Any]) -> None:
    for kind in (Client, AsyncClient):
        with pytest.raises(ConfigError):
            kind(**({"url": NOWHERE} | arguments))


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": "hot"},
        {"temperature": float("nan")},
        {"top_p": float("inf")},
        {"seed": 1.5},
        {"logit_bias": {"a": 1}},
        {"logit_bias": {1: float("nan")}},
        {"thinking": "bogus"},
        {"max_tokens": "many"},
        {"stop": 5},
        {"stop": [5]},
        {"model": 5},
        {"tool_choice": "nosuch"},
        {"tool_choice": "required"},
        {"tool_choice": ToolChoice("named", "nosuch")},
        {"tool_choice": 5},
    ],
)
def test_invalid_options(options: dict[str, Any]) -> None:
    with Client(NOWHERE) as client, pytest.raises(BadRequest) as caught:
        client.complete("hello", **options)
    assert caught.value.param == next(iter(options))
    assert caught.value.message.startswith(next(iter(options)))


@pytest.mark.parametrize("messages", [None, 5, [5], [None], ["hello"]])
def test_invalid_messages(messages: Any) -> None:
    with Client(NOWHERE) as client, pytest.raises(BadRequest, match="messages"):
        client.complete(messages)


def test_unknown_option() -> None:
    with Client(NOWHERE) as client, pytest.raises(TypeError, match="temprature"):
        client.complete("hello", temprature=1)  # type: ignore[call-arg]


def test_lone_surrogate() -> None:
    with Client(NOWHERE) as client:
        for ask in (client.complete, client.embed, client.count_tokens):
            with pytest.raises(BadRequest, match="lone surrogate"):
                ask("\ud83d")
        with pytest.raises(BadRequest, match="texts"):
            client.embed(None)  # type: ignore[arg-type]


def test_closed_client() -> None:
    client = Client(NOWHERE)
    client.close()
    for ask in (client.complete, client.embed, client.count_tokens):
        with pytest.raises(Unreachable, match="closed"):
            ask("hello")

    async def ask_async() -> None:
        other = AsyncClient(NOWHERE)
        await other.aclose()
        with pytest.raises(Unreachable, match="closed"):
            await other.complete("hello")

    asyncio.run(ask_async())


def test_reply_before_the_stream_ended() -> None:
    with BadServer() as server, Client(server.url, protocol="chat") as client:
        server.play(HELLO)
        with client.stream("hello") as events:
            with pytest.raises(StreamCutOff, match="no reply yet"):
                events.reply()
            next(events), next(events)
        with pytest.raises(StreamCutOff) as caught:
            events.reply()
        assert caught.value.arrived
        with client.stream("hello") as events:
            assert list(events)
        assert events.reply().text == "Hello"
