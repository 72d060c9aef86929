"""Generates unguessable ids of requests, responses and items."""

import os

ID_BYTES = 12
_unused: list[str] = []
"""Ids generated in advance: the system call costs about the same for one and for many."""
# A forked process must not use the ids of its parent.
os.register_at_fork(after_in_child=_unused.clear)


def new_id(prefix: str) -> str:
    if not _unused:
        random_bytes = os.urandom(64 * ID_BYTES)
        _unused.extend(random_bytes[at : at + ID_BYTES].hex() for at in range(0, len(random_bytes), ID_BYTES))
    return prefix + _unused.pop()
