"""Streams split at any byte, and servers with invalid replies over a real socket."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.core.errors import ConfigError
from dragoman.loadtest.figures import Sample, SampleUsage
from dragoman.loadtest.target import StreamParser, Target, read_error

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
def test_stream_split_at_any_byte(cuts: list[int]) -> None:
    parser = StreamParser()
    bounds = [0, *sorted(cuts), len(STREAM)]
    for begin, end in itertools.pairwise(bounds):
        parser.feed(STREAM[begin:end], float(end))
    assert parser.find_error() is None
    assert len(parser.arrivals) == 3
    assert parser.arrivals == sorted(parser.arrivals)
    assert parser.usage == SampleUsage(7, 3, 4)


@pytest.mark.parametrize(
    ("stream", "error"),
    [
        (b"", "the reply is not a stream"),
        (b'{"choices": []}', "the reply is not a stream"),
        (ROLE + HI, "the stream was cut off"),
        (HI.replace(b"null}]", b'""}]') + COUNTS, "the stream was cut off"),
        (ROLE + HI + END, "the stream has no usage"),
        (ROLE + HI + FAILURE, "the engine died"),
        (b"data: {oops\n\n", "malformed chat completion frame"),
    ],
)
def test_invalid_streams(stream: bytes, error: str) -> None:
    parser = StreamParser()
    parser.feed(stream, 1.0)
    assert (parser.find_error() or "").startswith(error)


@pytest.mark.parametrize(
    ("body", "message"),
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
def test_message_of_an_error_body(body: bytes, message: str) -> None:
    assert read_error(body) == message


def reply(body: bytes, status: str = "200 OK") -> bytes:
    return b"HTTP/1.1 %b\r\ncontent-length: %d\r\n\r\n%b" % (status.encode(), len(body), body)


def run_target(answer: Answer, action: Callable[[Target], Awaitable[T]], silence_seconds: float = 60) -> T:
    """Run the action against a server. `answer` gets the body and the number of each request."""

    async def scenario() -> T:
        requests = 0

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal requests
            try:
                while head := await reader.readuntil(b"\r\n\r\n"):
                    size = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
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
            return await action(target)
        finally:
            await target.transport.aclose()
            server.close()
            await asyncio.sleep(0.01)

    return asyncio.run(scenario())


def always(data: bytes, is_last: bool = True) -> Answer:
    """Answer every request with these bytes; close the connection after the last."""

    async def answer(body: bytes, at: int, writer: asyncio.StreamWriter) -> None:
        writer.write(data)
        if is_last:
            writer.close()

    return answer


async def send(target: Target) -> Sample:
    return await target.send("x", 3)


async def send_twice(target: Target) -> list[Sample]:
    return [await send(target), await send(target)]


def test_valid_reply() -> None:
    sample = run_target(always(reply(STREAM), is_last=False), send)
    assert (sample.error, sample.status, sample.usage) == (None, 200, SampleUsage(7, 3, 4))
    assert len(sample.arrivals) == 3
    assert 0 < sample.arrivals[0] <= sample.seconds


def test_reply_that_ends_with_the_connection() -> None:
    data = b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n" + STREAM
    assert [sample.error for sample in run_target(always(data), send_twice)] == [None, None]


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        (b"", "the connection was closed before the response was complete"),
        (b"SSH-2.0-OpenSSH\r\n", "malformed HTTP response"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9999\r\n\r\n" + ROLE + HI, "the connection was closed before"),
        (reply(b'{"error":{"message":"full"}}', "503 Busy"), "503 full"),
    ],
)
def test_invalid_replies(sent: bytes, message: str) -> None:
    assert (run_target(always(sent), send).error or "").startswith(message)


def test_silence_times_out() -> None:
    answer = always(b"HTTP/1.1 200 OK\r\ncontent-length: 9999\r\n\r\n" + ROLE, is_last=False)
    sample = run_target(answer, send, silence_seconds=0.2)
    assert sample.error == "no data for 0.2 s"
    assert 0.2 <= sample.seconds < 2


def test_stale_connection_is_reopened() -> None:
    async def answer(body: bytes, at: int, writer: asyncio.StreamWriter) -> None:
        if at != 2:
            writer.write(reply(STREAM))
        else:
            writer.close()

    assert [sample.error for sample in run_target(answer, send_twice)] == [None, None]


def test_rejected_fields_are_omitted() -> None:
    sent: list[bytes] = []

    async def answer(body: bytes, at: int, writer: asyncio.StreamWriter) -> None:
        sent.append(body)
        rejected = next((name for name in ("min_tokens", "ignore_eos") if name.encode() in body), None)
        refusal = reply(b'{"error":{"message":"unknown field %b"}}' % (rejected or "").encode(), "400 Bad Request")
        writer.write(reply(STREAM) if rejected is None else refusal)

    async def count_tokens(target: Target) -> tuple[int, tuple[str, ...]]:
        return await target.count_tokens("x"), target.length_fields

    assert run_target(answer, count_tokens) == (7, ())
    assert len(sent) == 3


def test_other_400_is_an_error() -> None:
    answer = always(reply(b'{"error":{"message":"no such model"}}', "400 Bad Request"))
    with pytest.raises(ConfigError, match="the server answered 400 no such model"):
        run_target(answer, lambda target: target.count_tokens("x"))
