"""Which replica is asked, without Ray: their names go in as they come and go, an order comes out.

Rules
1. As between the servers of `upstream` (see its `pool`): the one that has the longest beginning of the prompt, unless
   it has much more to do than the least busy one.
2. The others follow, the least busy first: whoever has no room for the request leaves it to the next.
3. Where a request has been to already, it comes last.
4. A replica that has gone leaves its spot to one that comes, which knows nothing of what was there before.
5. Those who choose and those who tell that a request is over may be in different threads.
"""

import threading
import time
from collections.abc import Callable, Collection, Sequence

from dragoman.engines.upstream.pool import Pool, Spot


class Choosing:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._pool = Pool((), clock)
        self._spots: dict[str, int] = {}
        self._lock = threading.Lock()

    def update(self, replicas: Collection[str]) -> None:
        """These there are now."""
        with self._lock:
            for replica in [known for known in self._spots if known not in replicas]:
                at = self._spots.pop(replica)
                self._pool.drain(at, drained=True)
            for replica in replicas:
                if replica not in self._spots:
                    self._spots[replica] = self._free()

    def _free(self) -> int:
        taken = set(self._spots.values())
        for at, spot in enumerate(self._pool.spots):
            # As long as somebody is counted there, the count would be wrong for another.
            if at not in taken and not spot.running:
                self._pool.renew(at)
                return at
        self._pool.spots.append(Spot())
        return len(self._pool.spots) - 1

    def order(self, links: Sequence[bytes], tried: Collection[str] = ()) -> list[str]:
        """All of them, in the order in which they should be asked."""
        with self._lock:
            left = {at: replica for replica, at in self._spots.items()}
            been = {self._spots[replica] for replica in tried if replica in self._spots}
            first = self._pool.preferred(links, been)
            rest = sorted(left, key=lambda at: (at != first, at in been, self._pool.spots[at].load))
            return [left[at] for at in rest]

    def take(self, replica: str, links: Sequence[bytes]) -> Callable[[], None]:
        """A request has gone there; what is returned is to be called once, when it is over."""
        with self._lock:
            at = self._spots.get(replica)
            # One that has gone in the meantime has no count any more.
            if at is not None:
                self._pool.take(at, links)
        return lambda: self._end(at)

    def _end(self, at: int | None) -> None:
        if at is not None:
            with self._lock:
                self._pool.ended(at)
