"""The parent answers every message of a front end, whatever goes wrong."""

import asyncio
import errno
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import Any

import msgspec
import pytest

from dragoman.config.sections import KeyLimits, Keys
from dragoman.config.settings import Settings
from dragoman.core.delivery import pull_events
from dragoman.core.engine import Engine, Output, PutProgress
from dragoman.core.errors import EngineFailed
from dragoman.core.events import Event, Started
from dragoman.core.request import GenerationRequest, Message, Text
from dragoman.engines.scripted import ScriptedEngine
from dragoman.ipc.engine_client import make_method_call
from dragoman.ipc.worker_engine import WorkerEngine
from dragoman.server.app import App
from dragoman.server.auth.callers import Estimate, QuotaLease
from dragoman.server.frontends.messages import AcquireLease, LeaseReply, RelayReply
from dragoman.server.frontends.remote import ParentConnection, RemoteResponses
from dragoman.server.frontends.supervisor import FrontEndConnection
from dragoman.server.model_lease import LeaseRequest
from dragoman.server.routes import ENGINES_ONLY, build_app, build_routes
from dragoman.storage.response_values import StoredResponse
from dragoman.storage.responses import ResponseStore

pytestmark = pytest.mark.anyio

ID = "chatcmpl-1"
EMPTY_REQUEST = GenerationRequest()
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

    def forward(self, put: PutProgress, key: int, request: msgspec.Raw) -> bool:
        return False

    async def forward_when_running(self, put: PutProgress, key: int, request: msgspec.Raw) -> None:
        self.asked.put_nowait(key)
        await self.running.wait()
        if self.failure is not None:
            raise self.failure
        self.opened.put_nowait(key)


class EndlessEngine(Engine):
    """Writes a kilobyte in every turn of the event loop."""

    count = 0

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Output]:
        while True:
            self.count += 1
            yield "x" * 1000
            await asyncio.sleep(0)


@asynccontextmanager
async def linked(app: App) -> AsyncIterator[ParentConnection]:
    """Yield the front end's end of a connection to the app."""
    ours, theirs = socket.socketpair()
    connection = FrontEndConnection(app, lambda: None)
    parent = ParentConnection(2, lambda command: None, lambda: None)
    await connection.link.connect(ours)
    await parent.link.connect(theirs)
    try:
        async with asyncio.timeout(SOON):
            yield parent
    finally:
        theirs.shutdown(socket.SHUT_RDWR)
        await connection.ended.wait()
        connection.close()
        await app.stop()


async def acquire_lease(parent: ParentConnection, estimate: Estimate | None = None, model: str = "") -> None:
    request = AcquireLease("anonymous", None, LeaseRequest(model, (), estimate, strict=False), None, None)
    reply = await parent.call_method(make_method_call("acquire_lease", request), LeaseReply, ID)
    assert reply.engine is not None


def generate(
    parent: ParentConnection, request: GenerationRequest = EMPTY_REQUEST
) -> AsyncGenerator[Sequence[Event], None]:
    return pull_events(partial(parent.deliver, request, owner=ID))


async def enter_quota(parent: ParentConnection, api_key: bytes) -> LeaseReply:
    return await parent.call_method(make_method_call("enter_quota", b"", api_key), LeaseReply, ID)


async def test_worker_start_error_is_reported_at_once() -> None:
    engine = StartingWorker()
    engine.failure = OSError(errno.EMFILE, "too many open files")
    engine.running.set()
    async with linked(build_app(ENGINES_ONLY, [engine])) as parent:
        await acquire_lease(parent)
        with pytest.raises(EngineFailed, match="OSError"):
            await anext(generate(parent))


