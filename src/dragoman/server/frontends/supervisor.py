"""All front ends of a server: each is started again when it dies, until the server stops.

Rules
1. One that dies soon after its start is started again after a pause, which grows.
2. Until all of them listen, the first death is the server's. One that hangs then has not died of anything: it is
   ended, and another started. Only where `MOST_LATE` in a row have come to nothing at one place is that the server's
   end too.
3. They have the grace time, and a little more, to end by themselves; then they are ended. In a hurry they have only
   the little more.
4. One that has not adopted a new configuration within `ADOPT_SECONDS` is ended, so that nobody is let in by the old
   one. It need not where it does not listen yet: what it was sent it reads before it takes connections.
5. They have sessions of their own: what is sent to the process group of the server is the server's to handle, from the
   first moment on.
"""

import asyncio
import errno
import logging
import os
import socket
import sys
import time
from itertools import chain, count

from dragoman.config.settings import Settings
from dragoman.core.errors import ConfigError
from dragoman.ipc.restart_backoff import Deaths
from dragoman.ipc.worker_messages import OWN_NUMBER
from dragoman.server.app import App
from dragoman.server.frontends.messages import Hurry, Stop, Stopping
from dragoman.server.frontends.parent import Desk
from dragoman.server.http.server import HURRY_SECONDS

log = logging.getLogger("dragoman.fronts")

SHORTEST_PAUSE, LONGEST_PAUSE = 0.4, 10.0
MOST_LATE = 3
ADOPT_SECONDS = 5.0
END_SECONDS = 8.0
"""Beyond the grace time: to tell those that are cancelled, and to end."""


class Crew:
    def __init__(self, app: App, places: list[list[socket.socket]]) -> None:
        self._app = app
        self._places = places
        self._numbers = count(OWN_NUMBER + 1)
        self._posts = [asyncio.create_task(self._keep(sockets)) for sockets in places]
        self._processes: set[asyncio.subprocess.Process] = set()
        self._desks: set[Desk] = set()
        """Of those that have begun."""
        self._all_listen = asyncio.Event()
        self._ending = asyncio.Event()
        app.followers.append(self._configure)

    @property
    def _listening(self) -> int:
        return sum(desk.is_listening and not desk.is_ended for desk in self._desks)

    @property
    def _stopping(self) -> bool:
        return self._ending.is_set()

    async def started(self, *ends: asyncio.Event) -> None:
        """Until all of them take connections, or nobody wants them any more."""
        await self.until(self._all_listen, *ends)

    async def until(self, *events: asyncio.Event) -> None:
        """Until one is set. A place that nobody mans any more before that is the server's end."""
        waiting = {asyncio.create_task(event.wait()) for event in events}
        try:
            done, _ = await asyncio.wait([*waiting, *self._posts], return_when=asyncio.FIRST_COMPLETED)
            for post in done - waiting:
                post.result()
        finally:
            for wait in waiting:
                wait.cancel()

    async def _keep(self, sockets: list[socket.socket]) -> None:
        """One place, manned until the server stops."""
        deaths = Deaths(SHORTEST_PAUSE, LONGEST_PAUSE)
        late = 0
        while not self._stopping:
            if deaths.pause:
                await self._pause(deaths.pause)
            born = time.monotonic()
            has_hung = False
            try:
                desk, count = await self._serve(sockets)
                has_hung = desk.is_ended
                late = late + 1 if has_hung and not desk.is_listening else 0
                words, why = f"died with {count} requests", "; the lines above say why"
            except OSError as error:
                words, why = f"could not be started: {error.strerror or error}", _way_out(error)
            if self._stopping:
                return
            deaths.note(age=time.monotonic() - born)
            if not self._all_listen.is_set():
                if not has_hung:
                    raise ConfigError(f"a front end {words}{why}")
                if late >= MOST_LATE:
                    raise ConfigError(
                        f"{late} front ends in a row did not listen; try again, or start fewer (--workers)"
                    )
            log.error("a front end %s; starting another", words)

    async def _pause(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._ending.wait()
        except TimeoutError:
            pass

    async def _serve(self, sockets: list[socket.socket]) -> tuple[Desk, int]:
        """From the start of a process to its end: where its requests were, and how many ended with it."""
        ours, theirs = socket.socketpair()
        numbers = [theirs.fileno(), *(one.fileno() for one in sockets)]
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
        desk = Desk(self._app, closed.set, self._note_listening, lambda: _kill(process))
        self._processes.add(process)
        try:
            await desk.link.connect(ours)
            desk.begin(next(self._numbers), self._app.settings)
            self._desks.add(desk)
            if self._app.is_stopping:
                desk.send(Stopping())
            if self._stopping:
                desk.send(Stop())
            await closed.wait()
            return desk, desk.close()
        finally:
            desk.close()
            self._desks.discard(desk)
            if not self._stopping:
                # It has closed its link: nothing good comes of it any more.
                _kill(process)
            await process.wait()
            self._processes.discard(process)

    def _note_listening(self) -> None:
        if self._listening >= len(self._places):
            self._all_listen.set()

    async def _configure(self, settings: Settings) -> None:
        adopting = {desk.configure(settings): desk for desk in self._desks}
        if not adopting:
            return
        # One that hangs is no reason for whoever asked to wait for ever.
        _, late = await asyncio.wait(adopting, timeout=ADOPT_SECONDS)
        for desk in map(adopting.__getitem__, late):
            if desk.is_listening:
                desk.end(f"has not taken over the configuration within {ADOPT_SECONDS:g} s")

    def tell_stopping(self) -> None:
        for desk in self._desks:
            desk.send(Stopping())

    async def stop(self, grace: float) -> None:
        """Nothing new is taken; what runs has its time, and whoever does not end by itself is ended."""
        self._ending.set()
        for one in chain.from_iterable(self._places):
            one.close()
        for desk in self._desks:
            desk.send(Stop())
        await asyncio.wait(self._posts, timeout=grace + END_SECONDS)
        await self.end()

    def hurry(self) -> None:
        """Who still waits is told now, and they are ended if they do not end."""
        self._ending.set()
        for desk in self._desks:
            desk.send(Hurry())
        asyncio.get_running_loop().call_later(HURRY_SECONDS + 1, self.kill)

    def kill(self) -> None:
        """None of them, and none in its place."""
        self._ending.set()
        for process in self._processes:
            _kill(process)

    async def end(self) -> None:
        """At once."""
        self.kill()
        for post in self._posts:
            post.cancel()
        await asyncio.gather(*self._posts, return_exceptions=True)


def _way_out(error: OSError) -> str:
    is_full = error.errno in (errno.EMFILE, errno.ENFILE)
    return "; allow more (ulimit -n), or start fewer (--workers)" if is_full else ""


def _kill(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        try:
            process.kill()
        except ProcessLookupError:
            # It has ended, and the event loop has not said so yet.
            pass
