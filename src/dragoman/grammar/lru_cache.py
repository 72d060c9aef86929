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

    def keep(self, key: str | bytes, result: T, size: int = 0) -> None:
        """`size` is what the result takes beside its key. A result that is kept already is replaced."""
        with self._lock:
            self._remove(key)
            self._results[key] = result, len(key) + size
            self.size += len(key) + size
            while len(self._results) > self.most or self.size > self.room:
                self._remove(next(iter(self._results)))

    def _remove(self, key: str | bytes) -> None:
        _, size = self._results.pop(key, (None, 0))
        self.size -= size
