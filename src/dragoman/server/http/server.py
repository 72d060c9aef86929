"""The HTTP server of one process: listening sockets, TLS and graceful shutdown.

Rules
1. On shutdown no new connections are accepted. Running requests have the grace time; the rest get an error.
2. A forced shutdown skips the grace time, and does not wait for clients that do not read.
"""

import asyncio
import errno
import gc
import logging
import math
import os
import socket
import ssl
import sys
from pathlib import Path

import uvicorn
from uvicorn.config import STARTUP_FAILURE

from dragoman.config.sections import Tls
from dragoman.core.errors import ConfigError
from dragoman.server.base_app import BaseApp
from dragoman.server.http.acceptor import Acceptor
from dragoman.server.http.bodies import return_large_blocks
from dragoman.server.http.connection import connection_class

log = logging.getLogger("dragoman")

ERROR_SECONDS = 2
"""Time after the grace time to send errors to requests that cannot finish."""
FORCED_STOP_SECONDS = 1.0


class HttpServer(uvicorn.Server):
    def __init__(self, app: BaseApp) -> None:
        super().__init__(_uvicorn_config(app))
        self._grace = math.ceil(app.settings.grace_seconds)
        self._is_closing = False
        self._is_forced = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        config = self.config
        listeners = bind_sockets(config.host, config.port) if sockets is None else sockets
        await self.lifespan.startup()
        if self.lifespan.should_exit:
            sys.exit(STARTUP_FAILURE)
        self.servers = [Acceptor(one, self._connection, config.ssl) for one in listeners]  # type: ignore[misc]
        self.started = True

    def _connection(self) -> asyncio.Protocol:
        connection: asyncio.Protocol = self.config.http_protocol_class(  # type: ignore[call-arg]
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return connection

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._is_closing = True
        # Even without grace time this runs after uvicorn has closed the listeners.
        timer = asyncio.get_running_loop().call_later(0 if self._is_forced else self._grace, self._end_requests)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()
        if self.force_exit:
            await self.lifespan.shutdown()

    def force_stop(self) -> None:
        """Stop without grace time. A second call does not even wait for errors to be sent."""
        if self._is_forced:
            self._exit_now()
        self.should_exit = self._is_forced = True
        if self._is_closing:
            self._end_requests()

    def _end_requests(self) -> None:
        running = list(self.server_state.tasks)
        if running:
            log.info("cancelling %d requests that did not finish", len(running))
        for task in running:
            task.cancel()
        if self._is_forced:
            asyncio.get_running_loop().call_later(FORCED_STOP_SECONDS, self._exit_now)

    def _exit_now(self) -> None:
        self.force_exit = True


def tls_context(tls: Tls) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(tls.certificate, tls.key)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(f"tls: {tls.certificate} and {tls.key} cannot be used: {reason}") from error
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


def bind_sockets(host: str, port: int, is_shared: bool = False) -> list[socket.socket]:
    """Bind one socket for each address of the host. On Linux other processes can bind the same shared port."""
    bound: list[socket.socket] = []
    addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    for family, kind, protocol, _, address in dict.fromkeys(addresses):
        listener = socket.socket(family, kind, protocol)
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
            raise ConfigError(bind_error(host, port, error)) from error
        bound.append(listener)
    return bound


def bind_error(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} on {host} is in use; stop what runs there or choose another with --port"
    if error.errno == errno.EACCES:
        return f"port {port} needs root privileges; choose one above 1023 with --port"
    return f"cannot listen on {host} port {port}: {error.strerror or error}"


def _uvicorn_config(app: BaseApp) -> uvicorn.Config:
    settings = app.settings
    tls = settings.tls
    return uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        http=connection_class(settings.limits, app.telemetry),
        ws="none",
        lifespan="on",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=math.ceil(settings.grace_seconds) + ERROR_SECONDS,
        ssl_context_factory=None if tls is None else lambda config, default: tls_context(tls),
    )


def tune_memory() -> None:
    """Tune memory management after startup: existing objects are exempt from garbage collection, which runs less often,
    and freed large blocks return to the system."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)
    return_large_blocks()
