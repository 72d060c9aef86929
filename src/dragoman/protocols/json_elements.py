"""Counts the elements and keys of a JSON text without decoding it.

    elements := one for each comma and colon, five for each array and object; strings are skipped

A decoded element takes about 70 bytes, even if it is a single character of the text. The garbage collector visits
every array and object, so those count more.

Rules
1. The cost depends only on the size of the text. Other threads can run after every megabyte.
2. The count of an invalid text is meaningless; the decoder rejects such text later.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

CONTAINER_WEIGHT = 5
"""Number of elements that an array or object counts as."""
DEFAULT_LIMIT = 1_250_000
"""Enough for 2,048 inputs of 512 token ids, which take less than 100 MB when decoded."""
CHUNK_BYTES = 1024 * 1024
COLON, QUOTE = ord(":"), ord('"')

_weights = np.zeros(256, dtype=np.uint8)
_weights[list(b",:")] = 1
_weights[list(b"[{")] = CONTAINER_WEIGHT


def has_more_elements(text: bytes, limit: int) -> bool:
    if len(text) * CONTAINER_WEIGHT <= limit:
        return False
    # An upper bound that includes the characters inside strings.
    if text.count(b",") + text.count(b":") + CONTAINER_WEIGHT * (text.count(b"[") + text.count(b"{")) <= limit:
        return False
    total = 0
    for chunk in _outside_strings(text):
        total += int(_weights[chunk].sum())
        if total > limit:
            return True
    return False


def count_keys(text: bytes) -> int:
    """Count the keys of all objects of a valid JSON text, including duplicates."""
    return sum(int(np.count_nonzero(chunk == COLON)) for chunk in _outside_strings(text))


def _outside_strings(text: bytes) -> Iterator[NDArray[np.uint8]]:
    """Yield the bytes outside strings, and the closing quotes."""
    in_string = False
    for chunk in _chunks(text):
        # Once escaped backslashes and quotes are removed, every quote begins or ends a string.
        plain = np.frombuffer(chunk.replace(rb"\\", b"").replace(rb"\"", b""), dtype=np.uint8)
        inside = np.logical_xor.accumulate(plain == QUOTE) ^ in_string
        in_string = bool(inside[-1]) if len(inside) else in_string
        yield plain[~inside]


def _chunks(text: bytes) -> Iterator[bytes]:
    """Split the text into chunks without splitting an escape sequence."""
    start = 0
    while start < len(text):
        end = start + CHUNK_BYTES
        chunk = text[start:end]
        if (len(chunk) - len(chunk.rstrip(b"\\"))) % 2:
            chunk += text[end : end + 1]
        yield chunk
        start += len(chunk)
