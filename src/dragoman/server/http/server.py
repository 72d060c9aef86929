"""The HTTP server of one process: listening sockets, TLS and graceful shutdown.

Rules
1. Without a free file descriptor, connections wait in the socket's backlog. The acceptor retries after
   `RETRY_SECONDS`, and logs one line per `LOG_SECONDS`. (uvloop's own server would drop them.)
2. At most `BATCH` connections are accepted in one turn of the event loop.
3. On shutdown no new connections are accepted. Running requests have the grace time; the rest get an error.
4. A forced shutdown skips the grace time, and does not wait for clients that do not read.
"""

import asyncio
import ctypes
import errno
import gc
import logging
import os
import socket
import ssl
import sys
import time
from collections.abc import Callable, Sequence
from email.utils import formatdate
from pathlib import Path

from dragoman.config.sections import Tls
from dragoman.config.settings import Settings
from dragoman.core.errors import ConfigError
from dragoman.server.base_app import BaseApp
from dragoman.server.http.connection import HttpConnection, ServerState

log = logging.getLogger("dragoman")
connection_log = logging.getLogger("dragoman.server")

BACKLOG = 2048
BATCH = 32
RETRY_SECONDS = 0.2
LOG_SECONDS = 60.0
CHECK_SECONDS = 0.5
"""Interval at which the time limits of all connections are checked."""
POLL_SECONDS = 0.05
ERROR_SECONDS = 2.0
"""Time after the grace time to send errors to requests that cannot finish."""
FORCED_STOP_SECONDS = 1.0
"""The same for a forced shutdown."""
M_MMAP_THRESHOLD = -3
"""The value of this option in glibc's malloc.h."""
LARGE_BLOCK = 1024 * 1024
"""Bytes."""


