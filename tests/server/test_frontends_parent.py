"""The parent answers every message of a front end, whatever goes wrong."""

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
from dragoman.ipc.worker_process import ProgressSink
from dragoman.server.app import App
from dragoman.server.auth.quotas import Estimate, QuotaLease
from dragoman.server.factory import ENGINES_ONLY, build_app
from dragoman.server.frontends.messages import (
    AcquireLease,
    Answer,
    EnterQuota,
    ErrorReply,
    LeaseGranted,
    QuotaEntered,
    Relay,
)
from dragoman.server.frontends.parent import FrontEndConnection
from dragoman.server.frontends.remote import ParentConnection, RemoteResponses, relay_request
from dragoman.server.model_lease import LeaseRequest
from dragoman.server.routes import ROUTES
from dragoman.storage.base import StoredResponse
from dragoman.storage.memory import MemoryResponseStore

ID = "chatcmpl-1"
SOON = 5


class StartingWorker(WorkerEngine):
    """A worker engine whose worker does not run yet."""

    def __init__(self) -> None:
        super().__init__("scripted", "starting", {})
        self.running = asyncio.Event()
        self.failure: Exception | None = None
        self.asked: asyncio.Queue[int] = asyncio.Queue()
        self.opened: asyncio.Queue[int] = asyncio.Queue()

    async def start(self) -> None:
        pass

    def forward_now(self, sink: ProgressSink, key: int, request: msgspec.Raw) -> bool:
        return False

    async def forward(self, sink: ProgressSink, key: int, request: msgspec.Raw) -> None:
        self.asked.put_nowait(key)
        await self.running.wait()
        if self.failure is not None:
            raise self.failure
        self.opened.put_nowait(key)


@asynccontextmanager
async def linked(app: App) -> AsyncIterator[ParentConnection]:
    """Yield the front end's end of a connection to the app."""
    ours, theirs = socket.socketpair()
    lost = asyncio.Event()
    connection = FrontEndConnection(app, lost.set, lambda: None, lambda: None)
    parent = ParentConnection(lambda command: None, lambda: None)
    await connection.link.connect(ours)
    await parent.link.connect(theirs)
    try:
        yield parent
    finally:
        theirs.shutdown(socket.SHUT_RDWR)
        await lost.wait()
        connection.close()
        await app.stop()


async def acquire_lease(parent: ParentConnection, estimate: Estimate | None = None) -> None:
    answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
    parent.add_listener(ID, lambda message: None if answer.done() else answer.set_result(message))
    parent.send(AcquireLease(ID, "anonymous", None, LeaseRequest("", (), estimate, strict=False), None, None))
    assert isinstance(await answer, LeaseGranted)


def test_worker_start_error_is_reported_at_once() -> None:
    async def scenario() -> None:
        engine = StartingWorker()
        engine.failure = OSError(errno.EMFILE, "too many open files")
        engine.running.set()
        async with linked(build_app(ENGINES_ONLY, [engine])) as parent:
            await acquire_lease(parent)
            async with aclosing(parent.generate(ID, GenerationRequest())) as stream, asyncio.timeout(SOON):
                with pytest.raises(EngineFailed, match="OSError"):
                    await anext(stream)

    asyncio.run(scenario())


def test_cancelled_generation_is_not_started_later() -> None:
    async def scenario() -> None:
        engine = StartingWorker()
        async with linked(build_app(ENGINES_ONLY, [engine])) as parent, asyncio.timeout(SOON):
            await acquire_lease(parent)
            choices = [asyncio.ensure_future(anext(parent.generate(ID, GenerationRequest()))) for _ in range(3)]
            keys = [await engine.asked.get() for _ in choices]
            choices[0].cancel()
            # Once the next one has arrived, the cancellation has been handled.
            choices.append(asyncio.ensure_future(anext(parent.generate(ID, GenerationRequest()))))
            keys.append(await engine.asked.get())
            engine.running.set()
            assert [await engine.opened.get() for _ in range(3)] == keys[1:]
            for choice in choices:
                choice.cancel()
            await asyncio.gather(*choices, return_exceptions=True)

    asyncio.run(scenario())


