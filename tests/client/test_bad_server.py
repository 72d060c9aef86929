"""Runs both clients against misbehaving servers, over real sockets."""

import asyncio
import contextlib
from collections.abc import Callable, Iterator

import pytest
from tools.ports import free_port

from dragoman import AsyncClient, Client
from dragoman.core.errors import AnswerTimeout, DragomanError, NotFound, StreamCutOff, Unreachable
from dragoman.core.events import Finished, TextDelta
from dragoman.core.reply import Reply
from dragoman.protocols.retry import Retries
from tests.support.bad_server import (
    CHAT,
    GREETING,
    HEL,
    HELLO,
    NOT_FOUND,
    REPLY,
    ROWS,
    BadServer,
    Row,
    answer,
    cut,
    refused,
    without_ids,
)

RETRIES = Retries(first_seconds=0.01)


@pytest.fixture(scope="module")
def server() -> Iterator[BadServer]:
    with BadServer() as server:
        yield server


def sync_client(server: BadServer) -> Client:
    return Client(server.url, model="m", protocol="chat", timeout=server.silence, retries=RETRIES)


def async_client(server: BadServer) -> AsyncClient:
    return AsyncClient(server.url, model="m", protocol="chat", timeout=server.silence, retries=RETRIES)


def completed(server: BadServer) -> Reply:
    with sync_client(server) as client:
        return client.complete("hello")


def streamed(server: BadServer) -> Reply:
    with sync_client(server) as client, client.stream("hello") as events:
        received = list(events)
        assert isinstance(received[-1], Finished)
        return events.reply()


def completed_async(server: BadServer) -> Reply:
    async def run() -> Reply:
        async with async_client(server) as client:
            return await client.complete("hello")

    return asyncio.run(run())


def streamed_async(server: BadServer) -> Reply:
    async def run() -> Reply:
        async with async_client(server) as client, client.stream("hello") as events:
            received = [event async for event in events]
            assert isinstance(received[-1], Finished)
            return events.reply()

    return asyncio.run(run())


WAYS = [completed, streamed, completed_async, streamed_async]


@pytest.mark.parametrize("ask", WAYS)
@pytest.mark.parametrize("row", ROWS, ids=[row.name for row in ROWS])
def test_bad_server(server: BadServer, row: Row, ask: Callable[[BadServer], Reply]) -> None:
    server.play(*row.scripts)
    if isinstance(row.made, tuple):
        reply = ask(server)
        assert without_ids(reply.choices[0].parts) == without_ids(row.made)
    else:
        with pytest.raises(DragomanError) as caught:
            ask(server)
        assert type(caught.value) is row.made, repr(caught.value)
        assert without_ids(caught.value.arrived) == without_ids(row.arrived)
    assert len(server.requests[CHAT]) == row.attempts


def test_missing_usage_differs_from_zero_usage(server: BadServer) -> None:
    none = {"prompt_tokens": 0, "completion_tokens": 0}
    server.play(answer(REPLY), answer(REPLY | {"usage": none}))
    with sync_client(server) as client:
        replies = [client.complete("hello") for _ in range(2)]
    assert [reply.is_counted for reply in replies] == [False, True]
    assert replies[0].usage == replies[1].usage


def test_connections_are_reused(server: BadServer) -> None:
    server.play(answer(REPLY), HELLO, HELLO, refused("500 No"), HELLO)
    with sync_client(server) as client:
        assert client.complete("hello").text == "Hello"
        for _ in range(2):
            with client.stream("hello") as events:
                assert list(events)[-1] == Finished()
        with pytest.raises(DragomanError):
            client.complete("hello")
        assert client.complete("hello").text == "Hello"
    assert server.connections == 1


def test_async_connections_are_reused(server: BadServer) -> None:
    async def ask() -> None:
        async with async_client(server) as client:
            for _ in range(3):
                async with client.stream("hello") as events:
                    assert [event async for event in events][-1] == Finished()

    server.play(HELLO)
    asyncio.run(ask())
    assert server.connections == 1


def test_complete_stream_returns_although_server_keeps_connection_open(server: BadServer) -> None:
    async def ask() -> None:
        async with AsyncClient(server.url, protocol="chat") as client, client.stream("hello") as events:
            assert isinstance([event async for event in events][-1], Finished)

    server.play([*cut(GREETING), "hang"])
    # The timeout of the clients is ten minutes.
    with Client(server.url, protocol="chat") as client, client.stream("hello") as events:
        assert isinstance(list(events)[-1], Finished)
    asyncio.run(ask())


def test_closing_a_stream_disconnects(server: BadServer) -> None:
    server.play([*cut(HEL), "hang"])
    with Client(server.url, protocol="chat") as client:
        with client.stream("hello") as events:
            assert any(isinstance(event, TextDelta) for event in (next(events), next(events)))
        assert server.left.wait(60)


