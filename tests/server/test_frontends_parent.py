"""A front end hears what becomes of what it asked for, whatever goes wrong at its parent's."""

import asyncio
import errno
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from typing import Any

import msgspec
import pytest

from dragoman.config.sections import KeyLimits, Keys
from dragoman.config.settings import Settings
from dragoman.core.errors import EngineFailed
from dragoman.core.events import Started
from dragoman.core.request import GenerationRequest, Message, Text
from dragoman.engines.scripted import ScriptedEngine
from dragoman.ipc.worker_engine import WorkerEngine
from dragoman.ipc.worker_process import Follower
from dragoman.server.app import App
from dragoman.server.auth.quotas import Estimate, Lease
from dragoman.server.factory import ENGINES_ONLY, build_app
from dragoman.server.frontends.messages import Answer, Engage, Engaged, Enter, Entered, Refused, Relay
from dragoman.server.frontends.parent import Desk
from dragoman.server.frontends.remote import Parent, RemoteResponses, relayed
from dragoman.server.model_lease import Wish
from dragoman.server.routes import ROUTES
from dragoman.storage.base import KeptResponse
from dragoman.storage.memory import MemoryResponses

ID = "chatcmpl-1"
SOON = 5


class Unborn(WorkerEngine):
    """A worker whose process is not there yet."""

    def __init__(self) -> None:
        super().__init__("scripted", "unborn", {})
        self.born = asyncio.Event()
        self.failure: Exception | None = None
        self.asked: asyncio.Queue[int] = asyncio.Queue()
        self.opened: asyncio.Queue[int] = asyncio.Queue()

    async def start(self) -> None:
        pass

    def pass_on_now(self, follower: Follower, key: int, request: msgspec.Raw) -> bool:
        return False

    async def pass_on(self, follower: Follower, key: int, request: msgspec.Raw) -> None:
        self.asked.put_nowait(key)
        await self.born.wait()
        if self.failure is not None:
            raise self.failure
        self.opened.put_nowait(key)


@asynccontextmanager
async def linked(app: App) -> AsyncIterator[Parent]:
    """The front end's side of a desk."""
    ours, theirs = socket.socketpair()
    lost = asyncio.Event()
    desk = Desk(app, lost.set, lambda: None, lambda: None)
    parent = Parent(lambda command: None, lambda: None)
    await desk.link.connect(ours)
    await parent.link.connect(theirs)
    try:
        yield parent
    finally:
        theirs.shutdown(socket.SHUT_RDWR)
        await lost.wait()
        desk.close()
        await app.stop()


async def engage(parent: Parent, estimate: Estimate | None = None) -> None:
    told: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
    parent.hear(ID, lambda message: None if told.done() else told.set_result(message))
    parent.send(Engage(ID, "anonymous", None, Wish("", (), estimate, strict=False), None, None))
    assert isinstance(await told, Engaged)


def test_a_worker_that_cannot_be_started_is_told_at_once() -> None:
    async def scenario() -> None:
        engine = Unborn()
        engine.failure = OSError(errno.EMFILE, "too many open files")
        engine.born.set()
        async with linked(build_app(ENGINES_ONLY, [engine])) as parent:
            await engage(parent)
            async with aclosing(parent.generate(ID, GenerationRequest())) as stream, asyncio.timeout(SOON):
                with pytest.raises(EngineFailed, match="OSError"):
                    await anext(stream)

    asyncio.run(scenario())


def test_what_nobody_wants_any_more_is_not_begun_when_its_worker_is_there() -> None:
    async def scenario() -> None:
        engine = Unborn()
        async with linked(build_app(ENGINES_ONLY, [engine])) as parent, asyncio.timeout(SOON):
            await engage(parent)
            choices = [asyncio.ensure_future(anext(parent.generate(ID, GenerationRequest()))) for _ in range(3)]
            keys = [await engine.asked.get() for _ in choices]
            choices[0].cancel()
            # When the next has come, what was said before it has been heard.
            choices.append(asyncio.ensure_future(anext(parent.generate(ID, GenerationRequest()))))
            keys.append(await engine.asked.get())
            engine.born.set()
            assert [await engine.opened.get() for _ in range(3)] == keys[1:]
            for choice in choices:
                choice.cancel()
            await asyncio.gather(*choices, return_exceptions=True)

    asyncio.run(scenario())


