"""Request timeouts, and the timer that checks all open requests.

Rules
1. A request past its deadline, or past the time allowed for its next step, is aborted with a timeout error.
2. A silent stream gets a comment frame, so that proxies do not close it.
3. Listening for a client disconnect starts with the first check: most requests complete before it.
"""

import asyncio
import math
import time
from collections.abc import Callable
from typing import Protocol

from dragoman.config.settings import Limits
from dragoman.core.errors import BadRequest, DeadlineExceeded, DragomanError

CHECK_SECONDS = 0.25
TimeoutFactory = Callable[[float], DragomanError]
"""Makes the error for a step that took longer than this many seconds."""


class RequestTimer:
    """The deadline of one request, and the time allowed for its next step."""

    due = math.inf
    deadline = math.inf
    _allowed = 0.0
    _make_error: TimeoutFactory | None = None

    def __init__(self) -> None:
        self.started = self.last_progress = time.monotonic()

    def expect(self, seconds: float, make_error: TimeoutFactory) -> None:
        """Require each further step within this time."""
        self._allowed = seconds
        self._make_error = make_error
        self.note_progress()

    def note_progress(self) -> None:
        """Restart the time allowed for the next step."""
        self.last_progress = now = time.monotonic()
        self.due = now + self._allowed

    def note_running(self, count: int) -> None:
        """Note how many choices hold a slot. The stall timer pauses at zero."""
        self.note_progress()
        if not count:
            self.due = math.inf

    def stop(self) -> None:
        self.due = self.deadline = math.inf

    def set_deadline(self, seconds: float, header: bytes | None) -> None:
        """Limit the whole request. The client's X-Dragoman-Timeout header may shorten the limit."""
        if header is not None:
            seconds = min(seconds, _parse_seconds(header))
        self.deadline = self.started + seconds

    def timeout_error(self, now: float) -> DragomanError | None:
        if now > self.deadline:
            return DeadlineExceeded(f"the request took longer than {self.deadline - self.started:g} s")
        if now > self.due and self._make_error is not None:
            return self._make_error(self._allowed)
        return None


def _parse_seconds(value: bytes) -> float:
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise BadRequest("the header X-Dragoman-Timeout must be a number of seconds greater than 0")
    return seconds


class OpenRequest(Protocol):
    stopping: DragomanError | None

    def check(self, now: float, keepalive_seconds: float) -> None: ...


class DeadlineMonitor:
    """One timer for all open requests."""

    def __init__(self, limits: Limits) -> None:
        self._keepalive = limits.keepalive_seconds
        shortest = min(self._keepalive, limits.stall_seconds, limits.body_seconds, limits.request_seconds)
        self._interval = min(CHECK_SECONDS, shortest / 4)
        self.watched: set[OpenRequest] = set()
        self._timer: asyncio.TimerHandle | None = None

    def add(self, request: OpenRequest) -> None:
        self.watched.add(request)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._interval, self._check)

    def discard(self, request: OpenRequest) -> None:
        self.watched.discard(request)

    def _check(self) -> None:
        self._timer = None
        now = time.monotonic()
        for request in self.watched:
            request.check(now, self._keepalive)
        if self.watched:
            self._timer = asyncio.get_running_loop().call_later(self._interval, self._check)
