"""Reads and writes WebSocket messages without I/O. wsproto parses and builds the frames.

    message := frame+      the last one is final; control frames may come between them
    event   := TextMessage | BytesMessage | Ping | Pong | CloseConnection, in the order in which they are complete

Rules
1. Events are the same for every cutting of the bytes.
2. A message has at most `limit` bytes, or the connection ends with 1009.
3. At most `MAX_SMALL_FRAMES` frames of less than `SMALL_FRAME` bytes arrive in `WINDOW_SECONDS`, or it ends with 1008:
   a frame costs more time than its bytes, and an empty one adds nothing to the size of a message.
4. Other violations of the protocol end it with the code of wsproto: 1002, or 1007 for text that is not UTF-8.
5. No extension is accepted: a compressed message of some kilobytes can become gigabytes.
"""

from collections.abc import Iterator

from wsproto.connection import Connection, ConnectionState, ConnectionType
from wsproto.events import BytesMessage, CloseConnection, Event, Ping, Pong, TextMessage
from wsproto.frame_protocol import CloseReason

SMALL_FRAME = 1024
MAX_SMALL_FRAMES = 5000
"""They take a tenth of a second of processor time."""
WINDOW_SECONDS = 60.0


class WebSocketViolation(Exception):
    """The client has broken a rule. The connection ends with this code."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


class WebSocketFrames:
    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._connection = Connection(ConnectionType.SERVER)
        self._message = bytearray()
        """The part of a message that has arrived."""
        self.in_message = False
        """Whether a message has begun and is not complete."""
        self._frame_size = 0
        self._small_frames = 0
        self._window_end = 0.0

    def feed(self, data: bytes, now: float) -> Iterator[Event]:
        """The events that are complete with this data. Raises `WebSocketViolation`."""
        self._connection.receive_data(data)
        for event in self._connection.events():
            if isinstance(event, TextMessage | BytesMessage):
                self._frame_size += len(event.data)
                if event.frame_finished:
                    self._count_frame(self._frame_size, now)
                    self._frame_size = 0
                complete = self._join(event)
                if complete is not None:
                    yield complete
            elif isinstance(event, CloseConnection) and self._connection.state in (
                ConnectionState.OPEN,
                ConnectionState.LOCAL_CLOSING,
            ):
                # wsproto reports a violation like this. After a close frame, the state is another one.
                raise WebSocketViolation(event.code, event.reason or "")
            else:
                self._count_frame(0, now)
                yield event

    def _count_frame(self, size: int, now: float) -> None:
        if size >= SMALL_FRAME:
            return
        if now >= self._window_end:
            self._small_frames, self._window_end = 0, now + WINDOW_SECONDS
        self._small_frames += 1
        if self._small_frames > MAX_SMALL_FRAMES:
            reason = f"more than {MAX_SMALL_FRAMES} small frames in {WINDOW_SECONDS:g} s"
            raise WebSocketViolation(CloseReason.POLICY_VIOLATION, reason)

    def _join(self, event: TextMessage | BytesMessage) -> TextMessage | BytesMessage | None:
        """The whole message, if this is its end."""
        self.in_message = True
        self._message += event.data.encode() if isinstance(event, TextMessage) else event.data
        if len(self._message) > self._limit:
            raise WebSocketViolation(CloseReason.MESSAGE_TOO_BIG, f"a message has at most {self._limit} bytes")
        if not event.message_finished:
            return None
        whole, self._message = self._message, bytearray()
        self.in_message = False
        return TextMessage(data=whole.decode()) if isinstance(event, TextMessage) else BytesMessage(data=bytes(whole))

    def text(self, text: str) -> bytes:
        return self._connection.send(TextMessage(data=text))

    def binary(self, data: bytes) -> bytes:
        return self._connection.send(BytesMessage(data=data))

    def ping(self) -> bytes:
        return self._connection.send(Ping())

    def pong(self, payload: bytes) -> bytes:
        return self._connection.send(Pong(payload=payload))

    def close(self, code: int, reason: str = "") -> bytes:
        """A close frame, or the answer to that of the client."""
        return self._connection.send(CloseConnection(code=code, reason=reason))
