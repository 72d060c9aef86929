"""The one thread that computes with a model.

    repeat
      run the commands of the event loop: new jobs, cancellations
      let every member that has work run one step

The members are the runners of the model and its adapters, and the embedder. Each step uses all cores, so two at once
would be no faster. OpenMP keeps a team of helper threads for every thread that ever computed. With more helpers than
cores they sleep at every barrier, which costs a third of the speed on two cores. So loading runs in this thread too.

Rules
1. Members take turns. Commands run between any two steps.
2. No exception ends the thread: an unexpected one resets the member whose step or command raised it.
3. Members bound the time of their steps by a `StepPace`, which adjusts the number of prompt rows. The time of a step is
   not proportional to its rows: reading the weights costs the same for one row as for fifty, and from 64 rows of a
   sequence on llama.cpp uses another attention kernel. After 1,000 tokens, 64 rows are faster than 48. So with long
   texts a long step of LONG_STEP_ROWS may be worthwhile: it exceeds the target time, but the prompt finishes sooner.
"""

import asyncio
import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Protocol, TypeVar

from dragoman.core.errors import DragomanError, EngineFailed

log = logging.getLogger("dragoman.engine")

STOPPED = "the engine has been stopped"
T = TypeVar("T")

LONG_STEP_ROWS = 65
"""64 rows of a prompt, and one row of a sequence that decodes."""
MAX_LONG_STEP = 1.8
"""Longest duration of a long step, as a multiple of the target time."""
MAX_ROW_COST = 0.8
"""Highest cost of a row in a long step, relative to a row in a normal step."""
ESTIMATED_ROW_COST = 0.6
"""Estimated relative cost of a row before the first long step."""
STEPS_BETWEEN_TRIES = 17
STEPS_BEFORE_TRY = 5
"""Normal steps of a prompt before the first long step. Long steps do not pay at the beginning of a text."""


class Member(Protocol):
    @property
    def has_work(self) -> bool: ...

    def step(self) -> None: ...

    def reset(self, error: DragomanError) -> None:
        """Fail all jobs and clear the memory."""

    def close(self) -> None:
        """Free all resources."""


class ComputeThread:
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.members: Sequence[Member] = ()
        self._loop = loop
        self._commands: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._is_closed = False
        self._is_stopping = False
        self._thread = threading.Thread(target=self._work, name="dragoman-compute", daemon=True)
        self._thread.start()

    # Called in the event loop

    def submit(self, function: Callable[[], T]) -> Future[T]:
        """Call a function in the thread and return its future result."""
        future: Future[T] = Future()
        self._commands.put(partial(_resolve, future, function))
        return future

    def call(self, member: Member, command: Callable[[], object]) -> None:
        """Call a method of a member in the thread. Does nothing after `close`."""
        self._commands.put(partial(self._run, member, command))

    def require_open(self) -> None:
        if self._is_closed:
            raise EngineFailed(STOPPED)

    def close(self) -> None:
        """End the thread after the current step, and fail the jobs of all members."""
        self._is_closed = True
        self._commands.put(partial(setattr, self, "_is_stopping", True))

    def join(self) -> None:
        """Wait for the end of the thread. May be called in any thread but this one."""
        self._thread.join()

    # Called in the thread

    def post(self, callback: Callable[..., object], *args: object) -> None:
        """Call a function in the event loop."""
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:
            # The event loop is closed, so there are no readers.
            self._is_stopping = True

    def _work(self) -> None:
        while not self._is_stopping:
            self._run_commands(block=not any(member.has_work for member in self.members))
            for member in self.members:
                if member.has_work and not self._is_stopping:
                    self._run(member, member.step)
                    self._run_commands(block=False)
        for member in self.members:
            member.reset(EngineFailed(STOPPED))
            member.close()

    def _run_commands(self, *, block: bool) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._commands.get(block=block)()
                block = False

    def _run(self, member: Member, function: Callable[[], object]) -> None:
        try:
            function()
        except Exception as error:
            log.exception("a step of the engine failed")
            failure = EngineFailed("the engine failed; see the server log")
            member.reset(error if isinstance(error, DragomanError) else failure)


def _resolve(future: Future[T], function: Callable[[], T]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(function())
    except BaseException as error:  # noqa: BLE001 (raised to the caller)
        future.set_exception(error)


class StepPace:
    """Number of prompt rows for a step of `seconds`. With `long_steps`, long steps of LONG_STEP_ROWS are tried."""

    def __init__(self, seconds: float, *, minimum: int, maximum: int, long_steps: bool = False) -> None:
        self.seconds = seconds
        self.maximum = maximum
        self.minimum = min(minimum, maximum)
        self.long_steps = long_steps and maximum >= LONG_STEP_ROWS
        self._rows = self.minimum
        self._row_seconds = 0.0
        self._is_long = False
        self._long_step_paid = False
        """Whether a long step of this prompt was faster per row."""
        self._steps_until_try = STEPS_BEFORE_TRY

    @property
    def rows(self) -> int:
        return LONG_STEP_ROWS if self._is_long and self._rows < LONG_STEP_ROWS else self._rows

    def record(self, rows: int, seconds: float) -> None:
        """Record the duration of a step with `rows` prompt rows."""
        if rows < self.rows:
            self._is_long, self._steps_until_try = False, STEPS_BEFORE_TRY
            return
        if rows > self._rows:
            self._evaluate_long_step(seconds)
            return
        self._row_seconds = seconds / rows
        self._adjust(seconds)
        if self.long_steps:
            self._steps_until_try -= 1
            estimated = LONG_STEP_ROWS * ESTIMATED_ROW_COST * self._row_seconds
            self._is_long = self._steps_until_try <= 0 and estimated <= MAX_LONG_STEP * self.seconds
            self._long_step_paid = False

    def _adjust(self, seconds: float) -> None:
        ratio = min(max(self.seconds / max(seconds, 1e-6), 0.5), 2)
        # Only half of the difference, because one slow step may only mean that the machine was busy.
        target = round(self._rows * (1 + ratio) / 2)
        self._rows = min(max(target, self.minimum), self.maximum)

    def _evaluate_long_step(self, seconds: float) -> None:
        """Continue with long steps if the first one paid and the last one did not take too long."""
        self._long_step_paid = self._long_step_paid or seconds <= LONG_STEP_ROWS * MAX_ROW_COST * self._row_seconds
        self._is_long = self._long_step_paid and seconds <= MAX_LONG_STEP * self.seconds
        if not self._is_long:
            # After many long steps the text is much longer, and the previous number of rows would take too long.
            # Restart from the minimum; the right number is found again within a few steps.
            self._steps_until_try, self._rows = STEPS_BETWEEN_TRIES, self.minimum
