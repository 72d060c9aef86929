"""Reads repetitive stream frames quickly, by parsing only the text that changes.

    frame := prefix text suffix           the quotes of the text belong to prefix and suffix
    chunk := frame+                       bytes that arrived together

Most frames of a reply contain one piece of text and otherwise equal the frame before. A template learns the bytes
around the text from a frame that was fully parsed. In the following frames only the text is parsed.

Rules
1. A template is verified before use: with a probe text in it, the frame must contain that text and nothing else.
2. A chunk that does not consist entirely of frames of this template is parsed in full.
3. Learning stops for servers that change other bytes in every frame.
"""

from collections.abc import Callable

import msgspec

from dragoman.core.errors import DECODE_ERRORS
from dragoman.protocols.sse import SseDecoder, SseFrame

PROBE = "the probe text of a template"
FIRST_LESSONS = 8
HITS_PER_LESSON = 4
"""How many chunks must have matched for each further lesson."""
_text = msgspec.json.Decoder(str)
_texts = msgspec.json.Decoder(list[str])


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
