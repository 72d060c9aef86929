"""Starts a child process, watches it, starts another after a pause when it dies, and kills it.

Rules
1. The connection is a socket pair, which the child has as its standard input and output. Its end ends the child.
2. A child has its own session: signals to the server's process group do not reach it, and the processes that it
   starts can be killed with it.
3. The first failure is followed by the first pause, zero by default. Each further early failure doubles the pause. A
   process that ran for `YOUNG_SECONDS` resets the count.
4. A child misses its pings if it leaves `MAX_PINGS` in a row unanswered. Pings are counted instead of seconds because
   the parent itself may have been suspended, with unread answers in its socket.
"""

import asyncio
import os
import signal
import socket
import sys
from asyncio.subprocess import Process
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from dragoman.core.logs import configure_as_parent
from dragoman.ipc.framing import MessageConnection, encode
from dragoman.ipc.messages import Ping

YOUNG_SECONDS = 10.0
PING_SECONDS = 2.0
MAX_PINGS = 5


class RestartBackoff:
    """`first` is the first pause; later ones are between `shortest` and `longest`."""

    def __init__(self, shortest: float, longest: float, first: float = 0.0) -> None:
        self._first = first
        self._shortest = shortest
        self._longest = longest
        self.count = 0
        """Failures in a row."""
        self.pause = 0.0

    def note_failure(self, age: float, young: float = YOUNG_SECONDS) -> None:
        """Record a failure after `age` seconds of running; below `young` it is early."""
        self.count = self.count + 1 if age < young else 1
        self.pause = self._first if self.count == 1 else min(self._longest, max(self._shortest, 2 * self.pause))


async def keep_running(run: Callable[[], Awaitable[None]], backoff: RestartBackoff, stopping: asyncio.Event) -> None:
    """Run one process after the other; `run` ends with its process and notes the failure in `backoff`."""
    while not stopping.is_set():
        if not (backoff.pause and await wait_for_event(stopping, backoff.pause)):
            await run()


async def wait_for_event(event: asyncio.Event, seconds: float) -> bool:
    """Wait for at most this time; return whether the event is set."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        pass
    return event.is_set()


async def start_child(
    link: MessageConnection, module: str, *arguments: int, descriptors: Sequence[int] = ()
) -> Process:
    """Start `python -m module` at the other end of the link. It inherits the file descriptors."""
    ours, theirs = socket.socketpair()
    process = None
    try:
        with theirs:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", module, *map(str, arguments)),
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                pass_fds=descriptors,
                start_new_session=True,
            )
        await link.connect(ours)
    except BaseException:
        ours.close()
        if process is not None:
            kill_child(process)
            await process.wait()
        raise
    return process


def enter_child() -> tuple[int, int]:
    """Prepare a child process; return the file descriptors to read from its parent and to write to it.

    The processes that an engine starts do not inherit them, so the connection ends with this process. What a library
    prints goes to standard error.
    """
    configure_as_parent()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    connection = os.dup(0), os.dup(1)
    with Path(os.devnull).open() as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    return connection


def kill_child(process: Process) -> None:
    """Kill the process and every process that it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        # The group has ended already; macOS raises PermissionError for a zombie.
        pass


async def wait_for_exit(process: Process) -> None:
    """Wait until a killed process has ended, even if the caller is cancelled meanwhile."""
    ended = asyncio.ensure_future(process.wait())
    try:
        await asyncio.shield(ended)
    except asyncio.CancelledError:
        await ended
        raise


class ChildMonitor:
    """Detects a child that does not become ready or does not answer, and calls `kill` with the reason."""

    def __init__(self, link: MessageConnection, kill: Callable[[str], None]) -> None:
        self._link = link
        self._kill = kill
        self._loop = asyncio.get_running_loop()
        self._unanswered = 0
        self._timer: asyncio.TimerHandle | None = None

    def limit_start(self, seconds: float) -> None:
        """Kill the child after this time, unless `start_pings` is called before."""
        reason = f"does not listen {seconds:g} s after its start"
        self._timer = self._loop.call_later(seconds, self._kill, reason)

    def start_pings(self) -> None:
        self.stop()
        self._timer = self._loop.call_later(PING_SECONDS, self._ping)

    def note_pong(self) -> None:
        self._unanswered = 0

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _ping(self) -> None:
        if self._unanswered >= MAX_PINGS:
            self._kill(f"has not answered for {MAX_PINGS * PING_SECONDS:g} s")
            return
        self._unanswered += 1
        self._link.send(encode(Ping()))
        self.start_pings()
