"""Detects requests that are forwarded in a circle. Each upstream engine adds its id to a header.

    x-dragoman-via: id ("," id)*          the engines that forwarded the request, in order

Rules
1. An engine that finds its own id in the header rejects the request: its upstream server leads back to it.
2. The header is not trusted: a malformed value is ignored, and its length is limited.
"""

import re
import secrets
from contextvars import ContextVar

from dragoman.core.errors import LoopDetected

HEADER = "x-dragoman-via"
HEADER_BYTES = HEADER.encode()
MAX_HOPS = 32
_IDS = re.compile(rb"[0-9a-f]{16}(?:,[0-9a-f]{16})*")
stored_path: ContextVar[str] = ContextVar("path", default="")


def new_id() -> str:
    return secrets.token_hex(8)


def store_path_header(header: bytes | None) -> None:
    """Store the header of the current request in its context."""
    is_valid = header is not None and len(header) <= 17 * (MAX_HOPS + 1) and _IDS.fullmatch(header) is not None
    stored_path.set(header.decode() if header is not None and is_valid else "")


def check(own: str, model: str) -> None:
    ids = stored_path.get().split(",")
    if own in ids or len(ids) > MAX_HOPS:
        message = f"model '{model}' leads back to itself: its upstream server forwards to this one; check its address"
        raise LoopDetected(message)


def add_own_id(own: str) -> str:
    """Return the header for a forwarded request."""
    before = stored_path.get()
    return f"{before},{own}" if before else own
