"""How long to wait before what has died is started again: one policy for all that the server keeps alive, processes
and models that could not be loaded.

Rules
1. After the first death the first pause, mostly none at all. After each that follows it young, one twice as long.
2. A process that has lived for `YOUNG_SECONDS` has shown that it can: its death is a first one again.
"""

YOUNG_SECONDS = 10.0


class Deaths:
    """`shortest` and `longest` are what a pause may last, `first` what the first one does."""

    def __init__(self, shortest: float, longest: float, first: float = 0.0) -> None:
        self._first = first
        self._shortest = shortest
        self._longest = longest
        self.count = 0
        """One after the other, all but the first of them of young ones."""
        self.pause = 0.0

    def note(self, age: float, young: float = YOUNG_SECONDS) -> None:
        self.count = self.count + 1 if age < young else 1
        self.pause = self._first if self.count == 1 else min(self._longest, max(self._shortest, 2 * self.pause))
