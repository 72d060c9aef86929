"""Servers that answer badly, each over a real socket, and streams in every cutting."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.core.errors import ConfigError
from dragoman.loadtest.figures import Sample, Usage
from dragoman.loadtest.target import Reading, Target, words_of

ROLE = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}\n\n'
HI = b'data: {"choices":[{"index":0,"delta":{"content":"hi"},"finish_reason":null}],"usage":null}\n\n'
THOUGHT = b'data: {"choices":[{"index":0,"delta":{"reasoning_content":"so"},"finish_reason":null}]}\r\n\r\n'
END = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'
USAGE = b'{"prompt_tokens":7,"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":4}}'
COUNTS = b'data: {"choices":[],"usage":%b}\n\n' % USAGE
STREAM = b": keep-alive\n\n" + ROLE + THOUGHT + HI + HI + END + COUNTS + b"data: [DONE]\n\n"
FAILURE = b'data: {"error": {"message": "the engine\\n died", "type": "server_error"}}\n\n'

T = TypeVar("T")
Answer = Callable[[bytes, int, asyncio.StreamWriter], Awaitable[None]]


@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_a_stream_is_read_the_same_however_it_is_cut(cuts: list[int]) -> None:
    reading = Reading()
    places = [0, *sorted(cuts), len(STREAM)]
    for begin, end in itertools.pairwise(places):
        reading.feed(STREAM[begin:end], float(end))
    assert reading.fault() is None
    assert len(reading.arrivals) == 3
    assert reading.arrivals == sorted(reading.arrivals)
    assert reading.usage == Usage(7, 3, 4)


@pytest.mark.parametrize(
    ("stream", "fault"),
    [
        (b"", "no stream came back"),
        (b'{"choices": []}', "no stream came back"),
        (ROLE + HI, "the stream broke off"),
        (HI.replace(b"null}]", b'""}]') + COUNTS, "the stream broke off"),
        (ROLE + HI + END, "the stream told no usage"),
        (ROLE + HI + FAILURE, "the engine died"),
        (b"data: {oops\n\n", "a frame that is none of chat completions"),
    ],
)
def test_what_is_wrong_with_a_stream(stream: bytes, fault: str) -> None:
    reading = Reading()
    reading.feed(stream, 1.0)
    assert (reading.fault() or "").startswith(fault)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"error": {"message": "no  such\\nmodel"}}', "no such model"),
        (b'{"error": "model not found"}', "model not found"),
        (b'{"object": "error", "message": "too long"}', "too long"),
        (b'{"detail": [{"msg": "missing"}]}', "[{'msg': 'missing'}]"),
        (b"<html>Bad Gateway</html>", "<html>Bad Gateway</html>"),
        (b'{"x": 1}', "{'x': 1}"),
        (b"", ""),
        (b"x" * 1000, "x" * 300),
    ],
)
def test_the_words_of_an_error(body: bytes, words: str) -> None:
    assert words_of(body) == words


def reply(body: bytes, status: str = "200 OK") -> bytes:
    return b"HTTP/1.1 %b\r\ncontent-length: %d\r\n\r\n%b" % (status.encode(), len(body), body)


def asking(answer: Answer, ask: Callable[[Target], Awaitable[T]], silence_seconds: float = 60) -> T:
    """What becomes of it against a server that gives this answer to every request; it is told which one it is."""

    async def scenario() -> T:
        requests = 0

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal requests
            try:
                while head := await reader.readuntil(b"\r\n\r\n"):
                    size = head.partition(b"content-length: ")[2].partition(b"\r\n")[0]
                    body = await reader.readexactly(int(size or 0))
                    requests += 1
                    await answer(body, requests, writer)
            except (asyncio.IncompleteReadError, ConnectionError):
                pass
            finally:
                writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        target = Target(f"http://127.0.0.1:{port}", None, "m", silence_seconds)
        try:
            return await ask(target)
        finally:
            target.connections.close()
            server.close()
            await asyncio.sleep(0.01)

    return asyncio.run(scenario())


def test_a_good_reply() -> None:
    async def answer(body: bytes, at: int, writer: asyncio.StreamWriter) -> None:
        writer.write(reply(STREAM))

    sample = asking(answer, lambda target: target.ask("x", 3))
    assert (sample.error, sample.status, sample.usage) == (None, 200, Usage(7, 3, 4))
    assert len(sample.arrivals) == 3
    assert 0 < sample.arrivals[0] <= sample.seconds


def test_a_reply_that_ends_with_its_connection() -> None:
    async def answer(body: bytes, at: int, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n" + STREAM)
        writer.close()

    async def twice(target: Target) -> list[Sample]:
        return [await target.ask("x", 3), await target.ask("x", 3)]

    assert [sample.error for sample in asking(answer, twice)] == [None, None]


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        (b"", "the server closed the connection without a reply"),
        (b"SSH-2.0-OpenSSH\r\n", "what came back is not HTTP"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9999\r\n\r\n" + ROLE + HI, "the stream broke off"),
        (reply(b'{"error":{"message":"full"}}', "503 Busy"), "503 full"),
    ],
)
def test_an_error_has_its_words(sent: bytes, words: str) -> None:
    async def answer(body: bytes, at: int, writer: asyncio.StreamWriter) -> None:
        writer.write(sent)
        writer.close()

    sample = asking(answer, lambda target: target.ask("x", 3))
    assert (sample.error or "").startswith(words)


def test_silence_has_an_end() -> None:
    async def answer(body: bytes, at: int, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 9999\r\n\r\n" + ROLE)

    sample = asking(answer, lambda target: target.ask("x", 3), silence_seconds=0.2)
    assert sample.error == "nothing came for 0.2 seconds"
    assert 0.2 <= sample.seconds < 2


def test_a_connection_that_was_closed_meanwhile_is_opened_again() -> None:
    async def answer(body: bytes, at: int, writer: asyncio.StreamWriter) -> None:
        if at != 2:
            writer.write(reply(STREAM))
        else:
            writer.close()

    async def twice(target: Target) -> list[Sample]:
        return [await target.ask("x", 3), await target.ask("x", 3)]

    assert [sample.error for sample in asking(answer, twice)] == [None, None]


def test_fields_that_a_400_names_are_left_out() -> None:
    sent: list[bytes] = []

    async def answer(body: bytes, at: int, writer: asyncio.StreamWriter) -> None:
        sent.append(body)
        named = next((name for name in ("min_tokens", "ignore_eos") if name.encode() in body), None)
        refusal = reply(b'{"error":{"message":"unknown field %b"}}' % (named or "").encode(), "400 Bad Request")
        writer.write(reply(STREAM) if named is None else refusal)

    async def count(target: Target) -> tuple[int, tuple[str, ...]]:
        return await target.count("x"), target.length_fields

    assert asking(answer, count) == (7, ())
    assert len(sent) == 3


def test_another_400_is_told() -> None:
    async def answer(body: bytes, at: int, writer: asyncio.StreamWriter) -> None:
        writer.write(reply(b'{"error":{"message":"no such model"}}', "400 Bad Request"))

    with pytest.raises(ConfigError, match="the server answered 400 no such model"):
        asking(answer, lambda target: target.count("x"))
