"""Starts, restarts, configures and stops the front ends.

Rules
1. A front end that dies soon after its start is restarted after a growing pause.
2. Until all front ends listen, a death ends the server. A front end that hangs during that time is killed and replaced;
   `MAX_LATE` hanging ones in a row on the same sockets end the server.
3. At the end, front ends have the grace time plus `END_SECONDS`, then they are killed. A forced stop has no grace time.
4. A front end that has not applied a new configuration within `APPLY_SECONDS` is killed, so that old keys stop working.
   One that does not listen yet is exempt: it reads the configuration before it accepts connections.
5. Front ends have their own sessions, so that signals to the server's process group do not reach them.
6. A front end is killed if it misses its pings, or does not listen `LISTEN_SECONDS` after its start. A message that
   cannot be decoded ends the connection and with it the front end.
7. The sockets belong to the parent and stay open while a front end restarts; new connections wait. On Linux each front
   end has its own sockets on the same port (SO_REUSEPORT), and the kernel distributes connections evenly. A Unix
   socket, or a port on other systems, is one socket that all front ends accept from.
"""

import asyncio
import errno
import logging
import os
import socket
import time
from asyncio.subprocess import Process
from collections import deque
from collections.abc import Callable, Sequence
from itertools import chain, count
from pathlib import Path

import msgspec

from dragoman.config.settings import Settings
from dragoman.core.errors import ConfigError
from dragoman.ipc.child_process import ChildMonitor, RestartBackoff, keep_running, kill_child, start_child
from dragoman.ipc.framing import MessageConnection
from dragoman.ipc.messages import OWN_NUMBER, Pong
from dragoman.server.app import App
from dragoman.server.frontends import messages
from dragoman.server.frontends.messages import Stop
from dragoman.server.frontends.request_handlers import FrontEndOutput, Handler, RequestHandlers
from dragoman.server.http.server import BACKLOG, FORCED_STOP_SECONDS

log = logging.getLogger("dragoman.fronts")

MIN_PAUSE, MAX_PAUSE = 0.4, 10.0
MAX_LATE = 3
LISTEN_SECONDS = 60.0
APPLY_SECONDS = 5.0
END_SECONDS = 8.0
"""Time beyond the grace time, to send errors to cancelled requests and to exit."""


class FrontEndConnection:
    """`on_listening` is called when the front end accepts connections."""

    def __init__(self, app: App, on_listening: Callable[[], None]) -> None:
        self.ended = asyncio.Event()
        self.link = MessageConnection(self._receive, self.ended.set)
        self.output = FrontEndOutput(self.link, self.kill)
        self.process: Process | None = None
        self.is_listening = False
        self.is_killed = False
        """After the kill, messages of the front end no longer count."""
        self._on_listening = on_listening
        self._blobs = app.blobs.directory
        self._monitor = ChildMonitor(self.link, self.kill)
        self._requests = RequestHandlers(app, self.output)
        self._pending_configs: deque[asyncio.Future[None]] = deque()
        self._handlers: dict[type, Handler] = {
            messages.Listening: lambda _: self._note_listening(),
            messages.ConfigApplied: lambda _: self._note_config_applied(),
            Pong: lambda _: self._monitor.note_pong(),
            **self._requests.handlers,
        }

    async def start(self, number: int, sockets: Sequence[int]) -> Process:
        arguments = os.getpid(), number, *sockets
        module = "dragoman.server.frontends.process"
        self.process = await start_child(self.link, module, *arguments, descriptors=sockets)
        return self.process

    def begin(self, settings: Settings) -> None:
        self.output.send(messages.Configure(_for_front_end(settings, self._blobs)))
        self._monitor.limit_start(LISTEN_SECONDS)

    def configure(self, settings: Settings) -> "asyncio.Future[None]":
        """Send new settings; the future is done when the front end has applied them."""
        applied: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._pending_configs.append(applied)
        self.output.send(messages.Configure(_for_front_end(settings, self._blobs)))
        return applied

    def kill(self, reason: str) -> None:
        if not self.is_killed:
            self.is_killed = True
            log.error("a front end %s; killing it", reason)
            self.kill_process()

    def kill_process(self) -> None:
        if self.process is not None:
            kill_child(self.process)

    def close(self) -> int:
        """Release everything after the front end has gone; return the number of requests that it had."""
        self.link.close()
        self._monitor.stop()
        while self._pending_configs:
            self._note_config_applied()
        return self._requests.close()

    def _receive(self, body: memoryview) -> None:
        message = messages.decode_to_parent(body)
        try:
            self._handlers[type(message)](message)
        except Exception:
            # The other requests of the front end go on.
            log.exception("a message of a front end could not be handled")

    def _note_listening(self) -> None:
        if not self.is_killed:
            self.is_listening = True
            self._on_listening()
            self._monitor.start_pings()

    def _note_config_applied(self) -> None:
        applied = self._pending_configs.popleft()
        if not applied.done():
            applied.set_result(None)


