"""Decodes the bytes of tokens to text incrementally.

Rules
1. A character spread over several tokens is returned with the last of them.
2. Invalid bytes become U+FFFD as soon as they are certain to be invalid. At the end, so does an incomplete character.
3. The joined text does not depend on how the bytes are split into tokens.
"""

import codecs


class Detokenizer:
    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, piece: bytes) -> str:
        return self._utf8.decode(piece)

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)
