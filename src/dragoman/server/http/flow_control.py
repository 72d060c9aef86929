"""Timers and buffers of one connection: slow heads, idle clients, read-ahead, and clients that do not read."""

import asyncio
import select
from collections.abc import Callable

READ_AHEAD = 64 * 1024
"""Bytes kept before reading pauses: of a body that the app has not read, or after a request."""
LINGER_BYTES = 1024 * 1024
"""Bytes of an unread body that are received and discarded before reading pauses."""
DISCONNECT_CHECK_SECONDS = 0.5
"""Interval at which a paused socket is polled for a disconnect."""
DISCONNECTED = select.POLLHUP | select.POLLERR | getattr(select, "POLLRDHUP", 0)
LAST_READ_SECONDS = 0.05
"""Before a late head is refused, the event loop reads what arrived while the process was suspended."""
CHECKS_PER_TIMEOUT = 4
"""Checks within `write_seconds` whether the client reads."""


class ReadBuffer:
    """Bytes received after the request that is being answered. Reading pauses when there are too many."""

    data = b""
    discarded = 0
    """Bytes discarded since `discarded` was reset."""
    _is_paused = False
    _disconnect_timer: asyncio.TimerHandle | None = None

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop

    def store(self, data: bytes) -> None:
        self.data = data
        if len(data) > READ_AHEAD:
            self.pause()
            if self._disconnect_timer is None:
                self._disconnect_timer = self._loop.call_later(DISCONNECT_CHECK_SECONDS, self._check_disconnect)

    def discard(self, size: int) -> None:
        """Count received bytes that are not needed; too many of them pause reading."""
        self.discarded += size
        if self.discarded > LINGER_BYTES:
            self.pause()

    def pause(self) -> None:
        if not self._is_paused:
            self._is_paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._is_paused and len(self.data) <= READ_AHEAD and not self._transport.is_closing():
            self._is_paused = False
            self._transport.resume_reading()

    def _check_disconnect(self) -> None:
        """Poll the socket: while reading is paused, asyncio does not report a disconnect."""
        self._disconnect_timer = None
        if not self._is_paused or self._transport.is_closing():
            return
        poll = select.poll()
        poll.register(self._transport.get_extra_info("socket").fileno(), DISCONNECTED)
        if poll.poll(0):
            self._transport.abort()
        else:
            self._disconnect_timer = self._loop.call_later(DISCONNECT_CHECK_SECONDS, self._check_disconnect)

    def close(self) -> None:
        self.data = b""
        if self._disconnect_timer is not None:
            self._disconnect_timer.cancel()


class HeadTimer:
    """Limits the time in which a request head must arrive."""

    _timer: asyncio.TimerHandle | None = None

    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float, expire: Callable[[], None]) -> None:
        self._loop = loop
        self._seconds = seconds
        self._expire = expire

    def start(self) -> None:
        if self._timer is None:
            self._timer = self._loop.call_later(self._seconds, self._read_once_more)

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _read_once_more(self) -> None:
        self._timer = self._loop.call_later(LAST_READ_SECONDS, self._end)

    def _end(self) -> None:
        self._timer = None
        self._expire()


class IdleTimer:
    """Closes a connection that has been idle for too long. One timer serves all requests of the connection."""

    last_received = 0.0
    _timer: asyncio.TimerHandle | None = None

    def __init__(
        self, loop: asyncio.AbstractEventLoop, seconds: float, is_idle: Callable[[], bool], close: Callable[[], None]
    ) -> None:
        self._loop = loop
        self._seconds = seconds
        self._is_idle = is_idle
        self._close = close

    def start(self) -> None:
        self.last_received = self._loop.time()
        if self._timer is None:
            self._timer = self._loop.call_later(self._seconds, self._check)

    def _check(self) -> None:
        self._timer = None
        if not self._is_idle():
            return
        left = self.last_received + self._seconds - self._loop.time()
        if left <= 0:
            self._close()
        else:
            self._timer = self._loop.call_later(left, self._check)

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


class WriteTimer:
    """Aborts the connection if the client reads nothing for `seconds` while output is waiting."""

    _unread = 0
    _last_read = 0.0
    _timer: asyncio.TimerHandle | None = None

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, seconds: float) -> None:
        self._transport = transport
        self._loop = loop
        self._seconds = seconds

    def start(self) -> None:
        self._unread = self._transport.get_write_buffer_size()
        self._last_read = self._loop.time()
        self._schedule()

    def _schedule(self) -> None:
        self._timer = self._loop.call_later(self._seconds / CHECKS_PER_TIMEOUT, self._check)

    def _check(self) -> None:
        # Nothing is written meanwhile, so a smaller buffer means that the client has read.
        unread, now = self._transport.get_write_buffer_size(), self._loop.time()
        if unread < self._unread:
            self._unread, self._last_read = unread, now
        elif now - self._last_read >= self._seconds:
            self._transport.abort()
            return
        self._schedule()

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