@pytest.mark.parametrize("is_begun", [True, False])
def test_cancelling_disconnects(server: BadServer, is_begun: bool) -> None:
    async def ask() -> None:
        async with AsyncClient(server.url, protocol="chat") as client:
            task = asyncio.create_task(client.complete("hello"))
            while not server.requests[CHAT]:  # noqa: ASYNC110 (another thread notes them)
                await asyncio.sleep(0.01)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            assert await asyncio.to_thread(server.left.wait, 60)

    server.play([*cut(HEL), "hang"] if is_begun else ["hang"])
    asyncio.run(ask())


def test_refused_connection_is_retried() -> None:
    waits: list[float] = []

    def chance() -> float:
        waits.append(0)
        return 0.5

    url = f"http://127.0.0.1:{free_port()}"
    with (
        Client(url, retries=Retries(3, 0.001, chance)) as client,
        pytest.raises(Unreachable, match="cannot connect to"),
    ):
        client.complete("hello")
    assert len(waits) == 3


def test_idempotent_call_is_retried_after_any_failure(server: BadServer) -> None:
    models = answer({"data": [{"id": "a", "max_model_len": 9}]})
    server.play(["reset"], refused("500 Oops"), models, path="/v1/models")
    with sync_client(server) as client:
        assert [(model.name, model.context) for model in client.models()] == [("a", 9)]
    assert len(server.requests["/v1/models"]) == 3


def test_truncated_model_list(server: BadServer) -> None:
    server.play([b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\n{", "close"], path="/v1/models")
    with sync_client(server) as client, pytest.raises(DragomanError, match="incomplete"):
        client.models()


def test_model_list_has_pages(server: BadServer) -> None:
    first = {"data": [{"id": "a"}, {"id": "b"}], "has_more": True, "last_id": "b"}
    server.play(answer(first), answer({"data": [{"id": "c"}], "has_more": False}), path="/v1/models")
    with Client(server.url, protocol="messages") as client:
        assert [model.name for model in client.models()] == ["a", "b", "c"]


MESSAGE = {"type": "message", "content": [{"type": "text", "text": "Hello"}], "stop_reason": "end_turn"}
OUTPUT = [{"type": "message", "content": [{"type": "output_text", "text": "Hello"}]}]
RESPONSE = {"object": "response", "status": "completed", "output": OUTPUT}


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [("/v1/messages", MESSAGE, "messages"), ("/v1/responses", RESPONSE, "responses")],
)
def test_protocol_is_detected_and_remembered(server: BadServer, path: str, body: object, name: str) -> None:
    server.play(answer(body), path=path)
    with Client(server.url) as client:
        assert client.protocol is None
        assert client.complete("hello").text == "Hello"
        assert client.complete("hello").text == "Hello"
        assert client.protocol == name
    assert (len(server.requests[path]), len(server.requests[CHAT])) == (2, 1)


@pytest.mark.parametrize("script", [NOT_FOUND, refused("405 No"), refused("501 No")])
def test_server_without_any_known_route(server: BadServer, script: list[bytes]) -> None:
    server.play(script)
    with (
        Client(server.url) as client,
        pytest.raises(NotFound, match="/v1/chat/completions, /v1/messages, /v1/responses"),
    ):
        client.complete("hello")


def test_unknown_model_does_not_try_other_protocols(server: BadServer) -> None:
    server.play(refused("404 Not Found", "The model `m` does not exist."))
    with Client(server.url) as client, pytest.raises(NotFound, match="does not exist"):
        client.complete("hello")
    assert list(server.requests) == [CHAT]


def test_protocols_that_cannot_express_an_option_are_skipped(server: BadServer) -> None:
    server.play(answer(MESSAGE), path="/v1/messages")
    with Client(server.url) as client, pytest.raises(NotFound, match="/v1/chat/completions, /v1/responses"):
        client.complete("hello", min_p=0.1)
    assert not server.requests["/v1/messages"]


def test_error_keeps_the_server_response(server: BadServer) -> None:
    server.play(refused("400 Bad", "no", "odd", x_request_id="r1"))
    with sync_client(server) as client, pytest.raises(DragomanError) as caught:
        client.complete("hello")
    answered = caught.value.answered
    assert answered is not None
    assert (answered.status, answered.code, answered.request_id) == (400, "odd", "r1")
    assert '"message": "no"' in answered.body


def test_read_timeout_names_the_limit(server: BadServer) -> None:
    server.play(["hang"])
    with sync_client(server) as client, pytest.raises(AnswerTimeout, match=r"no data for 0\.8 s"):
        client.complete("hello")
    server.play([*cut(HEL), "hang"])
    with sync_client(server) as client, pytest.raises(StreamCutOff, match=r"no data for 0\.8 s") as caught:
        client.complete("hello")
    assert caught.value.arrived
