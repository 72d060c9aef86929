"""Jobs: requests that the server answers for a caller who does not wait."""

import asyncio
import json
import threading
from typing import Any

import pytest
from sqlalchemy import Connection

from dragoman import create_app
from dragoman.config.settings import Settings
from dragoman.engines.scripted import ScriptedEngine
from dragoman.server import background
from dragoman.server.app import App
from dragoman.server.app_calls import AppReply, RequestJob, call_app, job_scope
from dragoman.server.auth.callers import Caller
from dragoman.server.base_app import RESPONSES_PATH
from dragoman.storage import response_sql
from dragoman.storage.response_values import StoredResponse
from tests.support.requests import CHAT, HELLO

KEYED = Settings(api_keys=("sk-0123456789abcdef",), hosts=("example.org",))
JOB = RequestJob(Caller("user:anna"), "job-1")


def ask(job: RequestJob, **fields: object) -> tuple[int, bytes, bytes]:
    """Run a chat as a job; return its status, its body, and the parts of its body that came early."""

    async def run() -> tuple[int, bytes, bytes]:
        app = create_app(ScriptedEngine(), settings=KEYED)
        parts: list[bytes] = []

        async def keep(part: bytes) -> None:
            parts.append(part)

        body = json.dumps({"messages": HELLO, **fields}).encode()
        reply = await call_app(app, job_scope(job, CHAT), body, asyncio.Event(), keep if "stream" in fields else None)
        await app.stop()
        return reply.status, reply.body, b"".join(parts)

    return asyncio.run(run())


def test_a_job_needs_no_key_and_has_the_id_of_its_request() -> None:
    status, body, _ = ask(JOB)
    assert status == 200
    assert json.loads(body)["id"] == "job-1"


def test_a_streamed_job_passes_its_frames_on() -> None:
    status, body, parts = ask(JOB, stream=True)
    assert (status, body) == (200, b"")
    assert parts.endswith(b"data: [DONE]\n\n")


def test_a_job_may_do_only_what_its_caller_may() -> None:
    status, body, _ = ask(RequestJob(Caller("user:anna", routes=frozenset({"embeddings"})), "job-1"))
    assert status == 403
    assert "chat routes" in json.loads(body)["error"]["message"]


class SlowQueue:
    """Responses that are queued wait in the thread that writes until `go` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.queued: list[StoredResponse] = []
        self.started = asyncio.Event()
        self.go = threading.Event()
        self._loop, self._queue = asyncio.get_running_loop(), response_sql.queue
        monkeypatch.setattr(response_sql, "queue", self._wait)

    def _wait(self, connection: Connection, response: StoredResponse, *arguments: Any) -> None:
        self.queued.append(response)
        self._loop.call_soon_threadsafe(self.started.set)
        self.go.wait(60)
        self._queue(connection, response, *arguments)


def start_background(app: App) -> asyncio.Task[AppReply]:
    body = json.dumps({"input": "hello", "background": True}).encode()
    scope = job_scope(JOB, RESPONSES_PATH)
    scope["extensions"] = {}
    scope["headers"].append((b"host", b"localhost"))
    return asyncio.create_task(call_app(app, scope, body, asyncio.Event()))


def test_a_background_response_runs_if_its_client_leaves_while_it_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        app, slow = create_app(ScriptedEngine()), SlowQueue(monkeypatch)
        async with asyncio.timeout(30):
            call = start_background(app)
            await slow.started.wait()
            call.cancel()
            await asyncio.wait([call])
            slow.go.set()
            page = None
            while page is None or not page.has_ended:
                page = await app.responses.read_events(slow.queued[0].principal, slow.queued[0].id, -1)
        await app.stop()

    asyncio.run(run())


def test_waiting_background_responses_have_a_total_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "MAX_BYTES", 50)

    async def run() -> None:
        app, slow = create_app(ScriptedEngine()), SlowQueue(monkeypatch)
        async with asyncio.timeout(30):
            first = start_background(app)
            await slow.started.wait()
            refused = await start_background(app)
            assert refused.status == 503
            assert b"1 background responses are waiting" in refused.body
            slow.go.set()
            assert (await first).status == 200
            while (await start_background(app)).status != 200:
                # The first one still runs.
                pass
        await app.stop()

    asyncio.run(run())
