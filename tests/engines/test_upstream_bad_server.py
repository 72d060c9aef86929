"""The upstream engine with misbehaving servers: each yields a status or an error frame, and nothing hangs."""

import asyncio
import json
import time
from collections.abc import Iterator

import pytest

from dragoman.core import errors
from dragoman.core.request import Part, Reasoning, Text, ToolCall
from tests.engines.upstream_app import ask, ask_all_async, upstream_app
from tests.support.bad_server import CHAT, LAST, ROWS, BadServer, Row, chunk, head, without_ids, zipped

STATUS: dict[type[errors.DragomanError], int] = {
    **dict.fromkeys((errors.StreamCutOff, errors.BadAnswer, errors.ServerFailed, errors.Unreachable), 502),
    **dict.fromkeys((errors.Unauthorized, errors.QuotaExhausted, errors.ModelNotFound), 502),
    errors.ContextTooLong: 400,
    errors.RateLimited: 429,
    errors.AnswerTimeout: 504,
    **dict.fromkeys((errors.Unavailable, errors.ModelLoading), 503),
}


@pytest.fixture(scope="module")
def server() -> Iterator[BadServer]:
    with BadServer() as server:
        yield server


def parts_of(message: dict[str, object]) -> list[object]:
    found: list[object] = []
    if message.get("reasoning_content"):
        found.append(Reasoning(str(message["reasoning_content"])))
    if message.get("content"):
        found.append(Text(str(message["content"])))
    calls = message.get("tool_calls") or []
    assert isinstance(calls, list)
    return [*found, *(ToolCall("", call["function"]["name"], call["function"]["arguments"]) for call in calls)]


def first_attempt(row: Row) -> tuple[int, tuple[Part, ...]]:
    """The expected result of the first script: the engine does not retry on the same server."""
    if row.made is errors.MalformedToolCall:
        return 200, row.arrived
    if isinstance(row.made, tuple):
        refusal = bytes(row.scripts[0][0])[9:12] if row.attempts > 1 and row.scripts[0] else b""  # type: ignore[arg-type]
        if row.attempts == 1:
            return 200, row.made
        return {b"429": 429, b"503": 503, b"529": 503, b"500": 502}[refusal], ()
    return STATUS[row.made], ()


@pytest.mark.parametrize("row", ROWS, ids=[row.name for row in ROWS])
def test_unstreamed_reply(server: BadServer, row: Row) -> None:
    server.play(*row.scripts)
    status, parts = first_attempt(row)
    response = ask(upstream_app(server.url, silence_seconds=server.silence))
    assert response.status_code == status, response.text
    if status == 200:
        assert parts_of(response.json()["choices"][0]["message"]) == without_ids(parts)
    else:
        assert response.json()["error"]["message"]
        assert str(server.port) not in response.text
        assert (status in (429, 503)) == ("retry-after" in response.headers)
    assert len(server.requests[CHAT]) == 1


@pytest.mark.parametrize("row", [row for row in ROWS if row.arrived], ids=[row.name for row in ROWS if row.arrived])
def test_error_in_the_middle_of_a_stream(server: BadServer, row: Row) -> None:
    server.play(*row.scripts)
    response = ask(upstream_app(server.url, silence_seconds=server.silence), stream=True)
    assert response.status_code == 200
    frames = [frame.removeprefix("data: ") for frame in response.text.split("\n\n") if frame]
    if row.made is errors.MalformedToolCall:
        assert frames[-1] == "[DONE]"
        return
    assert "[DONE]" not in frames
    assert "Hel" in response.text
    assert json.loads(frames[-1])["error"]["code"]


def test_huge_compressed_reply_does_not_block_the_event_loop(server: BadServer) -> None:
    """The reply has a few hundred kilobytes, and hundreds of megabytes when decompressed."""
    server.play([head(content_encoding="gzip", transfer_encoding="chunked"), chunk(zipped(b" " * 300_000_000)), LAST])

    async def longest_turn() -> float:
        """CPU seconds of the longest turn of the event loop. CPU time does not depend on other processes."""
        longest = 0.0
        task = asyncio.create_task(ask_all_async(upstream_app(server.url), [{}]))
        while not task.done():
            begun = time.thread_time()
            await asyncio.sleep(0.001)
            longest = max(longest, time.thread_time() - begun)
        assert (await task)[0].status_code == 502
        return longest

    assert asyncio.run(longest_turn()) < 1
