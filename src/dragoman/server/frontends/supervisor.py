"""Starts, restarts, configures and stops the front ends, and binds the sockets that they listen on.

Rules
1. A front end that dies soon after its start is restarted after a growing pause.
2. Until all front ends listen, a death ends the server. A front end that hangs during that time is killed and replaced;
   `MOST_LATE` hanging ones in a row on the same sockets end the server.
3. At the end, front ends have the grace time plus `END_SECONDS`, then they are killed. A forced stop has no grace time.
4. A front end that has not applied a new configuration within `APPLY_SECONDS` is killed, so that old keys stop working.
   One that does not listen yet is exempt: it reads the configuration before it accepts connections.
5. Front ends have their own sessions, so that signals to the server's process group do not reach them.
6. The sockets belong to the parent and stay open while a front end restarts; new connections wait. On Linux each front
   end has its own sockets on the same port (SO_REUSEPORT), and the kernel distributes connections evenly. A Unix
   socket, or a port on other systems, is one socket that all front ends accept from.
"""

import asyncio
import errno
import logging
import os
import socket
import sys
import time
from itertools import chain, count
from pathlib import Path

from dragoman.config.settings import Settings
from dragoman.core.errors import ConfigError
from dragoman.ipc.restart_backoff import RestartBackoff
from dragoman.ipc.worker_messages import OWN_NUMBER
from dragoman.server.app import App
from dragoman.server.frontends.messages import ForceStop, GracefulStop, ShutdownNotice
from dragoman.server.frontends.parent import FrontEndConnection
from dragoman.server.http.acceptor import BACKLOG
from dragoman.server.http.server import FORCED_STOP_SECONDS, bind_sockets, unix_socket

log = logging.getLogger("dragoman.fronts")

SHORTEST_PAUSE, LONGEST_PAUSE = 0.4, 10.0
MOST_LATE = 3
APPLY_SECONDS = 5.0
END_SECONDS = 8.0
"""Time beyond the grace time, to send errors to cancelled requests and to exit."""


class FrontEndSupervisor:
    def __init__(self, app: App, socket_groups: list[list[socket.socket]]) -> None:
        self._app = app
        self._socket_groups = socket_groups
        self._numbers = count(OWN_NUMBER + 1)
        self._tasks = [asyncio.create_task(self._keep_running(sockets)) for sockets in socket_groups]
        self._processes: set[asyncio.subprocess.Process] = set()
        self._connections: set[FrontEndConnection] = set()
        self._all_listen = asyncio.Event()
        self._stopping = asyncio.Event()
        app.settings_listeners.append(self._configure)

    @property
    def _listening_count(self) -> int:
        return sum(connection.is_listening and not connection.monitor.is_killed for connection in self._connections)

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
        backoff = RestartBackoff(SHORTEST_PAUSE, LONGEST_PAUSE)
        late = 0
        while not self._stopping.is_set():
            if backoff.pause:
                await self._pause(backoff.pause)
            started_at = time.monotonic()
            was_hanging = False
            try:
                connection, request_count = await self._run(sockets)
                was_hanging = connection.monitor.is_killed
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
                if late >= MOST_LATE:
                    raise ConfigError(
                        f"{late} front ends in a row did not listen; try again, or start fewer (--workers)"
                    )
            log.error("a front end %s; starting another", problem)

    async def _pause(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
        except TimeoutError:
            pass

    async def _run(self, sockets: list[socket.socket]) -> tuple[FrontEndConnection, int]:
        """Run a front end to its end; return its connection and the number of requests that ended with it."""
        ours, theirs = socket.socketpair()
        numbers = [theirs.fileno(), *(listener.fileno() for listener in sockets)]
        try:
            with theirs:
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", "dragoman.server.frontends.process", *map(str, (os.getpid(), *numbers))),
                    stdin=asyncio.subprocess.DEVNULL,
                    pass_fds=numbers,
                    start_new_session=True,
                )
        except BaseException:
            ours.close()
            raise
        closed = asyncio.Event()
        connection = FrontEndConnection(self._app, closed.set, self._note_listening, lambda: _kill(process))
        self._processes.add(process)
        try:
            await connection.link.connect(ours)
            connection.begin(next(self._numbers), self._app.settings)
            self._connections.add(connection)
            if self._app.is_stopping:
                connection.send(ShutdownNotice())
            if self._stopping.is_set():
                connection.send(GracefulStop())
            await closed.wait()
            return connection, connection.close()
        finally:
            connection.close()
            self._connections.discard(connection)
            if not self._stopping.is_set():
                # A front end without a connection is useless.
                _kill(process)
            await process.wait()
            self._processes.discard(process)

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
                connection.monitor.kill(f"has not applied the configuration within {APPLY_SECONDS:g} s")

    def announce_stop(self) -> None:
        for connection in self._connections:
            connection.send(ShutdownNotice())

    async def stop(self, grace: float) -> None:
        """Close the sockets, give running requests the grace time, then kill the front ends that are left."""
        self._stopping.set()
        for listener in chain.from_iterable(self._socket_groups):
            listener.close()
        for connection in self._connections:
            connection.send(GracefulStop())
        await asyncio.wait(self._tasks, timeout=grace + END_SECONDS)
        await self.end()

    def force_stop(self) -> None:
        """Cancel running requests now, and kill the front ends that do not end."""
        self._stopping.set()
        for connection in self._connections:
            connection.send(ForceStop())
        asyncio.get_running_loop().call_later(FORCED_STOP_SECONDS + 1, self.kill)

    def kill(self) -> None:
        """Kill all front ends and start no others."""
        self._stopping.set()
        for process in self._processes:
            _kill(process)

    async def end(self) -> None:
        """Kill all front ends and wait for their end."""
        self.kill()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def bind_frontend_sockets(settings: Settings, count: int) -> list[list[socket.socket]]:
    """Bind the sockets; return those of each front end."""
    if settings.socket is not None:
        shared = [unix_socket(Path(settings.socket))]
    elif sys.platform == "linux":
        groups = [bind_sockets(settings.host, settings.port, is_shared=True)]
        # Port 0 lets the system choose one for the first group.
        port = groups[0][0].getsockname()[1]
        groups += [bind_sockets(settings.host, port, is_shared=True) for _ in range(count - 1)]
        return [_listen(sockets) for sockets in groups]
    else:
        shared = bind_sockets(settings.host, settings.port, is_shared=True)
    return [_listen(shared)] * count


def _listen(sockets: list[socket.socket]) -> list[socket.socket]:
    for listener in sockets:
        listener.listen(BACKLOG)
    return sockets


def _hint(error: OSError) -> str:
    is_full = error.errno in (errno.EMFILE, errno.ENFILE)
    return "; allow more (ulimit -n), or start fewer (--workers)" if is_full else ""


def _kill(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        try:
            process.kill()
        except ProcessLookupError:
            # It has ended, but the event loop has not noticed yet.
            pass
