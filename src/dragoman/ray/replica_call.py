"""One thing that is asked of a replica, from the engine that asks to the router that says which replica it is.

It is counted where it is heading, from the moment in which that was decided: of many that come at once, each must see
those before it.
"""

import threading
from collections.abc import Callable, Sequence

Over = Callable[[], None]


class Asked:
    """Only `body` travels. The rest is for those in the process that asks, in whichever thread."""

    def __init__(self, body: bytes, links: Sequence[bytes] = (), tried: Sequence[str] = ()) -> None:
        self.body = body
        self.links = links
        """Of the prompt, see `beginnings`."""
        self.tried = list(tried)
        """Replicas that it has been to."""
        self._heading: str | None = None
        self._over: Over | None = None
        self._is_closed = False
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type["Asked"], tuple[bytes]]:
        return Asked, (self.body,)

    def again(self) -> "Asked":
        return Asked(self.body, self.links, self.tried)

    def heads_for(self, replica: str, take: Callable[[], Over]) -> None:
        """`take` counts it there, and tells how that ends."""
        with self._lock:
            if self._is_closed or self._heading == replica:
                return
            self._let_go()
            self._heading, self._over = replica, take()

    def close(self) -> None:
        """It has been answered, or never will be."""
        with self._lock:
            self._is_closed = True
            self._let_go()

    def _let_go(self) -> None:
        over, self._over, self._heading = self._over, None, None
        if over is not None:
            over()
