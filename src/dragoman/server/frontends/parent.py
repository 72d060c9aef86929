"""Contains the parent's end of the connection to one front end, and handles the messages of its requests.

Rules
1. What a request holds (quota, slots, engine) is released when the request leaves or its front end dies. Tokens
   reserved by a front end that died count as spent, because they may have been.
2. The progress of all generations leaves in one message per turn of the event loop.
3. An error while a message is handled is reported to its request and affects no other. A message that cannot be decoded
   ends the connection and with it the front end.
4. A front end is killed if more than `MOST_UNSENT` bytes wait for it, if it misses `MOST_PINGS` pings in a row, or if
   it does not listen `LISTEN_SECONDS` after its start. Pings are counted instead of seconds because the parent itself
   may have been suspended, with unread answers in its socket.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import msgspec

from dragoman.config.settings import Settings
from dragoman.ipc.link import Link
from dragoman.server.app import App
from dragoman.server.frontends import messages
from dragoman.server.frontends.relay import AppCallHandlers
from dragoman.server.frontends.request_state import Handler, RequestHandlers

log = logging.getLogger("dragoman.fronts")

MOST_UNSENT = 256 * 1024 * 1024
PING_SECONDS = 2.0
MOST_PINGS = 5
LISTEN_SECONDS = 60.0


class FrontEndMonitor:
    """Detects a front end that does not listen or does not answer, and calls `kill` once."""

    def __init__(self, send: Callable[[messages.ToFrontEnd], None], kill: Callable[[], None]) -> None:
        self._send = send
        self._kill = kill
        self._loop = asyncio.get_running_loop()
        self._unanswered = 0
        self._timer: asyncio.TimerHandle | None = None
        self.is_killed = False
        """After the kill, messages of the front end no longer count."""

    def start(self) -> None:
        self._timer = self._loop.call_later(LISTEN_SECONDS, self._report_not_listening)

    def start_pings(self) -> None:
        self.stop()
        self._timer = self._loop.call_later(PING_SECONDS, self._ping)

    def note_pong(self) -> None:
        self._unanswered = 0

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def kill(self, reason: str) -> None:
        if not self.is_killed:
            self.is_killed = True
            log.error("a front end %s; killing it", reason)
            self._kill()

    def _report_not_listening(self) -> None:
        self.kill(f"does not listen {LISTEN_SECONDS:g} s after its start")

    def _ping(self) -> None:
        if self._unanswered >= MOST_PINGS:
            self.kill(f"has not answered for {MOST_PINGS * PING_SECONDS:g} s")
            return
        self._unanswered += 1
        self._send(messages.Ping())
        self._timer = self._loop.call_later(PING_SECONDS, self._ping)


class FrontEndConnection:
    """`on_listening` is called when the front end accepts connections, `kill` when it must be killed."""

    def __init__(
        self, app: App, on_lost: Callable[[], None], on_listening: Callable[[], None], kill: Callable[[], None]
    ) -> None:
        self.link = Link(self._receive, on_lost)
        self.monitor = FrontEndMonitor(self.send, kill)
        self.is_listening = False
        self._on_listening = on_listening
        self._loop = asyncio.get_running_loop()
        self._requests = RequestHandlers(app, self)
        self._app_calls = AppCallHandlers(app, self)
        self._pending_configs: deque[asyncio.Future[None]] = deque()
        self._batch: list[msgspec.Raw] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._handlers: dict[type, Handler] = {
            messages.Listening: self._note_listening,
            messages.ConfigApplied: self._note_config_applied,
            messages.Pong: lambda _: self.monitor.note_pong(),
            **self._requests.handlers(),
            **self._app_calls.handlers(),
        }

    def begin(self, number: int, settings: Settings) -> None:
        self.send(messages.StartFrontEnd(number, _without_models(settings)))
        self.monitor.start()

    def configure(self, settings: Settings) -> "asyncio.Future[None]":
        """Send new settings; the future is done when the front end has applied them."""
        applied: asyncio.Future[None] = self._loop.create_future()
        self._pending_configs.append(applied)
        self.send(messages.ApplyConfig(_without_models(settings)))
        return applied

    def send(self, message: messages.ToFrontEnd) -> None:
        self.link.send(messages.encode(message))

    def put(self, progress: msgspec.Raw) -> None:
        if not self._batch:
            self._loop.call_soon(self._flush)
        self._batch.append(progress)

    def _flush(self) -> None:
        batch, self._batch = self._batch, []
        self.link.send(messages.encode(messages.RawProgressBatch(tuple(batch))))
        if self.link.unsent > MOST_UNSENT:
            self.monitor.kill(f"has not read {self.link.unsent / 1e6:.0f} MB of output")

    def close(self) -> int:
        """Release everything after the front end has gone; return the number of requests that it had."""
        self.link.close()
        self.monitor.stop()
        while self._pending_configs:
            self._note_config_applied(messages.ConfigApplied())
        return self._requests.close() + self._app_calls.close()

    def spawn(
        self, request_id: str, work: Coroutine[Any, Any, None], tasks: "set[asyncio.Task[None]] | None" = None
    ) -> "asyncio.Task[None]":
        """Start a task whose error is reported to the request."""
        tasks = self._tasks if tasks is None else tasks
        task = self._loop.create_task(work)
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        task.add_done_callback(partial(self._report_error, request_id))
        return task

    def _report_error(self, request_id: str, task: "asyncio.Task[None]") -> None:
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Exception):
            self._requests.refuse(request_id, error)

    def _receive(self, body: memoryview) -> None:
        message = messages.decode_to_parent(body)
        try:
            self._handlers[type(message)](message)
        except Exception as error:
            if isinstance(message, messages.Listening | messages.ConfigApplied | messages.Pong):
                # These belong to no request.
                raise
            self._requests.refuse(message.id, error)

    def _note_listening(self, message: messages.Listening) -> None:
        if not self.monitor.is_killed:
            self.is_listening = True
            self._on_listening()
            self.monitor.start_pings()

    def _note_config_applied(self, message: messages.ConfigApplied) -> None:
        applied = self._pending_configs.popleft()
        if not applied.done():
            applied.set_result(None)


def _without_models(settings: Settings) -> Settings:
    """Front ends do not need the models."""
    return msgspec.structs.replace(settings, models=(), aliases={}, default=None)
