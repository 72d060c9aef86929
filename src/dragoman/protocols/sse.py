"""Decodes server-sent events from bytes to frames, without I/O.

    stream := BOM? (line end)*            end := CR LF | LF | CR
    line   := ":" comment | field (":" " "? value)? | empty line, which ends a frame

Rules
1. The frames do not depend on how the bytes are split, even within a character or between CR and LF.
2. A frame without data is skipped. Several `data` lines are joined with line feeds.
3. `end` returns a last frame that lacks its empty line.
4. A line `error: …`, which older llama.cpp servers send, is a frame of its own with the event `error`.
"""

import msgspec

MOST_BYTES = 32 * 1024 * 1024
"""Maximum size of one frame."""
MOST_NOTHING = 1024 * 1024
"""Maximum size of comments, empty lines and unknown fields before a frame."""
BOM = b"\xef\xbb\xbf"


class Frame(msgspec.Struct, frozen=True):
    data: str
    event: str = ""


class FrameTooLong(ValueError):
    pass


class Decoder:
    def __init__(self) -> None:
        self._start = b""
        """The first bytes, while they may still become a byte order mark."""
        self._is_at_start = True
        self._pieces: list[bytes] = []
        """Parts of an incomplete line."""
        self._after_cr = False
        self._data: list[str] = []
        self._event = ""
        self._size = 0
        self._skipped = 0

    def feed(self, data: bytes) -> list[Frame]:
        if self._is_at_start:
            data = self._remove_bom(data)
        if not data:
            return []
        if self._is_whole_frame(data):
            self._skipped = 0
            return [Frame(data[6:-2].decode("utf-8", "replace"))]
        if self._after_cr and data[0] == 10:
            data = data[1:]
        self._after_cr = False
        frames: list[Frame] = []
        for line in data.splitlines(keepends=True):
            self._add_line(line, frames)
        return frames

    @property
    def is_between(self) -> bool:
        """Whether the next byte starts a frame."""
        return not (self._pieces or self._data or self._event or self._after_cr or self._is_at_start)

    def end(self) -> list[Frame]:
        """Return the last frame if nothing terminated it."""
        frames: list[Frame] = []
        if self._is_at_start and self._start:
            self._is_at_start = False
            self._pieces.append(self._start)
        if self._pieces:
            self._parse_line(b"".join(self._pieces), frames)
            self._pieces.clear()
        self._dispatch(frames)
        return frames

    def _is_whole_frame(self, data: bytes) -> bool:
        """Whether the data is exactly one frame with one line, which is the common case."""
        return (
            self.is_between
            and data.startswith(b"data: ")
            and data.find(b"\n") == len(data) - 2
            and data.endswith(b"\n\n")
            and b"\r" not in data
        )

    def _remove_bom(self, data: bytes) -> bytes:
        self._start += data
        if len(self._start) < len(BOM) and BOM.startswith(self._start):
            return b""
        self._is_at_start = False
        return self._start.removeprefix(BOM)

    def _add_line(self, line: bytes, frames: list[Frame]) -> None:
        last = line[-1]
        if last != 10 and last != 13:
            self._grow(len(line))
            self._pieces.append(line)
            return
        # A CR ends the line immediately; an LF that follows is skipped when it arrives.
        self._after_cr = last == 13
        if self._pieces:
            self._pieces.append(line)
            line = b"".join(self._pieces)
            self._pieces.clear()
        self._parse_line(line.rstrip(b"\r\n"), frames)

    def _parse_line(self, line: bytes, frames: list[Frame]) -> None:
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if name == b"data":
            self._grow(len(value))
            self._data.append(value.decode("utf-8", "replace"))
            return
        self._skipped += len(line) + 1
        if self._skipped > MOST_NOTHING:
            raise FrameTooLong(f"more than {MOST_NOTHING} bytes without a frame")
        if not line:
            self._dispatch(frames)
        elif name == b"event":
            self._event = value.decode("utf-8", "replace")
        elif name == b"error":
            self._dispatch(frames)
            frames.append(Frame(value.decode("utf-8", "replace"), "error"))

    def _dispatch(self, frames: list[Frame]) -> None:
        if self._data:
            frames.append(Frame("\n".join(self._data), self._event))
            self._data.clear()
            self._skipped = 0
        self._event = ""
        self._size = 0

    def _grow(self, size: int) -> None:
        self._size += size
        if self._size > MOST_BYTES:
            raise FrameTooLong(f"frame is larger than {MOST_BYTES} bytes")
