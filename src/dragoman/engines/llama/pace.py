"""How long a step lasts, steered by how long the last ones did."""


class Pace:
    """How many prefill rows make a step of `seconds`. Steered by the time that full steps took: it is not proportional
    to the rows, since reading the weights and the memory costs the same for one row as for fifty."""

    def __init__(self, seconds: float, *, least: int, most: int) -> None:
        self.seconds = seconds
        self.most = most
        self.least = min(least, most)
        self.chunk = self.least

    def took(self, rows: int, seconds: float) -> None:
        """A step with `rows` rows of prefill lasted so long."""
        if rows < self.chunk:
            return
        ratio = min(max(self.seconds / max(seconds, 1e-6), 0.5), 2)
        # Half the way, because one slow step may only mean that the machine was busy.
        wanted = round(self.chunk * (1 + ratio) / 2)
        self.chunk = min(max(wanted, self.least), self.most)