def test_dead_front_end_spends_its_tokens_and_frees_its_slots() -> None:
    limits = KeyLimits(concurrency=1, tokens_per_minute=1000)
    settings = Settings(models_dir=(), api_keys=("a",), keys=Keys(limits=limits))
    headers = {b"authorization": b"", b"x-api-key": b"a"}

    async def scenario() -> None:
        app = build_app(settings, [ScriptedEngine()])
        async with linked(app) as parent, asyncio.timeout(SOON):
            assert isinstance(await parent.ask(EnterQuota(ID, b"", b"a")), QuotaEntered)
            await acquire_lease(parent, Estimate(100, 1, 500))
        lease = app.quota_lease_for(headers)
        assert lease is not None
        assert [rate.remaining for rate in lease.rates()] == [400]
        lease.enter()

    asyncio.run(scenario())


def test_undecodable_request_fails_alone() -> None:
    async def scenario() -> None:
        app = build_app(ENGINES_ONLY, [ScriptedEngine()])
        async with linked(app) as parent, asyncio.timeout(SOON):
            await acquire_lease(parent)
            unreadable: Any = {"model": 7}
            with pytest.raises(EngineFailed, match="ValidationError"):
                await anext(parent.generate(ID, unreadable))
            hello = GenerationRequest(messages=(Message("user", (Text("hello"),)),))
            async with aclosing(parent.generate(ID, hello)) as stream:
                assert type((await anext(stream))[0]) is Started

    asyncio.run(scenario())


def test_internal_error_fails_only_its_request() -> None:
    class FailingQuotas(App):
        def quota_lease_for(self, headers: Mapping[bytes, bytes]) -> QuotaLease | None:
            raise RuntimeError("unexpected")

    async def scenario() -> None:
        async with linked(FailingQuotas(ROUTES, ENGINES_ONLY, [ScriptedEngine()])) as parent, asyncio.timeout(SOON):
            for number in range(2):
                answer = await parent.ask(EnterQuota(f"chatcmpl-{number}", b"", b""))
                assert isinstance(answer, ErrorReply)
                assert "internal error" in answer.error().message
            await acquire_lease(parent)

    asyncio.run(scenario())


def test_internal_errors_of_relays_and_stores_are_reported() -> None:
    class FailingApp(App):
        async def __call__(self, *_: object) -> None:
            raise RuntimeError("unexpected")

    class FailingStore(MemoryResponseStore):
        async def find(self, principal: str, response_id: str) -> StoredResponse | None:
            raise RuntimeError("unexpected")

    async def scenario() -> None:
        app = FailingApp(ROUTES, ENGINES_ONLY, [ScriptedEngine()])
        app.responses = FailingStore(count=1, size=1, seconds=1)
        async with linked(app) as parent, asyncio.timeout(SOON):
            with pytest.raises(EngineFailed, match="internal error"):
                await relay_request(parent, Relay(ID, {"type": "http"}, b""))
            with pytest.raises(EngineFailed, match="internal error"):
                await RemoteResponses(parent).find("anonymous", "resp_1")

    asyncio.run(scenario())


def test_engine_with_invalid_description_fails_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Odd(ScriptedEngine):
        emits_tool_calls: Any = "sometimes"

    async def scenario() -> None:
        async with (
            linked(build_app(ENGINES_ONLY, [Odd("odd"), ScriptedEngine("even")])) as parent,
            asyncio.timeout(SOON),
        ):
            received: asyncio.Queue[Answer] = asyncio.Queue()
            for model in ("odd", "even"):
                parent.add_listener(model, received.put_nowait)
                parent.send(
                    AcquireLease(model, "anonymous", None, LeaseRequest(model, (), None, strict=False), None, None)
                )
            answers = {answer.id: answer for answer in (await received.get(), await received.get())}
            refused = answers["odd"]
            assert isinstance(refused, ErrorReply)
            assert "the engine failed (ValidationError)" in refused.error().message
            assert isinstance(answers["even"], LeaseGranted)

    asyncio.run(scenario())
    assert "the engine's description of itself cannot be decoded" in caplog.messages
