"""Replies that are told as the bytes arrive: pauses, errors of whoever listens, silence, ends."""

import asyncio
import gzip
from collections.abc import Awaitable, Callable, Sequence

import pytest

from dragoman.core.errors import BadRequest, DragomanError, StreamCutOff
from dragoman.core.events import Event, Finished, Listener, TextDelta
from dragoman.core.request import GenerationRequest, Message, Text
from dragoman.engines.upstream.engine import UpstreamEngine
from dragoman.engines.upstream.options import UpstreamOptions
from tests.support.bad_server import DONE, END, GREETING, HELLO, SILENCE, BadServer, Script, cut, delta, stream, whole

REQUEST = GenerationRequest(model="m", messages=(Message("user", (Text("hello"),)),))
DIGITS = [delta(content=str(digit)) for digit in range(10)]


def with_engine(
    server: BadServer, use: Callable[[UpstreamEngine], Awaitable[None]], silence: float | None = None
) -> None:
    silence = silence or server.silence

    async def used() -> None:
        options = UpstreamOptions(url=server.url, protocol="chat", health_seconds=0, silence_seconds=silence)
        engine = UpstreamEngine("m", options)
        try:
            async with asyncio.timeout(60):
                await use(engine)
            assert engine.states()[0].running == 0
        finally:
            await engine.stop()

    asyncio.run(used())


def told(
    server: BadServer, *scripts: Script, listener: Listener | None = None, silence: float | None = None
) -> list[Event]:
    """All events of one reply; whatever comes of it is raised after them."""
    events: list[Event] = []

    def note(ready: Sequence[Event]) -> Awaitable[None] | None:
        events.extend(ready)
        return None if listener is None else listener(ready)

    async def ask(engine: UpstreamEngine) -> None:
        await engine.tell(REQUEST, note)

    server.play(*scripts)
    with_engine(server, ask, silence)
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
    ids=["one by one", "together", "cut", "slowly"],
)
def test_a_reply_is_told(server: BadServer, pieces: Script) -> None:
    events = told(server, stream(*pieces))
    assert text(events) == "0123456789"
    assert isinstance(events[-1], Finished)


def test_what_is_compressed_is_told_too(server: BadServer) -> None:
    script = [whole(gzip.compress(GREETING), content_type="text/event-stream", content_encoding="gzip")]
    assert text(told(server, script)) == "Hello"


def test_a_listener_who_wants_a_pause_gets_it(server: BadServer) -> None:
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
    assert text(told(server, stream(*slowly, END, DONE), listener=listener)) == "0123456789"


@pytest.mark.parametrize("last", [0, 4])
def test_what_a_listener_raises_ends_it_and_is_nobody_elses_fault(server: BadServer, last: int) -> None:
    def listener(events: Sequence[Event]) -> None:
        if str(last) in text(events):
            raise BadRequest("enough")

    slowly = [part for digit in DIGITS[: last + 1] for part in (0.005, digit)]
    with pytest.raises(BadRequest, match="enough"):
        told(server, [*cut(*slowly), "hang"], listener=listener)
    assert server.left.wait(60)


def test_to_cancel_it_ends_it_over_there(server: BadServer) -> None:
    server.play([*cut(*DIGITS[:3]), "hang"])

    async def leave(engine: UpstreamEngine) -> None:
        heard: list[Event] = []
        telling = asyncio.create_task(engine.tell(REQUEST, heard.extend))
        while text(heard) != "012":  # noqa: ASYNC110 (it is looked at now and then)
            await asyncio.sleep(0.005)
        telling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await telling
        assert await asyncio.to_thread(server.left.wait, 60)

    with_engine(server, leave)


@pytest.mark.parametrize("act", ["close", "reset", "hang"])
def test_what_came_is_told_before_it_fails(server: BadServer, act: str) -> None:
    heard: list[Event] = []
    slowly = [part for digit in DIGITS for part in (digit, 0.005)]
    with pytest.raises(DragomanError) as failure:
        told(server, [*cut(*slowly), act], listener=heard.extend)  # type: ignore[list-item]
    assert type(failure.value) is StreamCutOff
    assert text(heard) == "0123456789"


def test_a_slow_stream_is_no_silence(server: BadServer) -> None:
    """As long as something comes in time, however long it takes in all."""
    slowly = [part for digit in DIGITS for part in (digit, SILENCE / 4)]
    assert text(told(server, stream(*slowly, END, DONE), silence=SILENCE)) == "0123456789"


def test_the_connection_is_used_again(server: BadServer) -> None:
    server.play(HELLO)

    async def ask(engine: UpstreamEngine) -> None:
        for _ in range(4):
            await engine.tell(REQUEST, lambda events: None)
            await asyncio.sleep(0.02)

    with_engine(server, ask)
    assert server.connections == 1