def test_tokens_of_a_front_end_that_died_are_spent_and_its_place_is_not() -> None:
    limits = KeyLimits(concurrency=1, tokens_per_minute=1000)
    settings = Settings(models_dir=(), api_keys=("a",), keys=Keys(limits=limits))
    headers = {b"authorization": b"", b"x-api-key": b"a"}

    async def scenario() -> None:
        app = build_app(settings, [ScriptedEngine()])
        async with linked(app) as parent, asyncio.timeout(SOON):
            assert isinstance(await parent.ask(Enter(ID, b"", b"a")), Entered)
            await engage(parent, Estimate(100, 1, 500))
        lease = app.lease_for(headers)
        assert lease is not None
        assert [rate.remaining for rate in lease.rates()] == [400]
        lease.enter()

    asyncio.run(scenario())


def test_a_request_that_cannot_be_read_is_nobody_else_s_trouble() -> None:
    async def scenario() -> None:
        app = build_app(ENGINES_ONLY, [ScriptedEngine()])
        async with linked(app) as parent, asyncio.timeout(SOON):
            await engage(parent)
            unreadable: Any = {"model": 7}
            with pytest.raises(EngineFailed, match="ValidationError"):
                await anext(parent.generate(ID, unreadable))
            hello = GenerationRequest(messages=(Message("user", (Text("hello"),)),))
            async with aclosing(parent.generate(ID, hello)) as stream:
                assert type((await anext(stream))[0]) is Started

    asyncio.run(scenario())


def test_what_cannot_be_done_with_a_request_is_nobody_else_s_trouble() -> None:
    class Lawless(App):
        def lease_for(self, headers: Mapping[bytes, bytes]) -> Lease | None:
            raise RuntimeError("nobody expected this")

    async def scenario() -> None:
        async with linked(Lawless(ROUTES, ENGINES_ONLY, [ScriptedEngine()])) as parent, asyncio.timeout(SOON):
            for number in range(2):
                answer = await parent.ask(Enter(f"chatcmpl-{number}", b"", b""))
                assert isinstance(answer, Refused)
                assert "internal error" in answer.error().message
            await engage(parent)

    asyncio.run(scenario())


def test_what_the_parent_cannot_answer_is_refused() -> None:
    class Broken(App):
        async def __call__(self, *_: object) -> None:
            raise RuntimeError("nobody expected this")

    class Forgetful(MemoryResponses):
        async def find(self, principal: str, response_id: str) -> KeptResponse | None:
            raise RuntimeError("nor this")

    async def scenario() -> None:
        app = Broken(ROUTES, ENGINES_ONLY, [ScriptedEngine()])
        app.responses = Forgetful(count=1, size=1, seconds=1)
        async with linked(app) as parent, asyncio.timeout(SOON):
            with pytest.raises(EngineFailed, match="internal error"):
                await relayed(parent, Relay(ID, {"type": "http"}, b""))
            with pytest.raises(EngineFailed, match="internal error"):
                await RemoteResponses(parent).find("anonymous", "resp_1")

    asyncio.run(scenario())


def test_an_engine_that_says_of_itself_what_is_none_is_refused_and_nobody_else(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Odd(ScriptedEngine):
        tells_calls: Any = "now and then"

    async def scenario() -> None:
        async with (
            linked(build_app(ENGINES_ONLY, [Odd("odd"), ScriptedEngine("even")])) as parent,
            asyncio.timeout(SOON),
        ):
            told: asyncio.Queue[Answer] = asyncio.Queue()
            for model in ("odd", "even"):
                parent.hear(model, told.put_nowait)
                parent.send(Engage(model, "anonymous", None, Wish(model, (), None, strict=False), None, None))
            answers = {answer.id: answer for answer in (await told.get(), await told.get())}
            refused = answers["odd"]
            assert isinstance(refused, Refused)
            assert "the engine failed (ValidationError)" in refused.error().message
            assert isinstance(answers["even"], Engaged)

    asyncio.run(scenario())
    assert "what the engine says of itself cannot be read" in caplog.messages
