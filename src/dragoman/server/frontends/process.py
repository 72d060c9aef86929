"""Runs a front end: `python -m dragoman.server.frontends.process PARENT LINK SOCKET...`.

The arguments are the parent's process id and the numbers of file descriptors.

Rules
1. The process ignores signals to the parent's process group.
2. When the connection to the parent ends, the process exits at once. When the parent dies, it is killed even if its
   event loop is stuck: by the kernel on Linux, by a thread that polls the parent elsewhere.
3. If it cannot apply a new configuration it exits, so that removed keys stop working. The parent starts another.
"""

import asyncio
import ctypes
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager

import uvloop

from dragoman.core.errors import ConfigError
from dragoman.core.logs import configure_as_parent
from dragoman.server.frontends.frontend_app import FrontEndApp
from dragoman.server.frontends.messages import ApplyConfig, ForceStop, Listening, ShutdownNotice, StartFrontEnd
from dragoman.server.frontends.remote import Command, ParentConnection
from dragoman.server.http.server import HttpServer, tune_memory
from dragoman.server.routes import ROUTES

log = logging.getLogger("dragoman.fronts")

PR_SET_PDEATHSIG = 1
CHECK_SECONDS = 1.0


class _Server(HttpServer):
    def __init__(self, front: FrontEndApp, parent: ParentConnection) -> None:
        super().__init__(front)
        self._parent = parent

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        tune_memory()
        self._parent.send(Listening())

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


class _Process:
    def __init__(self) -> None:
        self.parent = ParentConnection(self._handle, _exit)
        self.server: _Server | None = None
        self._front: FrontEndApp | None = None
        self._started = asyncio.Event()

    def _handle(self, command: Command) -> None:
        try:
            self._perform(command)
        except ConfigError as error:
            _exit_with(error)

    def _perform(self, command: Command) -> None:
        if isinstance(command, StartFrontEnd):
            self.parent.set_number(command.number)
            self._front = FrontEndApp(ROUTES, command.settings, self.parent)
            self.server = _Server(self._front, self.parent)
            self._started.set()
        elif isinstance(command, ApplyConfig):
            assert self._front is not None
            self._front.configure(command.settings)
        elif isinstance(command, ShutdownNotice):
            assert self._front is not None
            self._front.stop_requests()
        elif isinstance(command, ForceStop):
            assert self.server is not None
            self.server.force_stop()
        elif self.server is not None:
            self.server.should_exit = True

    async def serve(self, link: int, sockets: Sequence[int]) -> None:
        await self.parent.link.connect(socket.socket(fileno=link))
        await self._started.wait()
        assert self.server is not None
        try:
            await self.server.serve([socket.socket(fileno=number) for number in sockets])
        except ConfigError as error:
            # The certificate is read when the server starts.
            _exit_with(error)
        await self.parent.link.drain()


def _exit_with(error: ConfigError) -> None:
    log.error("a front end cannot apply the configuration: %s", error)
    _exit()


def _exit() -> None:
    os._exit(0)


def _end_with_parent(parent: int) -> None:
    """Kill this process when the process with the id `parent` ends."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))
    else:
        threading.Thread(target=_watch_parent, args=(parent,), name="dragoman-parent", daemon=True).start()
    if os.getppid() != parent:
        # The parent ended before the watch began.
        os._exit(0)


def _watch_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(CHECK_SECONDS)
    os._exit(0)


def main() -> None:
    configure_as_parent()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    parent, link, *sockets = map(int, sys.argv[1:])
    _end_with_parent(parent)

    async def run() -> None:
        await _Process().serve(link, sockets)

    with asyncio.Runner(loop_factory=uvloop.Loop) as runner:
        runner.run(run())


if __name__ == "__main__":
    main()
