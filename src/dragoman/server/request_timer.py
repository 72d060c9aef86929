"""The time limits of one request: its deadline, and the time allowed for its next step."""

import math
import time
from collections.abc import Callable

from dragoman.core.errors import (
    BadRequest,
    DeadlineExceeded,
    DragomanError,
    EngineTimeout,
    RequestTimeout,
    Unavailable,
)

STREAM_STEP = 64 * 1024
"""Bytes of a streamed body that must arrive within the time for a body."""
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
        self.last_progress = now = time.monotonic()
        self.due = now + seconds

    def note_progress(self) -> None:
        self.last_progress = now = time.monotonic()
        self.due = now + self._allowed

    def note_running(self, count: int) -> None:
        """Note how many choices hold a slot. The stall timer pauses at zero."""
        self.note_progress()
        if not count:
            self.due = math.inf

    def stop(self) -> None:
        self.due = self.deadline = math.inf

    def shorten_deadline(self, header: bytes) -> None:
        """Apply the client's X-Dragoman-Timeout header."""
        try:
            seconds = float(header)
        except ValueError:
            seconds = math.nan
        if not 0 < seconds < math.inf:
            raise BadRequest("the header X-Dragoman-Timeout must be a number of seconds greater than 0")
        self.deadline = min(self.deadline, self.started + seconds)

    def timeout_error(self, now: float) -> DragomanError | None:
        if now > self.deadline:
            return DeadlineExceeded(f"the request took longer than {self.deadline - self.started:g} s")
        if now > self.due and self._make_error is not None:
            return self._make_error(self._allowed)
        return None


def slow_body_error(seconds: float) -> DragomanError:
    return RequestTimeout(f"the body took longer than {seconds:g} s to arrive")


def slow_stream_error(seconds: float) -> DragomanError:
    return RequestTimeout(f"less than {STREAM_STEP // 1024} KiB of the body arrived within {seconds:g} s")


def stall_error(seconds: float) -> DragomanError:
    return EngineTimeout(f"the engine produced nothing for {seconds:g} s")


def stopping_error() -> DragomanError:
    return Unavailable("the server is stopping", retry_after=10)
