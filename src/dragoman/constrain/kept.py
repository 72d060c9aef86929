"""Results that were expensive, kept for the next time: a bounded number of them, of a bounded size together."""

import threading
from collections import OrderedDict
from typing import Generic, TypeVar

T = TypeVar("T")


class Kept(Generic[T]):
    """What was not used for longest goes first. For any thread."""

    def __init__(self, count: int, size: int) -> None:
        self.most = count
        self.room = size
        self.size = 0
        self._results: OrderedDict[str | bytes, T] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._results)

    def get(self, key: str | bytes) -> T | None:
        with self._lock:
            found = self._results.get(key)
            if found is not None:
                self._results.move_to_end(key)
            return found

    def keep(self, key: str | bytes, result: T) -> None:
        """What it takes is estimated by its key."""
        with self._lock:
            if key not in self._results:
                self._results[key] = result
                self.size += len(key)
            while len(self._results) > self.most or self.size > self.room:
                forgotten, _ = self._results.popitem(last=False)
                self.size -= len(forgotten)
