"""How long to wait before a process that has died is started again: one policy for all that the server keeps alive.

Rules
1. After the first death no time at all. After each that follows it young, a pause, twice as long as the last one.
2. A process that has lived for `YOUNG_SECONDS` has shown that it can: its death is a first one again.
"""

YOUNG_SECONDS = 10.0


class Deaths:
    """`shortest` and `longest` are what a pause may last."""

    def __init__(self, shortest: float, longest: float) -> None:
        self._shortest = shortest
        self._longest = longest
        self.count = 0
        """One after the other, all but the first of them of young ones."""
        self.pause = 0.0

    def note(self, age: float) -> None:
        self.count = self.count + 1 if age < YOUNG_SECONDS else 1
        self.pause = 0.0 if self.count == 1 else min(self._longest, max(self._shortest, 2 * self.pause))
