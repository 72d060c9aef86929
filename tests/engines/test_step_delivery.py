"""Step-based engines deliver the same events in the same process and through a worker."""

import asyncio
import io
from collections.abc import Awaitable, Callable
from contextlib import aclosing

import pytest

from dragoman.core.engine import Engine
from dragoman.core.errors import BadRequest, EngineDied, EngineFailed
from dragoman.core.events import Event, Finished, Started, TextDelta
from dragoman.core.request import GenerationRequest
from dragoman.engines.step_delivery import RequestUpdate, SteppingEngine
from dragoman.ipc.worker_engine import WorkerEngine
from dragoman.ipc.worker_main import WorkerServer
from dragoman.ipc.worker_messages import HEADER, CancelRequest, Generate, GenerationProgress, Step, decode_to_parent
from dragoman.pipeline.event_stream import stream_events

STEP_SECONDS = 0.005


class Spelling(SteppingEngine):
    """Spells the prompts of all requests, one letter per step.

    "!" fails the request, "?" ends the engine, and "#" becomes an event that cannot be serialized.
    """

    def __init__(self) -> None:
        super().__init__()
        self.left: dict[int, list[str]] = {}

    async def start(self) -> None:
        self.steps = asyncio.create_task(self._work())

    async def stop(self) -> None:
        self.steps.cancel()

    async def begin(self, key: int, request: GenerationRequest) -> None:
        if not request.prompts[0]:
            raise BadRequest("there is nothing to spell", param="prompt")
        self.left[key] = ["", *map(str, request.prompts[0])]

    def drop(self, key: int) -> None:
        self.left.pop(key, None)

    async def _work(self) -> None:
        while True:
            await asyncio.sleep(STEP_SECONDS)
            if portions := [self._portion(key, letters) for key, letters in list(self.left.items())]:
                self.receiver.take(portions)

    def _portion(self, key: int, letters: list[str]) -> RequestUpdate:
        if not letters:
            self.drop(key)
            return RequestUpdate(key, (Finished(),), ended=True)
        letter = letters.pop(0)
        if letter == "!":
            self.drop(key)
            return RequestUpdate(key, ended=True, error=EngineFailed("no shouting"))
        if letter == "?":
            self.receiver.lose("killed by a test")
        if letter == "#":
            return RequestUpdate(key, (TextDelta("\ud83d"),))
        return RequestUpdate(key, (TextDelta(letter),) if letter else (Started(),))


def in_process() -> Engine:
    return Spelling()


def in_a_worker() -> Engine:
    return WorkerEngine("tests.engines.test_step_delivery:Spelling", "m", {})


@pytest.fixture(params=[in_process, in_a_worker])
def with_engine(request: pytest.FixtureRequest) -> Callable[[Callable[[Engine], Awaitable[None]]], None]:
    def with_engine(test: Callable[[Engine], Awaitable[None]]) -> None:
        async def main() -> None:
            engine = request.param()
            await engine.start()
            try:
                async with asyncio.timeout(60):
                    await test(engine)
            finally:
                await engine.stop()

        asyncio.run(main())

    return with_engine


WithEngine = Callable[[Callable[[Engine], Awaitable[None]]], None]


async def spell(engine: Engine, prompt: str) -> list[Event]:
    return [event async for batch in stream_events(engine, GenerationRequest(prompts=(prompt,))) for event in batch]


def letters(word: str) -> list[Event]:
    return [Started(), *map(TextDelta, word), Finished()]


def test_events_go_to_their_own_request(with_engine: WithEngine) -> None:
    async def test(engine: Engine) -> None:
        words = ["one", "seventeen", "two", "x"] * 20
        assert await asyncio.gather(*(spell(engine, word) for word in words)) == [letters(word) for word in words]

    with_engine(test)


def test_error_of_one_request_does_not_affect_others(with_engine: WithEngine) -> None:
    async def test(engine: Engine) -> None:
        beside = asyncio.create_task(spell(engine, "undisturbed"))
        with pytest.raises(BadRequest, match="nothing to spell"):
            await spell(engine, "")
        with pytest.raises(EngineFailed, match="no shouting"):
            await spell(engine, "he!lo")
        assert await beside == letters("undisturbed")

    with_engine(test)


def test_abandoned_request_is_dropped(with_engine: WithEngine) -> None:
    async def test(engine: Engine) -> None:
        async with aclosing(stream_events(engine, GenerationRequest(prompts=("a" * 10**6,)))) as stream:
            await anext(stream)
        reader = asyncio.create_task(spell(engine, "b" * 10**6))
        await asyncio.sleep(0.05)
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
        assert await spell(engine, "next") == letters("next")
        if isinstance(engine, Spelling):
            assert not engine.left
        elif isinstance(engine, WorkerEngine):
            assert engine._worker is not None
            assert not engine._worker.streams

    with_engine(test)


def test_event_that_cannot_be_serialized_fails_its_own_request() -> None:
    async def test() -> None:
        engine = in_a_worker()
        assert isinstance(engine, WorkerEngine)
        await engine.start()
        try:
            async with asyncio.timeout(60):
                words = ["undisturbed", "un#ble", "neither", "#" * 10**6, "one!", "x"]
                results = await asyncio.gather(*(spell(engine, word) for word in words), return_exceptions=True)
                assert [results[at] for at in (0, 2, 5)] == [letters(words[at]) for at in (0, 2, 5)]
                assert [type(results[at]) for at in (1, 3, 4)] == [EngineFailed] * 3
                assert engine._worker is not None
                assert not engine._worker.busy
        finally:
            await engine.stop()

    asyncio.run(test())


def read_progress(output: io.BytesIO) -> list[GenerationProgress]:
    """Decode everything that a child has written."""
    body = output.getvalue()
    progress: list[GenerationProgress] = []
    while body:
        (length,) = HEADER.unpack_from(body)
        step = decode_to_parent(body[HEADER.size : HEADER.size + length])
        assert isinstance(step, Step)
        progress += step.progress
        body = body[HEADER.size + length :]
    return progress


@pytest.mark.parametrize("turns", range(4))
def test_early_cancel_is_acknowledged(turns: int) -> None:
    """Otherwise the parent would wait forever for the end of the request."""

    async def test() -> None:
        engine, output = Spelling(), io.BytesIO()
        child = WorkerServer(engine, output)
        await engine.start()
        child.handle(Generate(1, GenerationRequest(prompts=("abc",))))
        for _ in range(turns):
            await asyncio.sleep(0)
        child.handle(CancelRequest(1))
        await asyncio.sleep(10 * STEP_SECONDS)
        await engine.stop()
        assert read_progress(output) == [GenerationProgress(1, ended=True)]
        assert not engine.left

    asyncio.run(test())


def test_engine_death_fails_all_requests(with_engine: WithEngine) -> None:
    async def test(engine: Engine) -> None:
        ends = await asyncio.gather(
            *(spell(engine, word) for word in ("ab?", "abcdef", "x" * 99)), return_exceptions=True
        )
        assert {type(end) for end in ends} == {EngineDied}

    with_engine(test)
