"""The process of a front end: `python -m dragoman.server.frontends.process PARENT LINK SOCKET...`.

The arguments are the parent's process id and the numbers of file descriptors.

Signals for the parent's process group are the parent's to handle. When the link to it ends, so does the process, at
once and whatever it is doing (see `orphan`). It also ends if it cannot apply a new configuration, so that removed keys
stop working; the parent starts another.
"""

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager

import uvloop

from dragoman.core.errors import ConfigError
from dragoman.core.logs import configure_as_parent
from dragoman.ipc.parent_death import end_with_parent
from dragoman.server.frontends.frontend_app import FrontEnd
from dragoman.server.frontends.messages import Begin, Configured, Hurry, Stopping
from dragoman.server.frontends.remote import Command, Parent
from dragoman.server.http.server import Listener, settle
from dragoman.server.routes import ROUTES

log = logging.getLogger("dragoman.fronts")


class _Server(Listener):
    def __init__(self, front: FrontEnd, parent: Parent) -> None:
        super().__init__(front)
        self._parent = parent

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        settle()
        self._parent.tell_listening()

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


class _Process:
    def __init__(self) -> None:
        self.parent = Parent(self._obey, _end)
        self.server: _Server | None = None
        self._front: FrontEnd | None = None
        self._begun = asyncio.Event()

    def _obey(self, command: Command) -> None:
        try:
            self._do(command)
        except ConfigError as error:
            _give_up(error)

    def _do(self, command: Command) -> None:
        if isinstance(command, Begin):
            self.parent.number(command.number)
            self._front = FrontEnd(ROUTES, command.settings, self.parent)
            self.server = _Server(self._front, self.parent)
            self._begun.set()
        elif isinstance(command, Configured):
            assert self._front is not None
            self._front.configure(command.settings)
        elif isinstance(command, Stopping):
            assert self._front is not None
            self._front.stop_requests()
        elif isinstance(command, Hurry):
            assert self.server is not None
            self.server.hurry()
        elif self.server is not None:
            self.server.should_exit = True

    async def serve(self, link: int, sockets: Sequence[int]) -> None:
        await self.parent.link.connect(socket.socket(fileno=link))
        await self._begun.wait()
        assert self.server is not None
        try:
            await self.server.serve([socket.socket(fileno=number) for number in sockets])
        except ConfigError as error:
            # The certificate, which is read where it is used.
            _give_up(error)
        await self.parent.link.drained()


def _give_up(error: ConfigError) -> None:
    log.error("a front end cannot take over the configuration: %s", error)
    _end()


def _end() -> None:
    os._exit(0)


def main() -> None:
    configure_as_parent()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    parent, link, *sockets = map(int, sys.argv[1:])
    end_with_parent(parent)

    async def whole() -> None:
        await _Process().serve(link, sockets)

    with asyncio.Runner(loop_factory=uvloop.Loop) as runner:
        runner.run(whole())


if __name__ == "__main__":
    main()
