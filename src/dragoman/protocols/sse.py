"""Decodes server-sent events from bytes, without I/O.

    stream := BOM? (line end)*            end := CR LF | LF | CR
    line   := ":" comment | field (":" " "? value)? | empty line, which ends a frame

Rules
1. The frames do not depend on how the bytes are split, even within a character or between CR and LF.
2. Frames without data are dropped. Several `data` lines are joined with line feeds.
3. `end` returns the last frame if the empty line after it is missing.
4. A line `error: …`, which older llama.cpp servers send, is a frame with the event `error`.
"""

import msgspec

MAX_FRAME_BYTES = 32 * 1024 * 1024
MAX_EMPTY_BYTES = 1024 * 1024
"""Limit for comments, empty lines and unknown fields between two frames."""
BOM = b"\xef\xbb\xbf"


class SseFrame(msgspec.Struct, frozen=True):
    data: str
    event: str = ""


class FrameTooLong(ValueError):
    pass


class SseDecoder:
    def __init__(self) -> None:
        self._start = b""
        """The first bytes of the stream, while they may be part of a byte order mark."""
        self._is_at_start = True
        self._partial: list[bytes] = []
        """Chunks of an incomplete line."""
        self._after_cr = False
        self._data: list[str] = []
        self._event = ""
        self._size = 0
        self._empty_bytes = 0

    def feed(self, data: bytes) -> list[SseFrame]:
        if self._is_at_start:
            data = self._strip_bom(data)
        if not data:
            return []
        if self._is_whole_frame(data):
            self._empty_bytes = 0
            return [SseFrame(data[6:-2].decode("utf-8", "replace"))]
        if self._after_cr and data[0] == 10:
            data = data[1:]
        self._after_cr = False
        frames: list[SseFrame] = []
        for line in data.splitlines(keepends=True):
            self._add_line(line, frames)
        return frames

    @property
    def is_between_frames(self) -> bool:
        """Whether the next byte starts a frame."""
        return not (self._partial or self._data or self._event or self._after_cr or self._is_at_start)

    def end(self) -> list[SseFrame]:
        """Return the last frame if it was not terminated."""
        frames: list[SseFrame] = []
        if self._is_at_start and self._start:
            self._is_at_start = False
            self._partial.append(self._start)
        if self._partial:
            self._read_line(b"".join(self._partial), frames)
            self._partial.clear()
        self._dispatch(frames)
        return frames

    def _is_whole_frame(self, data: bytes) -> bool:
        """Whether the chunk is exactly one frame of one line, the most common case."""
        return (
            self.is_between_frames
            and data.startswith(b"data: ")
            and data.find(b"\n") == len(data) - 2
            and data.endswith(b"\n\n")
            and b"\r" not in data
        )

    def _strip_bom(self, data: bytes) -> bytes:
        self._start += data
        if len(self._start) < len(BOM) and BOM.startswith(self._start):
            return b""
        self._is_at_start = False
        return self._start.removeprefix(BOM)

    def _add_line(self, line: bytes, frames: list[SseFrame]) -> None:
        last = line[-1]
        if last != 10 and last != 13:
            self._grow(len(line))
            self._partial.append(line)
            return
        # A CR ends the line immediately; a following LF is skipped in `feed`.
        self._after_cr = last == 13
        if self._partial:
            self._partial.append(line)
            line = b"".join(self._partial)
            self._partial.clear()
        self._read_line(line.rstrip(b"\r\n"), frames)

    def _read_line(self, line: bytes, frames: list[SseFrame]) -> None:
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if name == b"data":
            self._grow(len(value))
            self._data.append(value.decode("utf-8", "replace"))
            return
        self._empty_bytes += len(line) + 1
        if self._empty_bytes > MAX_EMPTY_BYTES:
            raise FrameTooLong(f"more than {MAX_EMPTY_BYTES} bytes between two frames")
        if not line:
            self._dispatch(frames)
        elif name == b"event":
            self._event = value.decode("utf-8", "replace")
        elif name == b"error":
            self._dispatch(frames)
            frames.append(SseFrame(value.decode("utf-8", "replace"), "error"))

    def _dispatch(self, frames: list[SseFrame]) -> None:
        if self._data:
            frames.append(SseFrame("\n".join(self._data), self._event))
            self._data.clear()
            self._empty_bytes = 0
        self._event = ""
        self._size = 0

    def _grow(self, size: int) -> None:
        self._size += size
        if self._size > MAX_FRAME_BYTES:
            raise FrameTooLong(f"a frame is larger than {MAX_FRAME_BYTES} bytes")
