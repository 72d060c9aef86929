"""How many elements and keys a JSON text has, without decoding it.

    elements := one for each comma and colon, five for each array and object        outside of strings

A decoded element takes about 70 bytes, however few it has in the text. The garbage collector visits every array and
object, so those weigh more.

Rules
1. Nothing is decoded. The cost depends on the size of the text alone, and other threads get a turn every megabyte.
2. A text that is not JSON has some number of elements; the decoder refuses it later.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

CONTAINER = 5
"""Elements that an array or an object counts for."""
DEFAULT_LIMIT = 1_250_000
"""Enough for 2,048 inputs of 512 token ids; decoded it is below 100 MB."""
CHUNK_BYTES = 1024 * 1024
COLON, QUOTE = ord(":"), ord('"')

_weights = np.zeros(256, dtype=np.uint8)
_weights[list(b",:")] = 1
_weights[list(b"[{")] = CONTAINER


def has_more_elements(text: bytes, limit: int) -> bool:
    """Whether the text has more elements than the limit."""
    if len(text) * CONTAINER <= limit:
        return False
    return _count_with_strings(text) > limit and _count(text, limit) > limit


def _count_with_strings(text: bytes) -> int:
    """At least the number of elements: what stands in strings is counted too."""
    return text.count(b",") + text.count(b":") + CONTAINER * (text.count(b"[") + text.count(b"{"))


def _count(text: bytes, limit: int) -> int:
    """The number of elements, or some number above the limit."""
    total = 0
    for chunk in _outside_strings(text):
        total += int(_weights[chunk].sum())
        if total > limit:
            break
    return total


def count_keys(text: bytes) -> int:
    """The keys of all objects of a valid JSON text, repeated ones included."""
    return sum(int(np.count_nonzero(chunk == COLON)) for chunk in _outside_strings(text))


def _outside_strings(text: bytes) -> Iterator[NDArray[np.uint8]]:
    """The bytes that are not inside a string, with some quotes among them."""
    in_string = False
    for chunk in _chunks(text):
        # Without escaped backslashes and quotes, every quote begins or ends a string.
        plain = np.frombuffer(chunk.replace(rb"\\", b"").replace(rb"\"", b""), dtype=np.uint8)
        inside = np.logical_xor.accumulate(plain == QUOTE) ^ in_string
        in_string = bool(inside[-1]) if len(inside) else in_string
        yield plain[~inside]


def _chunks(text: bytes) -> Iterator[bytes]:
    """The text in pieces, none of which ends within an escape."""
    start = 0
    while start < len(text):
        end = start + CHUNK_BYTES
        chunk = text[start:end]
        if (len(chunk) - len(chunk.rstrip(b"\\"))) % 2:
            chunk += text[end : end + 1]
        yield chunk
        start += len(chunk)
