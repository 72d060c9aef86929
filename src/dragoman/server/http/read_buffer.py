"""The buffer of a connection: it reads ahead, and pauses reading."""

import asyncio
import select

READ_AHEAD = 64 * 1024
"""Bytes kept before reading pauses: of a body that the app has not read, or after a request."""
LINGER_BYTES = 1024 * 1024
"""Bytes of an unread body that are received and discarded before reading pauses."""
DISCONNECTED = select.POLLHUP | select.POLLERR | getattr(select, "POLLRDHUP", 0)


class ReadBuffer:
    """Bytes received after the request that is being answered. Reading pauses when there are too many."""

    data = b""
    discarded = 0
    """Bytes discarded since `discarded` was reset."""
    _is_paused = False

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport

    def store(self, data: bytes) -> None:
        self.data = data
        if len(data) > READ_AHEAD:
            self.pause()

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

    def check_disconnect(self) -> None:
        """Poll the socket: while reading is paused, asyncio does not report a disconnect."""
        if not self._is_paused or len(self.data) <= READ_AHEAD or self._transport.is_closing():
            return
        poll = select.poll()
        poll.register(self._transport.get_extra_info("socket").fileno(), DISCONNECTED)
        if poll.poll(0):
            self._transport.abort()
