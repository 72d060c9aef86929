"""From the bytes of tokens to text, as they come.

Rules
1. A character that is spread over several tokens comes out whole, with the last of them.
2. Bytes that can never become a character come out as U+FFFD, as soon as that is certain; at the end, so does an
   unfinished character.
3. The joined text is the same however the bytes are cut into tokens.
"""

import codecs


class Detokenizer:
    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, piece: bytes) -> str:
        return self._utf8.decode(piece)

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)