class FrontEndSupervisor:
    def __init__(self, app: App, socket_groups: list[list[socket.socket]]) -> None:
        self._app = app
        self._socket_groups = socket_groups
        for listener in chain.from_iterable(socket_groups):
            listener.listen(BACKLOG)
        self._numbers = count(OWN_NUMBER + 1)
        self._tasks = [asyncio.create_task(self._keep_running(sockets)) for sockets in socket_groups]
        self._connections: set[FrontEndConnection] = set()
        self._all_listen = asyncio.Event()
        self._stopping = asyncio.Event()
        app.settings_listeners.append(self._configure)

    @property
    def _listening_count(self) -> int:
        return sum(connection.is_listening and not connection.is_killed for connection in self._connections)

    async def run(self, stopping: asyncio.Event, on_started: Callable[[], None]) -> None:
        """Keep the front ends running until the event is set."""
        await self.wait_until_started(stopping)
        if not stopping.is_set():
            on_started()
        await self.wait_for_any(stopping)

    async def wait_until_started(self, *ends: asyncio.Event) -> None:
        """Wait until all front ends accept connections or one of the events is set."""
        await self.wait_for_any(self._all_listen, *ends)

    async def wait_for_any(self, *events: asyncio.Event) -> None:
        """Wait until one of the events is set; raise if a front end can no longer be kept running."""
        waiting = {asyncio.create_task(event.wait()) for event in events}
        try:
            done, _ = await asyncio.wait([*waiting, *self._tasks], return_when=asyncio.FIRST_COMPLETED)
            for task in done - waiting:
                task.result()
        finally:
            for wait in waiting:
                wait.cancel()

    async def _keep_running(self, sockets: list[socket.socket]) -> None:
        """Run one front end after the other on these sockets until the server stops."""
        backoff = RestartBackoff(MIN_PAUSE, MAX_PAUSE)
        late = 0

        async def run() -> None:
            nonlocal late
            started_at = time.monotonic()
            was_hanging = False
            try:
                connection, request_count = await self._run(sockets)
                was_hanging = connection.is_killed
                late = late + 1 if was_hanging and not connection.is_listening else 0
                problem, hint = f"died with {request_count} requests", "; see the lines above"
            except OSError as error:
                problem, hint = f"could not be started: {error.strerror or error}", _hint(error)
            if self._stopping.is_set():
                return
            backoff.note_failure(age=time.monotonic() - started_at)
            if not self._all_listen.is_set():
                if not was_hanging:
                    raise ConfigError(f"a front end {problem}{hint}")
                if late >= MAX_LATE:
                    raise ConfigError(
                        f"{late} front ends in a row did not listen; try again, or start fewer (--workers)"
                    )
            log.error("a front end %s; starting another", problem)

        await keep_running(run, backoff, self._stopping)

    async def _run(self, sockets: list[socket.socket]) -> tuple[FrontEndConnection, int]:
        """Run a front end to its end; return its connection and the number of requests that ended with it."""
        connection = FrontEndConnection(self._app, self._note_listening)
        process = await connection.start(next(self._numbers), [listener.fileno() for listener in sockets])
        self._connections.add(connection)
        try:
            connection.begin(self._app.settings)
            if self._app.is_stopping:
                connection.output.send(Stop("announced"))
            if self._stopping.is_set():
                connection.output.send(Stop("graceful"))
            await connection.ended.wait()
            return connection, connection.close()
        finally:
            connection.close()
            self._connections.discard(connection)
            if not self._stopping.is_set():
                # A front end without a connection is useless.
                connection.kill_process()
            await process.wait()

    def _note_listening(self) -> None:
        if self._listening_count >= len(self._socket_groups):
            self._all_listen.set()

    async def _configure(self, settings: Settings) -> None:
        pending = {connection.configure(settings): connection for connection in self._connections}
        if not pending:
            return
        _, late = await asyncio.wait(pending, timeout=APPLY_SECONDS)
        for connection in map(pending.__getitem__, late):
            if connection.is_listening:
                connection.kill(f"has not applied the configuration within {APPLY_SECONDS:g} s")

    def announce_stop(self) -> None:
        self._send_stop(Stop("announced"))

    def _send_stop(self, message: Stop) -> None:
        for connection in self._connections:
            connection.output.send(message)

    async def stop(self, grace: float) -> None:
        """Close the sockets, give running requests the grace time, then kill the front ends that are left."""
        self._stopping.set()
        for listener in chain.from_iterable(self._socket_groups):
            listener.close()
        self._send_stop(Stop("graceful"))
        await asyncio.wait(self._tasks, timeout=grace + END_SECONDS)
        await self.end()

    def force_stop(self) -> None:
        """Cancel running requests now, and kill the front ends that do not end."""
        self._stopping.set()
        self._send_stop(Stop("forced"))
        asyncio.get_running_loop().call_later(FORCED_STOP_SECONDS + 1, self.kill)

    def kill(self) -> None:
        """Kill all front ends and start no others."""
        self._stopping.set()
        for connection in self._connections:
            connection.kill_process()

    async def end(self) -> None:
        """Kill all front ends and wait for their end."""
        self.kill()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def _hint(error: OSError) -> str:
    is_full = error.errno in (errno.EMFILE, errno.ENFILE)
    return "; allow more (ulimit -n), or start fewer (--workers)" if is_full else ""


def _for_front_end(settings: Settings, blobs: Path) -> Settings:
    """Front ends do not need the models. They write files where the parent does."""
    replace = msgspec.structs.replace
    return replace(settings, models=(), aliases={}, default=None, storage=replace(settings.storage, blobs=str(blobs)))
