"""How clients are listened to, in whichever process it is done, and how that ends.

Rules
1. Nothing new is taken; what runs has the grace time, and what is left then is told that it cannot finish.
2. Who is in a hurry gives no grace time. Whoever does not read what it is told then is not waited for.
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
from dragoman.server.base_app import Door
from dragoman.server.http.acceptor import Acceptor
from dragoman.server.http.bodies import return_large_blocks
from dragoman.server.http.connection import guarded

log = logging.getLogger("dragoman")

TELL_SECONDS = 2
"""Beyond the grace time, for those to be told that cannot finish."""
HURRY_SECONDS = 1.0


class Listener(uvicorn.Server):
    def __init__(self, door: Door) -> None:
        super().__init__(_uvicorn_config(door))
        self._grace = math.ceil(door.settings.grace_seconds)
        self._is_closing = False
        self._is_hurried = False

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
        # Even without any grace it comes after the listeners have been closed, which uvicorn does first of all.
        due = asyncio.get_running_loop().call_later(0 if self._is_hurried else self._grace, self._end_requests)
        try:
            await super().shutdown(sockets)
        finally:
            due.cancel()
        if self.force_exit:
            await self.lifespan.shutdown()

    def hurry(self) -> None:
        """Who is told twice waits for nobody."""
        if self._is_hurried:
            self._leave()
        self.should_exit = self._is_hurried = True
        if self._is_closing:
            self._end_requests()

    def _end_requests(self) -> None:
        running = list(self.server_state.tasks)
        if running:
            log.info("requests that could not finish and are told so: %d", len(running))
        for task in running:
            task.cancel()
        if self._is_hurried:
            asyncio.get_running_loop().call_later(HURRY_SECONDS, self._leave)

    def _leave(self) -> None:
        self.force_exit = True


def tls_context(tls: Tls) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(tls.certificate, tls.key)
    except OSError as error:
        words = error.strerror or str(error)
        raise ConfigError(f"tls: {tls.certificate} and {tls.key} cannot be used: {words}") from error
    return context


def unix_socket(path: Path) -> socket.socket:
    """For the owner and the group; nobody else, not even for a moment."""
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
    """The name of a Unix socket that has just been bound; None where clients come to a port.

    It is removed while the socket is still open. So nobody who comes next finds it, and takes its place, before we
    remove it; and where somebody has taken its place all the same, that is another file with another number.
    """

    def __init__(self, path: str | None) -> None:
        self._path = path
        self._number = _number(path)

    def remove(self) -> None:
        if self._path is not None and _number(self._path) == self._number:
            Path(self._path).unlink(missing_ok=True)
        self._path = None


def _number(path: str | None) -> tuple[int, int] | None:
    try:
        found = None if path is None else os.lstat(path)
    except OSError:
        return None
    return None if found is None else (found.st_dev, found.st_ino)


def bind_sockets(host: str, port: int, is_shared: bool = False) -> list[socket.socket]:
    """One socket for each address of the host. On Linux other processes may bind shared ones too."""
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
            # One port for all of them, also where any would do.
            address = (address[0], bound[0].getsockname()[1], *address[2:])
        try:
            listener.bind(address)
        except OSError as error:
            raise ConfigError(bind_words(host, port, error)) from error
        bound.append(listener)
    return bound


def bind_words(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} on {host} is in use; stop what runs there or choose another with --port"
    if error.errno == errno.EACCES:
        return f"port {port} is not for ordinary users; choose one above 1023 with --port"
    return f"cannot listen on {host} port {port}: {error.strerror or error}"


def _uvicorn_config(door: Door) -> uvicorn.Config:
    settings = door.settings
    tls = settings.tls
    return uvicorn.Config(
        door,
        host=settings.host,
        port=settings.port,
        http=guarded(settings.limits, door.telemetry),
        ws="none",
        lifespan="on",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=math.ceil(settings.grace_seconds) + TELL_SECONDS,
        ssl_context_factory=None if tls is None else lambda config, default: tls_context(tls),
    )


def settle() -> None:
    """What exists now will stay: the garbage collector need not look at it again, nor so often at what is new."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)
    return_large_blocks()
