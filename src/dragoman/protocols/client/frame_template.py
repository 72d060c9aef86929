"""What the frames of a stream have in common, so that only what is new in each has to be read.

    frame := before text after            before ends with the quote that opens the text, after begins with the other
    piece := frame+                       what has arrived together

Nearly all frames of a reply tell the next piece of text and are otherwise, byte for byte, like the one before. What
stands around the text is learnt from a frame that was read with care; of the next ones nothing else is parsed.

Rules
1. A mould is used only after it was tried: with another text in it, the frame says that text and nothing else.
2. A piece that is not made of whole frames of this mould, to the last byte, is read with care.
3. Servers that put something new into every frame are not learnt from again and again.
"""

from collections.abc import Callable

import msgspec

from dragoman.core.errors import DECODE_ERRORS
from dragoman.protocols.sse import Decoder, Frame

PROBE = "what a mould is tried with"
FIRST_LESSONS = 8
HITS_PER_LESSON = 4
"""So many frames must have been read by a mould for each further lesson."""
_text = msgspec.json.Decoder(str)
_texts = msgspec.json.Decoder(list[str])


class Mould:
    """`plain` gives the text of a frame that has a text and nothing else, whatever came before it; else None."""

    def __init__(self, plain: Callable[[Frame], str | None]) -> None:
        self._plain = plain
        self._before = self._after = self._between = b""
        self._begin = self._end = 0
        """Where the quotes of a text are."""
        self._hits = 0
        self._lessons = 0

    def texts(self, piece: bytes) -> list[str] | None:
        """The texts of the frames of which a piece is made, if all of them are of this mould."""
        if not self._before or not piece.startswith(self._before) or not piece.endswith(self._after):
            return None
        quoted = piece[self._begin : self._end]
        try:
            texts = [_text.decode(quoted)] if b"\n" not in quoted else self._several(quoted)
        except DECODE_ERRORS:
            return None
        self._hits += 1
        return texts

    def _several(self, quoted: bytes) -> list[str]:
        texts = _texts.decode(b"[%b]" % quoted.replace(self._between, b'","'))
        if len(texts) != quoted.count(self._between) + 1:
            raise msgspec.DecodeError("a text is not one text")
        return texts

    def learn(self, piece: bytes, frame: Frame) -> None:
        """From a piece that is this one frame."""
        if self._lessons >= FIRST_LESSONS + self._hits // HITS_PER_LESSON:
            return
        text = self._plain(frame)
        if not text or self._fits(piece):
            return
        self._lessons += 1
        before, found, after = piece.partition(msgspec.json.encode(text))
        before, after = before + b'"', b'"' + after
        if found and self._is_tried(before + PROBE.encode() + after):
            self._before, self._after, self._between = before, after, after + before
            self._begin, self._end = len(before) - 1, 1 - len(after)

    def _fits(self, piece: bytes) -> bool:
        """Whether it is only the text that this mould could not read."""
        return bool(self._before) and piece.startswith(self._before) and piece.endswith(self._after)

    def _is_tried(self, piece: bytes) -> bool:
        if not piece.endswith(b"\n\n"):
            return False
        frames = Decoder().feed(piece)
        return len(frames) == 1 and self._plain(frames[0]) == PROBE