class HttpServer:
    """Serves the app on the listening sockets, which it closes at the end."""

    def __init__(self, app: BaseApp, listeners: Sequence[socket.socket]) -> None:
        settings = app.settings
        self._app = app
        self._listeners = listeners
        self._tls = None if settings.tls is None else tls_context(settings.tls)
        self.state = ServerState(app, settings.limits, app.telemetry)
        self._acceptors: list[Acceptor] = []
        self._timer: asyncio.TimerHandle | None = None
        self._forced = 0

    async def run(self, stopping: asyncio.Event, on_started: Callable[[], None]) -> None:
        """Accept connections; return when the event is set. Connections are accepted until `stop`."""
        state = self.state
        shortest = min(state.limits.body_seconds, state.limits.write_seconds, state.keep_alive_seconds)
        self._check(min(CHECK_SECONDS, shortest / 4))
        self._acceptors = [Acceptor(one, lambda: HttpConnection(state), self._tls) for one in self._listeners]
        on_started()
        await stopping.wait()

    def _check(self, seconds: float) -> None:
        """Check all connections, and set the limits of new ones and the `Date` header: now, and at this interval."""
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(seconds, self._check, seconds)
        self.state.limits = self._app.settings.limits
        self.state.default_headers = [(b"date", formatdate(usegmt=True).encode())]
        now = loop.time()
        for connection in list(self.state.connections):
            connection.check(now)

    def announce_stop(self) -> None:
        self._app.stop_requests()

    async def stop(self, grace_seconds: float) -> None:
        self._close_listeners()
        for connection in list(self.state.connections):
            connection.shutdown()
        await self._wait_until_ended(grace_seconds, forced=1)
        running = list(self.state.tasks)
        if running:
            log.info("cancelling %d requests that did not finish", len(running))
        for task in running:
            task.cancel()
        await self._wait_until_ended(FORCED_STOP_SECONDS if self._forced else ERROR_SECONDS, forced=2)

    async def _wait_until_ended(self, seconds: float, forced: int) -> None:
        """Wait for the end of all connections and requests, or for this many calls of `force_stop`."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self._forced < forced:
            if not (self.state.connections or self.state.tasks):
                return
            await asyncio.sleep(POLL_SECONDS)

    def force_stop(self) -> None:
        """Stop without grace time. A second call does not even wait for errors to be sent."""
        self._forced += 1

    kill = force_stop

    async def end(self) -> None:
        """Release everything, whether or not the server has started."""
        self._close_listeners()
        if self._timer is not None:
            self._timer.cancel()

    def _close_listeners(self) -> None:
        for acceptor in self._acceptors:
            acceptor.close()
        for listener in self._listeners:
            listener.close()


class Acceptor:
    """Accepts the connections of one listening socket."""

    def __init__(
        self, listener: socket.socket, connection: Callable[[], asyncio.Protocol], tls: ssl.SSLContext | None
    ) -> None:
        self._listener = listener
        self._connection = connection
        self._tls = tls
        self._loop = asyncio.get_running_loop()
        self._opening: set[asyncio.Task[None]] = set()
        self._is_closed = False
        self._retry: asyncio.TimerHandle | None = None
        self._logged_at = -LOG_SECONDS
        listener.setblocking(False)
        listener.listen(BACKLOG)
        self._resume()

    def close(self) -> None:
        if self._retry is not None:
            self._retry.cancel()
        if not self._is_closed:
            self._is_closed = True
            self._loop.remove_reader(self._listener)
            self._listener.close()

    def _resume(self) -> None:
        self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        for _ in range(BATCH):
            try:
                accepted, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                self._pause(error)
                return
            accepted.setblocking(False)
            task = self._loop.create_task(self._open(accepted))
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    def _pause(self, error: OSError) -> None:
        self._loop.remove_reader(self._listener)
        self._retry = self._loop.call_later(RETRY_SECONDS, self._resume)
        if time.monotonic() - self._logged_at >= LOG_SECONDS:
            self._logged_at = time.monotonic()
            message = "cannot accept connections: %s; allow more open files (ulimit -n)"
            connection_log.error(message, error.strerror or error)

    async def _open(self, accepted: socket.socket) -> None:
        try:
            transport, _ = await self._loop.connect_accepted_socket(self._connection, accepted, ssl=self._tls)
        except OSError as error:
            # The client disconnected, or the TLS handshake failed.
            connection_log.debug("a connection could not be opened: %s", error)
            accepted.close()
            return
        if self._is_closed:
            transport.close()


def tls_context(tls: Tls) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(tls.certificate, tls.key)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(f"{tls.certificate} and {tls.key} cannot be used for TLS: {reason}") from error
    return context


def unix_socket(path: Path) -> socket.socket:
    """Bind a Unix socket that only its owner and group may access, from the first moment."""
    listener = socket.socket(socket.AF_UNIX)
    before = os.umask(0o117)
    try:
        listener.bind(str(path))
    except OSError as error:
        raise ConfigError(f"socket {path}: {error.strerror or error}") from error
    finally:
        os.umask(before)
    return listener


class SocketFile:
    """The file of a bound Unix socket; `path` is None for a TCP server.

    It is removed while the socket is still open, so a new server cannot take its place before. A file that has
    replaced it all the same has another inode and is not removed.
    """

    def __init__(self, path: str | None) -> None:
        self._path = path
        self._inode = _inode(path)

    def remove(self) -> None:
        if self._path is not None and _inode(self._path) == self._inode:
            Path(self._path).unlink(missing_ok=True)
        self._path = None


def _inode(path: str | None) -> tuple[int, int] | None:
    try:
        status = None if path is None else os.lstat(path)
    except OSError:
        return None
    return None if status is None else (status.st_dev, status.st_ino)


def bind_listeners(settings: Settings, count: int) -> list[list[socket.socket]]:
    """Bind the sockets of each of `count` processes. On Linux each has its own; elsewhere all share the same."""
    if settings.socket is not None:
        return [[unix_socket(Path(settings.socket))]] * count
    first = bind_sockets(settings.host, settings.port, is_shared=count > 1)
    if sys.platform != "linux":
        return [first] * count
    # Port 0 lets the system choose one for the first process.
    port = first[0].getsockname()[1]
    return [first, *(bind_sockets(settings.host, port, is_shared=True) for _ in range(count - 1))]


def bind_sockets(host: str, port: int, is_shared: bool = False) -> list[socket.socket]:
    """Bind one socket for each address of the host. On Linux other processes can bind the same shared port."""
    bound: list[socket.socket] = []
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ConfigError(f"--host {host}: {error.strerror or error}") from error
    for family, kind, protocol, _, address in dict.fromkeys(addresses):
        listener = socket.socket(family, kind, protocol)
        # As POSIX servers do: closing connections of an earlier server do not block the port.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if is_shared and sys.platform == "linux":
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        if bound:
            # With port 0, all sockets use the port that the first one got.
            address = (address[0], bound[0].getsockname()[1], *address[2:])
        try:
            listener.bind(address)
        except OSError as error:
            for one in (*bound, listener):
                one.close()
            raise ConfigError(_bind_error(host, port, error)) from error
        bound.append(listener)
    return bound


def _bind_error(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} on {host} is in use; stop what runs there or choose another with --port"
    if error.errno == errno.EACCES:
        return f"port {port} needs root privileges; choose one above 1023 with --port"
    return f"cannot listen on {host} port {port}: {error.strerror or error}"


def tune_memory() -> None:
    """Tune memory management after startup: existing objects are exempt from garbage collection, and freed large blocks
    return to the system, because glibc maps each of them separately.

    The youngest generation is collected less often than by default. The oldest one is collected more often: closed
    connections are reference cycles, and those of long streams are in it."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 5, 2)
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(M_MMAP_THRESHOLD, LARGE_BLOCK)
