"""Refuses requests that crashed the worker twice.

Rules
1. A crash counts against a request only if it was the only request in the worker. A worker killed by an operator, the
   system or the stall timer (SIGKILL, SIGTERM) does not count.
2. Two requests are the same if the engine gets the same input: ids, labels and callers are ignored.
3. Crashes are forgotten after `MEMORY_SECONDS`. Beyond `MOST_REQUESTS`, the oldest are forgotten.
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
"""A request to a worker; `Raw` is an encoded GenerationRequest."""

MOST_CRASHES = 2
MOST_REQUESTS = 1024
MEMORY_SECONDS = 3600.0

_decode = msgspec.msgpack.Decoder(GenerationRequest).decode


class FatalRequests:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._crashes: OrderedDict[bytes, list[float]] = OrderedDict()

    def note_crash(self, request: WorkerRequest) -> None:
        """Record that the worker crashed while this was its only request."""
        digest = _digest(request)
        if digest is None:
            return
        self._crashes[digest] = [*self._recent(digest), self._clock()]
        self._crashes.move_to_end(digest)
        while len(self._crashes) > MOST_REQUESTS:
            self._crashes.popitem(last=False)

    def check(self, request: WorkerRequest) -> None:
        """Raise RequestRefused if the request has crashed the worker too often."""
        digest = _digest(request) if self._crashes else None
        if digest is not None and len(self._recent(digest)) >= MOST_CRASHES:
            raise RequestRefused(
                f"this request crashed the engine's process {MOST_CRASHES} times; it is refused for "
                f"{MEMORY_SECONDS / 60:g} minutes. Change the request."
            )

    def _recent(self, digest: bytes) -> list[float]:
        since = self._clock() - MEMORY_SECONDS
        return [crash for crash in self._crashes.get(digest, ()) if crash > since]


def _digest(request: WorkerRequest) -> bytes | None:
    """None for a request that cannot be encoded and therefore never reaches a worker."""
    try:
        if isinstance(request, GenerationRequest | msgspec.Raw):
            # Decoding makes 0 and 0.0 the same.
            decoded = _decode(msgspec.msgpack.encode(request))
            same: object = msgspec.structs.replace(decoded, id="", principal="", labels={})
        else:
            same = msgspec.structs.replace(request, id=0)
        return hashlib.sha256(msgspec.msgpack.encode(same)).digest()
    except ENCODE_ERRORS:
        return None
