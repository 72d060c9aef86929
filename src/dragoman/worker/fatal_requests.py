"""Requests that end the engine's process: after two deaths the same request is refused.

Rules
1. A death counts against a request only where it was the only one in the process.
2. Requests are the same where all that an engine is told of them is: ids, labels and callers do not count.
3. Deaths are forgotten after `MEMORY_SECONDS`, and so are those of the requests that were not seen for longest.
"""

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable

import msgspec

from dragoman.conversation import GenerationRequest
from dragoman.errors import ENCODE_ERRORS, RequestRefused
from dragoman.worker.messages import Question

Asked = GenerationRequest | msgspec.Raw | Question
"""What a process was asked; `Raw` is an encoded GenerationRequest."""

MOST_DEATHS = 2
MOST_REQUESTS = 1024
MEMORY_SECONDS = 3600.0

_decode = msgspec.msgpack.Decoder(GenerationRequest).decode


class FatalRequests:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._deaths: OrderedDict[bytes, list[float]] = OrderedDict()

    def note(self, asked: Asked) -> None:
        """The process died with this request and no other in it."""
        digest = _digest(asked)
        if digest is None:
            return
        self._deaths[digest] = [*self._recent(digest), self._clock()]
        self._deaths.move_to_end(digest)
        while len(self._deaths) > MOST_REQUESTS:
            self._deaths.popitem(last=False)

    def check(self, asked: Asked) -> None:
        """Raises RequestRefused."""
        digest = _digest(asked) if self._deaths else None
        if digest is not None and len(self._recent(digest)) >= MOST_DEATHS:
            raise RequestRefused(
                f"this request has ended the engine's process {MOST_DEATHS} times, and is not tried again within "
                f"{MEMORY_SECONDS / 60:g} minutes; change the request"
            )

    def _recent(self, digest: bytes) -> list[float]:
        since = self._clock() - MEMORY_SECONDS
        return [death for death in self._deaths.get(digest, ()) if death > since]


def _digest(asked: Asked) -> bytes | None:
    """None for what cannot be sent to a process, so that none can die of it."""
    try:
        if isinstance(asked, GenerationRequest | msgspec.Raw):
            # As an engine reads it: what was written as 0 or as 0.0 is the same.
            request = _decode(msgspec.msgpack.encode(asked))
            asked = msgspec.structs.replace(request, id="", principal="", labels={})
        else:
            asked = msgspec.structs.replace(asked, id=0)
        return hashlib.sha256(msgspec.msgpack.encode(asked)).digest()
    except ENCODE_ERRORS:
        return None
