"""A least-recently-used cache with limits on the number and the total size of its entries."""

import threading
from collections import OrderedDict
from typing import Generic, TypeVar

T = TypeVar("T")


class LruCache(Generic[T]):
    """A thread-safe LRU cache."""

    def __init__(self, max_count: int, size: int) -> None:
        self.max_count = max_count
        self.max_size = size
        self.size = 0
        self._results: OrderedDict[str | bytes, tuple[T, int]] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._results)

    def get(self, key: str | bytes) -> T | None:
        with self._lock:
            found = self._results.get(key)
            if found is None:
                return None
            self._results.move_to_end(key)
            return found[0]

    def put(self, key: str | bytes, result: T, size: int = 0) -> None:
        """Add or replace an entry. `size` is the size of the result without its key."""
        with self._lock:
            self._remove(key)
            self._results[key] = result, len(key) + size
            self.size += len(key) + size
            while len(self._results) > self.max_count or self.size > self.max_size:
                self._remove(next(iter(self._results)))

    def _remove(self, key: str | bytes) -> None:
        _, size = self._results.pop(key, (None, 0))
        self.size -= size
