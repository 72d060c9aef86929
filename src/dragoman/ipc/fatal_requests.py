"""Requests that crash the engine's process: after two deaths the same request is refused.

Rules
1. A death counts against a request only if it was the only request in the process. That an operator, the system or
   the stall timer killed the process (SIGKILL, SIGTERM) does not count.
2. Two requests are the same if the engine gets the same input: ids, labels and callers do not count.
3. Deaths are forgotten after `MEMORY_SECONDS`. Beyond `MOST_REQUESTS`, the oldest are forgotten.
"""

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable

import msgspec

from dragoman.core.errors import ENCODE_ERRORS, RequestRefused
from dragoman.core.request import GenerationRequest
from dragoman.ipc.worker_messages import Question

WorkerRequest = GenerationRequest | msgspec.Raw | Question
"""A request to a process; `Raw` is an encoded GenerationRequest."""

MOST_DEATHS = 2
MOST_REQUESTS = 1024
MEMORY_SECONDS = 3600.0

_decode = msgspec.msgpack.Decoder(GenerationRequest).decode


class FatalRequests:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._deaths: OrderedDict[bytes, list[float]] = OrderedDict()

    def note(self, asked: WorkerRequest) -> None:
        """The process died with this request and no other in it."""
        digest = _digest(asked)
        if digest is None:
            return
        self._deaths[digest] = [*self._recent(digest), self._clock()]
        self._deaths.move_to_end(digest)
        while len(self._deaths) > MOST_REQUESTS:
            self._deaths.popitem(last=False)

    def check(self, asked: WorkerRequest) -> None:
        """Raise RequestRefused if the request has ended the process too often."""
        digest = _digest(asked) if self._deaths else None
        if digest is not None and len(self._recent(digest)) >= MOST_DEATHS:
            raise RequestRefused(
                f"this request has ended the engine's process {MOST_DEATHS} times, and is not tried again within "
                f"{MEMORY_SECONDS / 60:g} minutes; change the request"
            )

    def _recent(self, digest: bytes) -> list[float]:
        since = self._clock() - MEMORY_SECONDS
        return [death for death in self._deaths.get(digest, ()) if death > since]


def _digest(asked: WorkerRequest) -> bytes | None:
    """None for a request that cannot be encoded, and so never reaches a process."""
    try:
        if isinstance(asked, GenerationRequest | msgspec.Raw):
            # Decoded as an engine does, so that 0 and 0.0 are the same.
            request = _decode(msgspec.msgpack.encode(asked))
            asked = msgspec.structs.replace(request, id="", principal="", labels={})
        else:
            asked = msgspec.structs.replace(asked, id=0)
        return hashlib.sha256(msgspec.msgpack.encode(asked)).digest()
    except ENCODE_ERRORS:
        return None
