"""Runs background responses: requests whose callers do not wait.

Rules
1. A background response is stored before the reply to its caller. It runs as a job of its caller, with a slot, an entry
   in the ledger and a line in the logs.
2. If the model has no room now, the response stays queued and is tried again.
3. When the server stops, running responses have the grace time; then they fail. Queued ones stay queued: the next start
   runs them, or another server that shares the database.
4. One caller may have at most as many as there is room for others.
5. A response that was in progress when its server died is failed, because its caller may have seen a part of it.
"""

import asyncio
import logging
from typing import NamedTuple, Protocol

import msgspec

from dragoman.core.errors import DECODE_ERRORS, QueueFull, StorageUnavailable, Unauthorized
from dragoman.server.app_calls import AppReply, RequestJob, call_app, job_scope
from dragoman.server.auth.callers import Caller, SavedCaller
from dragoman.storage.response_values import StoredResponse
from dragoman.storage.responses import ResponseStore

log = logging.getLogger("dragoman.server")

MAX_WAITING = 1000
"""Background responses of one server that have not ended."""
MAX_BYTES = 256 * 1024 * 1024
"""The bodies of their requests, which are in memory. One alone may be larger."""
RETRY_SECONDS = 1.0
CODES = {"rate_limit_exceeded": "rate_limit_exceeded", "insufficient_quota": "rate_limit_exceeded"}
"""The code of a failed response, by the code of its error. For other codes the status decides."""


class BackgroundRequest(msgspec.Struct, frozen=True):
    """The stored request of a background response. `strict` is the header X-Dragoman-Strict."""

    caller: SavedCaller
    model: str
    body: bytes
    strict: bytes | None = None


class _Waiting(NamedTuple):
    """A response that has not ended, with the size of its request."""

    principal: str
    size: int


class BackgroundStarter(Protocol):
    async def start(self, queued: StoredResponse, request: BackgroundRequest, frames: bytes) -> None:
        """Store a response and run it. `frames` are the first ones of its stream."""


class CallableApp(Protocol):
    """What background responses need of the app, besides calling it."""

    def restore_caller(self, saved: SavedCaller) -> Caller:
        """The caller of a stored request. Raises Unauthorized if its key is no longer valid."""

    async def check_model(self, caller: Caller, name: str) -> None:
        """Raise an error if there is no such model, or if the caller may not use it."""


_decoder = msgspec.msgpack.Decoder(BackgroundRequest)


