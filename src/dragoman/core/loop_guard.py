"""By whom a request has come: each engine that asks another server signs what it sends, so that circles end.

    x-dragoman-via: id ("," id)*          of the engines that passed the request on, the first one first

Rules
1. An engine that finds its own id has been here before: the server that it asks leads back to it.
2. Whoever asks may claim anything: what is no list of ids is as good as none, and a list does not grow for ever.
"""

import re
import secrets
from contextvars import ContextVar

from dragoman.core.errors import LoopDetected

HEADER = "x-dragoman-via"
HEADER_BYTES = HEADER.encode()
MOST_HOPS = 32
_IDS = re.compile(rb"[0-9a-f]{16}(?:,[0-9a-f]{16})*")
_came_by: ContextVar[str] = ContextVar("came_by", default="")


def new_id() -> str:
    return secrets.token_hex(8)


def arrive(told: bytes | None) -> None:
    """A request has come, with this header; what is done for it knows of that from now on."""
    is_list = told is not None and len(told) <= 17 * (MOST_HOPS + 1) and _IDS.fullmatch(told) is not None
    _came_by.set(told.decode() if told is not None and is_list else "")


def check(own: str, model: str) -> None:
    ids = _came_by.get().split(",")
    if own in ids or len(ids) > MOST_HOPS:
        words = f"model '{model}' leads back to itself: a server behind it asks this one for it; its address is wrong"
        raise LoopDetected(words)


def signed(own: str) -> str:
    """The header of what is sent on."""
    before = _came_by.get()
    return f"{before},{own}" if before else own