async def test_cancelled_generation_is_not_started_later() -> None:
    engine = StartingWorker()
    async with linked(build_app(ENGINES_ONLY, [engine])) as parent:
        await acquire_lease(parent)
        choices = [asyncio.ensure_future(anext(generate(parent))) for _ in range(3)]
        keys = [await engine.asked.get() for _ in choices]
        choices[0].cancel()
        # Once the next one has arrived, the cancellation has been handled.
        choices.append(asyncio.ensure_future(anext(generate(parent))))
        keys.append(await engine.asked.get())
        engine.running.set()
        assert [await engine.opened.get() for _ in range(3)] == keys[1:]
        for choice in choices:
            choice.cancel()
        await asyncio.gather(*choices, return_exceptions=True)


async def test_engine_waits_for_a_front_end_that_reads_too_slowly() -> None:
    """Otherwise the messages of other requests would wait behind megabytes of its output."""
    engine = EndlessEngine()
    async with linked(build_app(ENGINES_ONLY, [engine])) as parent:
        await acquire_lease(parent)
        async with aclosing(generate(parent)) as stream:
            await anext(stream)
            transport = parent.link._transport
            assert transport is not None
            transport.pause_reading()
            for _ in range(5000):
                await asyncio.sleep(0)
            written = engine.count
            assert written < 2000
            transport.resume_reading()
            while engine.count < written + 100:
                await anext(stream)


async def test_dead_front_end_spends_its_tokens_and_frees_its_slots() -> None:
    limits = KeyLimits(concurrency=1, tokens_per_minute=1000)
    app = build_app(Settings(models_dir=(), api_keys=("a",), keys=Keys(limits=limits)), [ScriptedEngine()])
    async with linked(app) as parent:
        assert (await enter_quota(parent, b"a")).rates
        await acquire_lease(parent, Estimate(100, 1, 500))
    lease = app.quota_lease_for({b"authorization": b"", b"x-api-key": b"a"})
    assert lease is not None
    assert [rate.remaining for rate in lease.rates()] == [400]
    lease.enter()


async def test_undecodable_request_fails_alone() -> None:
    async with linked(build_app(ENGINES_ONLY, [ScriptedEngine()])) as parent:
        await acquire_lease(parent)
        unreadable: Any = {"model": 7}
        with pytest.raises(EngineFailed, match="ValidationError"):
            await anext(generate(parent, unreadable))
        hello = GenerationRequest(messages=(Message("user", (Text("hello"),)),))
        async with aclosing(generate(parent, hello)) as stream:
            assert type((await anext(stream))[0]) is Started


class FailingApp(App):
    def quota_lease_for(self, headers: Mapping[bytes, bytes]) -> QuotaLease | None:
        raise RuntimeError("unexpected")

    async def __call__(self, *_: object) -> None:
        raise RuntimeError("unexpected")


class FailingStore(ResponseStore):
    async def find(self, principal: str, response_id: str) -> StoredResponse | None:
        raise RuntimeError("unexpected")


async def test_internal_errors_fail_only_their_request() -> None:
    app = FailingApp(build_routes(ENGINES_ONLY), ENGINES_ONLY, [ScriptedEngine()])
    app.responses = FailingStore(app.database, ENGINES_ONLY)
    async with linked(app) as parent:
        failure = (await enter_quota(parent, b"")).failure
        assert failure is not None
        assert "internal error" in failure.message
        with pytest.raises(EngineFailed, match="internal error"):
            await parent.call_method(make_method_call("relay", {"type": "http"}, b""), RelayReply, "req-1")
        with pytest.raises(EngineFailed, match="internal error"):
            await RemoteResponses(parent).find("anonymous", "resp_1")
        await acquire_lease(parent)


async def test_engine_with_invalid_description_fails_alone(caplog: pytest.LogCaptureFixture) -> None:
    class Odd(ScriptedEngine):
        emits_tool_calls: Any = "sometimes"

    async with linked(build_app(ENGINES_ONLY, [Odd("odd"), ScriptedEngine("even")])) as parent:
        with pytest.raises(EngineFailed, match="ValidationError"):
            await acquire_lease(parent, model="odd")
        await acquire_lease(parent, model="even")
    assert "engine output cannot be decoded" in caplog.messages