class BackgroundResponses:
    """`path` is the route to which the requests are sent."""

    def __init__(self, app: CallableApp, store: ResponseStore, path: str) -> None:
        self._app = app
        self._store = store
        self._path = path
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._cancelled: dict[str, asyncio.Event] = {}
        self._waiting: dict[str, _Waiting] = {}
        """Those that have not ended, also those that are being stored."""
        self._stopping = asyncio.Event()

    async def start(self, queued: StoredResponse, request: BackgroundRequest, frames: bytes) -> None:
        await self._app.check_model(self._app.restore_caller(request.caller), request.model)
        total = sum(waiting.size for waiting in self._waiting.values())
        own = sum(waiting.principal == queued.principal for waiting in self._waiting.values())
        # A caller may use as much room as is left for others.
        if own >= MAX_WAITING - len(self._waiting) or (total and total + len(request.body) > MAX_BYTES):
            message = f"{len(self._waiting)} background responses are waiting, {total} bytes of them; try again later"
            raise QueueFull(message, retry_after=5)
        self._waiting[queued.id] = _Waiting(queued.principal, len(request.body))
        # Without the shield, a response whose client leaves now would be stored, and run only after the next start.
        await asyncio.shield(self._queue(queued, request, frames))

    async def _queue(self, queued: StoredResponse, request: BackgroundRequest, frames: bytes) -> None:
        try:
            await self._store.queue(queued, msgspec.msgpack.encode(request), frames)
        except Exception:
            del self._waiting[queued.id]
            raise
        self._run(queued.id, request)

    async def resume(self) -> None:
        """End responses of servers that died, and run those that were still queued. A periodic job."""
        for lost in await self._store.close_lost():
            log.info("response %s was queued when its server stopped; it runs now", lost.id)
            self._run(lost.id, _decoder.decode(lost.request))

    async def cancel(self, response_id: str) -> None:
        """Stop a response if it runs here, and wait until it has stopped."""
        task = self._tasks.get(response_id)
        if task is not None:
            self._cancelled[response_id].set()
            await asyncio.wait((task,))

    async def stop(self, grace: float, forced: asyncio.Event) -> None:
        """Give running responses the grace time, then fail them. A forced stop ends the grace time."""
        self._stopping.set()
        if not self._tasks:
            return
        ending = asyncio.gather(*self._tasks.values(), return_exceptions=True)
        waiting = asyncio.create_task(forced.wait())
        await asyncio.wait((ending, waiting), timeout=grace, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if not ending.done():
            log.info("failing %d background responses that did not finish", len(self._tasks))
            for task in list(self._tasks.values()):
                task.cancel()
            await asyncio.wait((ending,))

    def _run(self, response_id: str, request: BackgroundRequest) -> None:
        if response_id in self._tasks:
            return
        self._waiting[response_id] = _Waiting(request.caller.principal, len(request.body))
        self._cancelled[response_id] = cancelled = asyncio.Event()
        self._tasks[response_id] = task = asyncio.create_task(self._generate(response_id, request, cancelled))

        def forget(_: object) -> None:
            del self._tasks[response_id], self._cancelled[response_id], self._waiting[response_id]

        task.add_done_callback(forget)

    async def _generate(self, response_id: str, request: BackgroundRequest, cancelled: asyncio.Event) -> None:
        try:
            while (pause := await self._try(response_id, request, cancelled)) is not None:
                await self._pause(pause, cancelled)
        except StorageUnavailable:
            # The database has logged the reason, and the store ends the response later.
            self._store.note_lost([response_id])
        except Exception:
            log.exception("background response %s failed", response_id)
            self._store.note_lost([response_id])

    async def _try(self, response_id: str, request: BackgroundRequest, cancelled: asyncio.Event) -> float | None:
        """Run the response. If there is no room for it now, return how long to wait before the next attempt."""
        if cancelled.is_set() or self._stopping.is_set():
            return None
        try:
            caller = self._app.restore_caller(request.caller)
        except Unauthorized as error:
            await self._store.end_early(response_id, "failed", "server_error", error.message)
            return None
        scope = job_scope(RequestJob(caller, response_id), self._path)
        if request.strict is not None:
            scope["headers"].append((b"x-dragoman-strict", request.strict))
        reply = await call_app(self._app, scope, request.body, cancelled, _discard)
        if cancelled.is_set() or reply.status == 200 or self._stopping.is_set():
            return None
        if reply.status == 503:
            return _retry_after(reply)
        await self._store.end_early(response_id, "failed", *_describe_error(reply))
        return None

    async def _pause(self, seconds: float, cancelled: asyncio.Event) -> None:
        waiting = [asyncio.create_task(event.wait()) for event in (cancelled, self._stopping)]
        try:
            await asyncio.wait(waiting, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waiting:
                wait.cancel()


def _retry_after(reply: AppReply) -> float:
    header = dict(reply.headers).get(b"retry-after", b"")
    return float(header) if header.isdigit() else RETRY_SECONDS


async def _discard(part: bytes) -> None:
    """The request stores its events itself."""


def _describe_error(reply: AppReply) -> tuple[str, str]:
    """The code and the message of a failed response, from the error that its request got."""
    try:
        error = msgspec.json.decode(reply.body)["error"]
        code, message = error["code"], error["message"]
    except (*DECODE_ERRORS, KeyError, TypeError):
        return "server_error", "internal error; see the server's log"
    if code == "context_length_exceeded":
        return code, message
    return CODES.get(code, "invalid_prompt" if reply.status < 500 else "server_error"), message
