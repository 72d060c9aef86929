"""How long a step lasts, steered by how long the last ones did.

Its time is not proportional to its rows: reading the weights and the memory costs the same for one row as for fifty,
and from 64 rows of a text on llama.cpp looks through what is before them in another way: behind 1,000 tokens, 64 rows
are faster than 48. So where a text is long a step of LEAP rows may be worth its waiting: it takes more than the wanted
time, and the whole prompt less.
"""

LEAP = 65
"""One row goes with those who decode; the others are as many as are looked at together."""
LEAP_SECONDS = 1.8
"""How often the wanted time a leap may last."""
LEAP_COST = 0.8
"""What a row of it may cost at the most, measured by one of a step of the wanted time."""
UNTRIED_COST = 0.6
"""The estimated cost of a row in a leap that has not been tried, measured likewise."""
STEPS_BETWEEN_TRIES = 17
STEPS_BEFORE = 5
"""Of a prompt, before the first try: where a text begins there is little to look through."""


class Pace:
    """How many prefill rows make a step of `seconds`; with `leaps`, where they pay."""

    def __init__(self, seconds: float, *, least: int, most: int, leaps: bool = False) -> None:
        self.seconds = seconds
        self.most = most
        self.least = min(least, most)
        self.leaps = leaps and most >= LEAP
        self._steered = self.least
        self._row_seconds = 0.0
        self._leaping = False
        self._paid = False
        """Whether a leap of this prompt has paid."""
        self._until_try = STEPS_BEFORE

    @property
    def chunk(self) -> int:
        return LEAP if self._leaping and self._steered < LEAP else self._steered

    def took(self, rows: int, seconds: float) -> None:
        """A step with `rows` rows of prefill lasted so long."""
        if rows < self.chunk:
            self._leaping, self._until_try = False, STEPS_BEFORE
            return
        if rows > self._steered:
            self._judge(seconds)
            return
        self._row_seconds = seconds / rows
        self._steer(seconds)
        if self.leaps:
            self._until_try -= 1
            estimated = LEAP * UNTRIED_COST * self._row_seconds
            self._leaping = self._until_try <= 0 and estimated <= LEAP_SECONDS * self.seconds
            self._paid = False

    def _steer(self, seconds: float) -> None:
        ratio = min(max(self.seconds / max(seconds, 1e-6), 0.5), 2)
        # Half the way, because one slow step may only mean that the machine was busy.
        wanted = round(self._steered * (1 + ratio) / 2)
        self._steered = min(max(wanted, self.least), self.most)

    def _judge(self, seconds: float) -> None:
        """Whether to go on by leaps: the first has to pay, and none of them may last too long."""
        pays = self._paid or seconds <= LEAP * LEAP_COST * self._row_seconds
        self._paid = pays
        self._leaping = pays and seconds <= LEAP_SECONDS * self.seconds
        if not self._leaping:
            # After many leaps the text is so much longer that the size which was right before them would last too
            # long. After a single one it would not; from the least it is found again in a few steps.
            self._until_try, self._steered = STEPS_BETWEEN_TRIES, self.least
