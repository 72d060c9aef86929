"""The engine's side of trials: starts the process that forks them, and ends a trial with the request that needs it.

Rules
1. The process is started for the first trial and kept. Where it has died, the next trial starts another.
2. A trial whose request is cancelled is killed.
3. A trial that ends without an outcome has reached its limits, or crashed. Which of them is of no use to the caller.
"""

import asyncio
import itertools
import logging
import os
import pickle
import socket
import sys
from collections.abc import Callable

import msgspec

from dragoman.constrain.trial import LENGTH, STARTED, Outcome, Subject
from dragoman.constrain.trial_server import COMMAND, FORK, KILL, LOWER, READY
from dragoman.errors import EngineFailed, Unavailable

log = logging.getLogger("dragoman.constrain")

START_SECONDS = 60.0
TRIAL_SECONDS = 60.0
"""Of the clock: on a busy machine the limit of processor time takes longer to reach."""
LONG_SECONDS = 0.25
"""After these a trial gets less of the processor than decoding."""


class _Server:
    """The running process and our end of its socket."""

    def __init__(self, process: asyncio.subprocess.Process, control: socket.socket) -> None:
        self.process = process
        self.control = control

    def command(self, kind: bytes, number: int, sockets: tuple[int, ...] = ()) -> None:
        """Few bytes, which always fit: it does not wait."""
        socket.send_fds(self.control, [COMMAND.pack(kind, number)], sockets)

    async def close(self) -> None:
        self.control.close()
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()


class TrialPool:
    def __init__(self, subject: Callable[[], Subject]) -> None:
        self._subject = subject
        self._numbers = itertools.count()
        self._server: _Server | None = None
        self._starting = asyncio.Lock()

    @property
    def pid(self) -> int | None:
        """Of the process that forks trials, where there is one."""
        return None if self._server is None else self._server.process.pid

    async def run(self, job: bytes) -> Outcome | None:
        """What became of the job; None where it has reached the limits of a trial."""
        body = await self._run(job)
        if body is None:
            # The process that forks may have died since the last trial.
            body = await self._run(job)
        if body is None:
            raise Unavailable("the trial of a grammar could not be run; try again", retry_after=1)
        return _outcome(body) if body else None

    async def _run(self, job: bytes) -> bytes | None:
        """The outcome as it came; nothing where the trial was ended, None where it never began."""
        ours, theirs = socket.socketpair()
        number = next(self._numbers)
        try:
            with theirs:
                server = await self._fork(number, theirs)
        except BaseException:
            ours.close()
            raise
        lowering = asyncio.get_running_loop().call_later(LONG_SECONDS, self._tell, server, LOWER, number)
        try:
            async with asyncio.timeout(TRIAL_SECONDS):
                body = await self._talk(ours, job)
        except TimeoutError:
            raise Unavailable("the machine is too busy to compile a grammar; try again", retry_after=5) from None
        finally:
            lowering.cancel()
            self._tell(server, KILL, number)
        # Trials end with a process that is replaced.
        return None if not body and server is not self._server else body

    async def _fork(self, number: int, channel: socket.socket) -> _Server:
        server = await self._started()
        try:
            server.command(FORK, number, (channel.fileno(),))
        except OSError:
            await self._lose(server)
            server = await self._started()
            server.command(FORK, number, (channel.fileno(),))
        return server

    async def _talk(self, ours: socket.socket, job: bytes) -> bytes | None:
        """The same."""
        try:
            reader, writer = await asyncio.open_connection(sock=ours)
        except BaseException:
            ours.close()
            raise
        try:
            if await reader.read(1) != STARTED:
                return None
            writer.write(LENGTH.pack(len(job)) + job)
            body = await reader.read()
        except ConnectionError:
            # It died while it was read to or written to.
            return b""
        finally:
            writer.close()
        head, body = body[: LENGTH.size], body[LENGTH.size :]
        return body if head == LENGTH.pack(len(body)) else b""

    async def close(self) -> None:
        async with self._starting:
            if self._server is not None:
                server, self._server = self._server, None
                await server.close()

    async def _started(self) -> _Server:
        async with self._starting:
            if self._server is None:
                self._server = await self._start()
            return self._server

    async def _start(self) -> _Server:
        control, theirs = socket.socketpair()
        control.setblocking(False)
        with theirs:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "dragoman.constrain.trial_server",
                str(theirs.fileno()),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                # Not of the engine's process group: what a trial takes is not the model's memory.
                start_new_session=True,
                # Forking needs a process with one thread.
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
            )
        server = _Server(process, control)
        try:
            async with asyncio.timeout(START_SECONDS):
                await self._hand_over(control)
        except TimeoutError:
            await server.close()
            raise Unavailable("the machine is too busy to compile a grammar; try again", retry_after=5) from None
        except BaseException:
            await server.close()
            raise
        return server

    async def _hand_over(self, control: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        subject = await asyncio.to_thread(lambda: pickle.dumps(self._subject()))
        try:
            await loop.sock_sendall(control, LENGTH.pack(len(subject)) + subject)
            answer = await loop.sock_recv(control, 1)
        except ConnectionError:
            answer = b""
        if answer != READY:
            raise EngineFailed("the process that compiles grammars could not be started; the server's log says why")

    async def _lose(self, server: _Server) -> None:
        """Another takes its place."""
        log.error("the process that compiles grammars does not work any more; the next request starts another")
        if self._server is server:
            self._server = None
        await server.close()

    def _tell(self, server: _Server, kind: bytes, number: int) -> None:
        """Of a trial that may have ended: its number is not used again."""
        try:
            server.command(kind, number)
        except OSError:
            # The process has ended, and all trials with it.
            pass


def _outcome(body: bytes) -> Outcome:
    outcome = msgspec.msgpack.decode(body, type=Outcome)
    if outcome.bug is not None:
        log.error("a trial failed: %s", outcome.bug)
        raise EngineFailed("the shape of the reply could not be compiled; the server's log says why")
    return outcome
