"""Accepts the connections of one listening socket.

Rules
1. Without a free file descriptor, connections wait in the socket's backlog. The acceptor retries after
   `RETRY_SECONDS`, and logs one line per `LOG_SECONDS`. (uvloop's own server would drop them.)
2. At most `BATCH` connections are accepted in one turn of the event loop.
"""

import asyncio
import logging
import socket
import ssl
import time
from collections.abc import Callable

log = logging.getLogger("dragoman.server")

BACKLOG = 2048
BATCH = 32
RETRY_SECONDS = 0.2
LOG_SECONDS = 60.0


class Acceptor:
    def __init__(
        self, listener: socket.socket, connection: Callable[[], asyncio.Protocol], tls: ssl.SSLContext | None
    ) -> None:
        self.sockets = (listener,)
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

    async def wait_closed(self) -> None:
        """Return immediately. `_open` closes connections that finish opening later."""

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
            log.error("cannot accept connections: %s; allow more open files (ulimit -n)", error.strerror or error)

    async def _open(self, accepted: socket.socket) -> None:
        try:
            transport, _ = await self._loop.connect_accepted_socket(self._connection, accepted, ssl=self._tls)
        except OSError as error:
            # The client disconnected, or the TLS handshake failed.
            log.debug("a connection could not be opened: %s", error)
            accepted.close()
            return
        if self._is_closed:
            transport.close()
