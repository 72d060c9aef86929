"""Server-sent events, from bytes to frames, without a socket.

    stream := BOM? (line end)*            end := CR LF | LF | CR
    line   := ":" comment | field (":" " "? value)? | nothing, which ends a frame

Rules
1. However the bytes are cut, also within a character or between CR and LF, the frames are the same.
2. A frame without data says nothing and is left out; several `data` lines are one text with line feeds between them.
3. The last frame may lack the empty line that ends it: `end` gives it.
4. A line `error: …`, which is no field of the standard, is how older llama.cpp servers tell of an error: a frame of its
   own, whose event is `error`.
"""

import msgspec

MOST_BYTES = 32 * 1024 * 1024
"""Of one frame. Whoever sends more does not mean to end it."""
MOST_NOTHING = 1024 * 1024
"""Of comments, empty lines and whatever else says nothing, before a frame does."""
BOM = b"\xef\xbb\xbf"


class Frame(msgspec.Struct, frozen=True):
    data: str
    event: str = ""


class FrameTooLong(ValueError):
    pass


class Decoder:
    def __init__(self) -> None:
        self._begun = b""
        """The beginning of the stream, as long as it may be that of a mark."""
        self._is_at_start = True
        self._pieces: list[bytes] = []
        """Of a line that has no end yet."""
        self._after_cr = False
        self._data: list[str] = []
        self._event = ""
        self._size = 0
        self._nothing = 0

    def feed(self, data: bytes) -> list[Frame]:
        if self._is_at_start:
            data = self._without_mark(data)
        if not data:
            return []
        if self._is_whole_frame(data):
            self._nothing = 0
            return [Frame(data[6:-2].decode("utf-8", "replace"))]
        if self._after_cr and data[0] == 10:
            data = data[1:]
        self._after_cr = False
        frames: list[Frame] = []
        for line in data.splitlines(keepends=True):
            self._take(line, frames)
        return frames

    @property
    def is_between(self) -> bool:
        """Whether the next byte begins a frame."""
        return not (self._pieces or self._data or self._event or self._after_cr or self._is_at_start)

    def end(self) -> list[Frame]:
        """What the last line and the last frame are, where nothing ended them."""
        frames: list[Frame] = []
        if self._is_at_start and self._begun:
            self._is_at_start = False
            self._pieces.append(self._begun)
        if self._pieces:
            self._line(b"".join(self._pieces), frames)
            self._pieces.clear()
        self._dispatch(frames)
        return frames

    def _is_whole_frame(self, data: bytes) -> bool:
        """Whether this is one frame with one line and nothing else, as most pieces of most streams are."""
        return (
            self.is_between
            and data.startswith(b"data: ")
            and data.find(b"\n") == len(data) - 2
            and data.endswith(b"\n\n")
            and b"\r" not in data
        )

    def _without_mark(self, data: bytes) -> bytes:
        self._begun += data
        if len(self._begun) < len(BOM) and BOM.startswith(self._begun):
            return b""
        self._is_at_start = False
        return self._begun.removeprefix(BOM)

    def _take(self, line: bytes, frames: list[Frame]) -> None:
        last = line[-1]
        if last != 10 and last != 13:
            self._grow(len(line))
            self._pieces.append(line)
            return
        # A CR ends its line at once; whether an LF belongs to it is seen when that comes.
        self._after_cr = last == 13
        if self._pieces:
            self._pieces.append(line)
            line = b"".join(self._pieces)
            self._pieces.clear()
        self._line(line.rstrip(b"\r\n"), frames)

    def _line(self, line: bytes, frames: list[Frame]) -> None:
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if name == b"data":
            self._grow(len(value))
            self._data.append(value.decode("utf-8", "replace"))
            return
        self._nothing += len(line) + 1
        if self._nothing > MOST_NOTHING:
            raise FrameTooLong(f"more than {MOST_NOTHING} bytes came that say nothing")
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
            self._nothing = 0
        self._event = ""
        self._size = 0

    def _grow(self, size: int) -> None:
        self._size += size
        if self._size > MOST_BYTES:
            raise FrameTooLong(f"a frame has more than {MOST_BYTES} bytes")
