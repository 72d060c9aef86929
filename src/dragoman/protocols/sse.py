"""Decodes server-sent events from bytes, without I/O.

`SseDecoder` reads any stream. `FrameTemplate` reads repetitive frames quickly, by parsing only the text that changes.

    stream := BOM? (line end)*            end := CR LF | LF | CR
    line   := ":" comment | field (":" " "? value)? | empty line, which ends a frame

Rules
1. The frames do not depend on how the bytes are split, even within a character or between CR and LF.
2. Frames without data are dropped. Several `data` lines are joined with line feeds.
3. `end` returns the last frame if the empty line after it is missing.
4. A line `error: …`, which older llama.cpp servers send, is a frame with the event `error`.
5. Some servers end frames with one line end. After a line whose data is a whole JSON object, another `data` line, or a
   second `event` line, therefore starts a new frame. From then on such a line of data is a frame at once.

    frame := prefix text suffix           the quotes of the text belong to prefix and suffix
    chunk := frame+                       bytes that arrived together

Most frames of a reply contain one piece of text and otherwise equal the frame before. A template learns the bytes
around the text from a frame that was fully parsed. In the following frames only the text is parsed.

6. A template is verified before use: with a probe text in it, the frame must contain that text and nothing else.
7. A chunk that does not consist entirely of frames of this template is parsed in full.
8. Learning stops for servers that change other bytes in every frame.
"""

from collections.abc import Callable

import msgspec

from dragoman.core.errors import DECODE_ERRORS

MAX_FRAME_BYTES = 32 * 1024 * 1024
MAX_EMPTY_BYTES = 1024 * 1024
"""Limit for comments, empty lines and unknown fields between two frames."""
BOM = b"\xef\xbb\xbf"
END_MARK = "[DONE]"

PROBE = "the probe text of a template"
FIRST_LESSONS = 8
HITS_PER_LESSON = 4
"""How many chunks must have matched for each further lesson."""
_text = msgspec.json.Decoder(str)
_texts = msgspec.json.Decoder(list[str])


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
        self._lacks_empty_lines = False
        """Whether the server ends its frames with one line end."""
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
            if self._data:
                self._split_frame(frames)
            self._grow(len(value))
            self._data.append(value.decode("utf-8", "replace"))
            if self._lacks_empty_lines and _is_whole(self._data):
                self._dispatch(frames)
            return
        self._empty_bytes += len(line) + 1
        if self._empty_bytes > MAX_EMPTY_BYTES:
            raise FrameTooLong(f"more than {MAX_EMPTY_BYTES} bytes between two frames")
        if not line:
            self._dispatch(frames)
        elif name == b"event":
            if self._data and self._event:
                self._split_frame(frames)
            self._event = value.decode("utf-8", "replace")
        elif name == b"error":
            self._dispatch(frames)
            frames.append(SseFrame(value.decode("utf-8", "replace"), "error"))

    def _split_frame(self, frames: list[SseFrame]) -> None:
        """End the frame before this line if its data is complete."""
        if _is_whole(self._data):
            self._lacks_empty_lines = True
            self._dispatch(frames)

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


def _is_whole(data: list[str]) -> bool:
    """Whether the data is one line with a JSON object or the end mark."""
    if len(data) != 1:
        return False
    if data[0] == END_MARK:
        return True
    if not data[0].startswith("{"):
        return False
    try:
        msgspec.json.decode(data[0])
    except DECODE_ERRORS:
        return False
    return True


class FrameTemplate:
    """`plain_text` returns the text of a frame that contains only text, whatever came before it; otherwise None."""

    def __init__(self, plain_text: Callable[[SseFrame], str | None]) -> None:
        self._plain_text = plain_text
        self._prefix = self._suffix = self._between = b""
        self._start = self._end = 0
        """The positions of the quotes around the text."""
        self._hits = 0
        self._lessons = 0

    def match(self, chunk: bytes) -> list[str] | None:
        """Return the texts of the frames in the chunk; None if any of them does not match."""
        if not self._fits(chunk):
            return None
        quoted = chunk[self._start : self._end]
        try:
            texts = [_text.decode(quoted)] if b"\n" not in quoted else self._split(quoted)
        except DECODE_ERRORS:
            return None
        self._hits += 1
        return texts

    def _split(self, quoted: bytes) -> list[str]:
        texts = _texts.decode(b"[%b]" % quoted.replace(self._between, b'","'))
        if len(texts) != quoted.count(self._between) + 1:
            raise msgspec.DecodeError("a text contains a separator")
        return texts

    def learn(self, chunk: bytes, frame: SseFrame) -> None:
        """Learn from a chunk that consists of this one frame."""
        if self._lessons >= FIRST_LESSONS + self._hits // HITS_PER_LESSON:
            return
        text = self._plain_text(frame)
        if not text or self._fits(chunk):
            return
        self._lessons += 1
        prefix, found, suffix = chunk.partition(msgspec.json.encode(text))
        prefix, suffix = prefix + b'"', b'"' + suffix
        if found and self._passes_probe(prefix + PROBE.encode() + suffix):
            self._prefix, self._suffix, self._between = prefix, suffix, suffix + prefix
            self._start, self._end = len(prefix) - 1, 1 - len(suffix)

    def _fits(self, chunk: bytes) -> bool:
        return bool(self._prefix) and chunk.startswith(self._prefix) and chunk.endswith(self._suffix)

    def _passes_probe(self, chunk: bytes) -> bool:
        if not chunk.endswith(b"\n\n"):
            return False
        frames = SseDecoder().feed(chunk)
        return len(frames) == 1 and self._plain_text(frames[0]) == PROBE
