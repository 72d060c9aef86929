"""Streams split at any byte, and servers with invalid replies over a real socket."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.core.errors import ConfigError
from dragoman.loadtest.figures import Sample, SampleUsage
from dragoman.loadtest.target import StreamParser, Target, read_error
from tests.support.bad_server import SILENCE, BadServer, Script, head, refused, whole

ROLE = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}\n\n'
HI = b'data: {"choices":[{"index":0,"delta":{"content":"hi"},"finish_reason":null}],"usage":null}\n\n'
THOUGHT = b'data: {"choices":[{"index":0,"delta":{"reasoning_content":"so"},"finish_reason":null}]}\r\n\r\n'
END = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'
USAGE = b'{"prompt_tokens":7,"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":4}}'
COUNTS = b'data: {"choices":[],"usage":%b}\n\n' % USAGE
STREAM = b": keep-alive\n\n" + ROLE + THOUGHT + HI + HI + END + COUNTS + b"data: [DONE]\n\n"
FAILURE = b'data: {"error": {"message": "the engine\\n died", "type": "server_error"}}\n\n'

T = TypeVar("T")


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


def run_target(action: Callable[[Target], Awaitable[T]], *scripts: Script) -> T:
    """Run the action against a server that plays these scripts."""
    with BadServer() as server:
        server.play(*scripts)

        async def scenario() -> T:
            target = Target(server.url, None, "m", server.silence)
            try:
                return await action(target)
            finally:
                await target.transport.aclose()

        return asyncio.run(scenario())


async def send(target: Target) -> Sample:
    return await target.send("x", 3)


async def send_twice(target: Target) -> list[Sample]:
    return [await send(target), await send(target)]


VALID = [whole(STREAM)]


def test_valid_reply() -> None:
    sample = run_target(send, VALID)
    assert (sample.error, sample.status, sample.usage) == (None, 200, SampleUsage(7, 3, 4))
    assert len(sample.arrivals) == 3
    assert 0 < sample.arrivals[0] <= sample.seconds


@pytest.mark.parametrize(
    "scripts",
    [
        ([head(connection="close") + STREAM, "close"],),
        (VALID, ["close"], VALID),
    ],
    ids=["reply ends with the connection", "stale connection"],
)
def test_connection_is_reopened(scripts: Sequence[Script]) -> None:
    assert [sample.error for sample in run_target(send_twice, *scripts)] == [None, None]


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        (b"", "the connection was closed before the response was complete"),
        (b"SSH-2.0-OpenSSH\r\n", "malformed HTTP response"),
        (head(content_length="9999") + ROLE + HI, "the connection was closed before"),
        (whole(b'{"error":{"message":"full"}}', "503 Busy"), "503 full"),
    ],
)
def test_invalid_replies(sent: bytes, message: str) -> None:
    assert (run_target(send, [sent, "close"]).error or "").startswith(message)


def test_silence_times_out() -> None:
    sample = run_target(send, [head(content_length="9999") + ROLE, "hang"])
    assert sample.error == f"no data for {SILENCE} s"
    assert SILENCE <= sample.seconds < 10 * SILENCE


def test_rejected_fields_are_omitted() -> None:
    async def count_tokens(target: Target) -> tuple[int, tuple[str, ...]]:
        return await target.count_tokens("x"), target.length_fields

    rejections = [refused("400 Bad Request", f"unknown field {name}") for name in ("min_tokens", "ignore_eos")]
    assert run_target(count_tokens, *rejections, VALID) == (7, ())


def test_other_400_is_an_error() -> None:
    with pytest.raises(ConfigError, match="the server answered 400 no such model"):
        run_target(lambda target: target.count_tokens("x"), refused("400 Bad Request", "no such model"))
