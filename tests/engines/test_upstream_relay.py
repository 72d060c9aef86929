"""Push-based replies of the upstream engine: pauses, listener errors, timeouts, ends."""

import asyncio
import gzip
from collections.abc import Awaitable, Sequence

import pytest

from dragoman.core.errors import BadRequest, DragomanError, StreamCutOff
from dragoman.core.events import Event, Finished, Listener, TextDelta
from tests.engines.upstream_app import REQUEST, start_engine
from tests.support.bad_server import DONE, END, GREETING, HELLO, SILENCE, BadServer, Script, cut, delta, stream, whole

DIGITS = [delta(content=str(digit)) for digit in range(10)]


async def collect_events(
    server: BadServer, *scripts: Script, listener: Listener | None = None, silence: float | None = None
) -> list[Event]:
    """Collect the events of one reply."""
    events: list[Event] = []

    def note(ready: Sequence[Event]) -> Awaitable[None] | None:
        events.extend(ready)
        return None if listener is None else listener(ready)

    server.play(*scripts)
    async with start_engine(server.url, silence_seconds=silence or server.silence) as engine:
        await engine.deliver(REQUEST, note)
    return events


def text(events: Sequence[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, TextDelta))


@pytest.mark.parametrize(
    "pieces",
    [
        [*DIGITS, END, DONE],
        [b"".join(DIGITS), END + DONE],
        [part for digit in DIGITS for part in (digit[:9], 0.002, digit[9:])] + [END + DONE],
        [part for digit in DIGITS for part in (digit, 0.005)] + [END, DONE],
    ],
    ids=["one by one", "together", "split", "slowly"],
)
async def test_reply_text(server: BadServer, pieces: Script) -> None:
    events = await collect_events(server, stream(*pieces))
    assert text(events) == "0123456789"
    assert isinstance(events[-1], Finished)


async def test_compressed_reply(server: BadServer) -> None:
    script = [whole(gzip.compress(GREETING), content_type="text/event-stream", content_encoding="gzip")]
    assert text(await collect_events(server, script)) == "Hello"


async def test_listener_is_awaited_before_the_next_batch(server: BadServer) -> None:
    pausing = 0

    async def pause() -> None:
        nonlocal pausing
        pausing += 1
        await asyncio.sleep(0.01)
        pausing -= 1

    def listener(events: Sequence[Event]) -> Awaitable[None]:
        assert not pausing
        return pause()

    slowly = [part for digit in DIGITS for part in (digit, 0.004)]
    assert text(await collect_events(server, stream(*slowly, END, DONE), listener=listener)) == "0123456789"
    # The connection pauses too.
    large = stream(*[delta(content="x" * 1_000_000)] * 6, END, DONE)
    assert len(text(await collect_events(server, large, listener=listener))) == 6_000_000


@pytest.mark.parametrize("last", [0, 4])
async def test_listener_error_propagates_and_closes_the_connection(server: BadServer, last: int) -> None:
    def listener(events: Sequence[Event]) -> None:
        if str(last) in text(events):
            raise BadRequest("enough")

    slowly = [part for digit in DIGITS[: last + 1] for part in (0.005, digit)]
    with pytest.raises(BadRequest, match="enough"):
        await collect_events(server, [*cut(*slowly), "hang"], listener=listener)
    assert server.left.wait(60)


async def test_cancelling_closes_the_connection(server: BadServer) -> None:
    server.play([*cut(*DIGITS[:3]), "hang"])
    received: list[Event] = []
    async with start_engine(server.url) as engine:
        task = asyncio.create_task(engine.deliver(REQUEST, received.extend))
        while text(received) != "012":  # noqa: ASYNC110 (filled by another task)
            await asyncio.sleep(0.005)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(server.left.wait, 60)


@pytest.mark.parametrize("act", ["close", "reset", "hang"])
async def test_received_text_is_delivered_before_the_error(server: BadServer, act: str) -> None:
    received: list[Event] = []
    slowly = [part for digit in DIGITS for part in (digit, 0.005)]
    with pytest.raises(DragomanError) as failure:
        await collect_events(server, [*cut(*slowly), act], listener=received.extend)  # type: ignore[list-item]
    assert type(failure.value) is StreamCutOff
    assert text(received) == "0123456789"


async def test_slow_stream_does_not_time_out(server: BadServer) -> None:
    """Only the time between two chunks is limited."""
    slowly = [part for digit in DIGITS for part in (digit, SILENCE / 4)]
    assert text(await collect_events(server, stream(*slowly, END, DONE), silence=SILENCE)) == "0123456789"


async def test_connection_is_reused(server: BadServer) -> None:
    server.play(HELLO)
    async with start_engine(server.url) as engine:
        for _ in range(4):
            await engine.deliver(REQUEST, lambda events: None)
            await asyncio.sleep(0.02)
    assert server.connections == 1
