"""Computes the pause before a crashed process, or a model that failed to load, is started again.

Rules
1. The first failure is followed by the first pause, zero by default. Each further early failure doubles the pause.
2. A process that ran for `YOUNG_SECONDS` resets the count.
"""

YOUNG_SECONDS = 10.0


class RestartBackoff:
    """`first` is the first pause; later ones are between `shortest` and `longest`."""

    def __init__(self, shortest: float, longest: float, first: float = 0.0) -> None:
        self._first = first
        self._shortest = shortest
        self._longest = longest
        self.count = 0
        """Failures in a row."""
        self.pause = 0.0

    def note_failure(self, age: float, young: float = YOUNG_SECONDS) -> None:
        """Record a failure after `age` seconds of running; below `young` it is early."""
        self.count = self.count + 1 if age < young else 1
        self.pause = self._first if self.count == 1 else min(self._longest, max(self._shortest, 2 * self.pause))
