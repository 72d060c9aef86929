"""The engine's side of grammar trials: starts the trial server, sends jobs and kills the trials of cancelled requests.

Rules
1. The first trial starts the server. If the server has died, the next trial starts another one.
2. A trial whose request is cancelled is killed.
3. A trial that ends without an outcome has reached a limit or crashed. The caller gets the same error for both.
4. Callers whose trials took more than `MAX_RECENT_SECONDS` of CPU time recently get a low priority. A trial without an
   outcome counts as the longest.
"""

import asyncio
import itertools
import logging
import os
import pickle
import socket
import sys
import time
from collections.abc import Callable

import msgspec

from dragoman.core.decaying_counter import DecayingCounter
from dragoman.core.errors import EngineFailed, Unavailable
from dragoman.grammar.trial_server import (
    COMMAND,
    CPU_SECONDS,
    FORK,
    FORK_LOW,
    KILL,
    LENGTH,
    READY,
    STARTED,
    TrialModel,
    TrialOutcome,
)

log = logging.getLogger("dragoman.grammar")

START_SECONDS = 60.0
TRIAL_SECONDS = 60.0
"""Wall time. On a busy machine a trial needs longer to reach its CPU limit."""


MAX_RECENT_SECONDS = 3.0
RECENT_SECONDS = 30.0
"""The weight of past CPU time halves in this time."""


class _ServerProcess(msgspec.Struct):
    """The running trial server, and the client's end of its socket."""

    process: asyncio.subprocess.Process
    control: socket.socket

    def send(self, kind: bytes, number: int, sockets: tuple[int, ...] = ()) -> bool:
        """Send a command and return whether the server is still running. It does not block: a command is a few bytes,
        which fit into the socket's buffer."""
        try:
            socket.send_fds(self.control, [COMMAND.pack(kind, number)], sockets)
        except OSError:
            return False
        return True

    async def close(self) -> None:
        self.control.close()
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()


class TrialClient:
    def __init__(self, make_model: Callable[[], TrialModel]) -> None:
        self._make_model = make_model
        self._numbers = itertools.count()
        self._server: _ServerProcess | None = None
        self._starting = asyncio.Lock()
        self._recent = DecayingCounter(RECENT_SECONDS, least=0.1, clock=time.monotonic)
        """CPU seconds by caller."""

    async def run(self, job: bytes, caller: str) -> TrialOutcome | None:
        """Return the outcome of the job, or None if the trial reached a limit."""
        seconds = CPU_SECONDS
        try:
            outcome = await self._repeat(job, FORK_LOW if self.has_low_priority(caller) else FORK)
            if outcome is not None:
                seconds = outcome.seconds
            return outcome
        finally:
            self._recent.add([(caller, seconds)])

    def has_low_priority(self, caller: str) -> bool:
        return self._recent.get_now(caller) > MAX_RECENT_SECONDS

    async def _repeat(self, job: bytes, kind: bytes) -> TrialOutcome | None:
        # The server may have died since the last trial, so a trial that does not start is repeated once.
        for _ in range(2):
            if (body := await self._run(job, kind)) is not None:
                return _decode_outcome(body) if body else None
        raise Unavailable("the grammar could not be compiled in its trial process; try again", retry_after=1)

    async def _run(self, job: bytes, kind: bytes) -> bytes | None:
        """Return the encoded outcome. Empty if the trial ended without one, None if it did not start."""
        server = await self._get_server()
        number = next(self._numbers)
        local, remote = socket.socketpair()
        with remote:
            is_running = server.send(kind, number, (remote.fileno(),))
        if not is_running:
            local.close()
            await self._discard(server)
            return None
        try:
            async with asyncio.timeout(TRIAL_SECONDS):
                body = await _exchange(local, job)
        except TimeoutError:
            raise _too_busy() from None
        finally:
            is_running = server.send(KILL, number)
        if body or is_running:
            return body
        await self._discard(server)
        return None

    async def close(self) -> None:
        async with self._starting:
            if self._server is not None:
                server, self._server = self._server, None
                await server.close()

    async def _get_server(self) -> _ServerProcess:
        async with self._starting:
            if self._server is None:
                self._server = await self._start()
            return self._server

    async def _start(self) -> _ServerProcess:
        control, remote = socket.socketpair()
        control.setblocking(False)
        with remote:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-c",
                f"from dragoman.grammar.trial_server import main; main({remote.fileno()})",
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=(remote.fileno(),),
                # Outside the engine's process group: the memory of a trial does not count as the model's.
                start_new_session=True,
                # Forking is only safe in a process with one thread.
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
            )
        server = _ServerProcess(process, control)
        try:
            async with asyncio.timeout(START_SECONDS):
                await self._send_model(control)
        except TimeoutError:
            await server.close()
            raise _too_busy() from None
        except BaseException:
            await server.close()
            raise
        return server

    async def _send_model(self, control: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        model = await asyncio.to_thread(lambda: pickle.dumps(self._make_model()))
        try:
            await loop.sock_sendall(control, LENGTH.pack(len(model)) + model)
            answer = await loop.sock_recv(control, 1)
        except ConnectionError:
            answer = b""
        if answer != READY:
            raise EngineFailed("the grammar trial process could not be started; see the server log")

    async def _discard(self, server: _ServerProcess) -> None:
        """Forget and end a server that has failed. The next trial starts another one."""
        if self._server is server:
            log.error("the grammar trial process has failed; the next request starts another one")
            self._server = None
        await server.close()


async def _exchange(local: socket.socket, job: bytes) -> bytes | None:
    """Send the job to its trial and return the encoded outcome. Empty if the trial ended without one, None if it did
    not start."""
    try:
        reader, writer = await asyncio.open_connection(sock=local)
    except BaseException:
        local.close()
        raise
    try:
        if await reader.read(1) != STARTED:
            return None
        writer.write(LENGTH.pack(len(job)) + job)
        body = await reader.read()
    except ConnectionError:
        # The trial died during the exchange.
        return b""
    finally:
        writer.close()
    head, body = body[: LENGTH.size], body[LENGTH.size :]
    return body if head == LENGTH.pack(len(body)) else b""


def _decode_outcome(body: bytes) -> TrialOutcome:
    outcome = msgspec.msgpack.decode(body, type=TrialOutcome)
    if outcome.bug is not None:
        log.error("a grammar trial failed: %s", outcome.bug)
        raise EngineFailed("the grammar of the reply could not be compiled; see the server log")
    return outcome


def _too_busy() -> Unavailable:
    return Unavailable("the machine is too busy to compile a grammar; try again", retry_after=5)
