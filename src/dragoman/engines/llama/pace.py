"""Adjusts the number of prompt rows in a step so that a step takes a given time.

The time of a step is not proportional to its rows. Reading the weights costs the same for one row as for fifty, and
from 64 rows of a sequence on llama.cpp uses another attention kernel: after 1,000 tokens, 64 rows are faster than 48.
So with long texts a long step of LONG_STEP_ROWS may be worthwhile: it exceeds the target time, but the prompt finishes
sooner.
"""

LONG_STEP_ROWS = 65
"""64 rows of a prompt, and one row of a sequence that decodes."""
MAX_LONG_STEP = 1.8
"""Longest duration of a long step, as a multiple of the target time."""
MAX_ROW_COST = 0.8
"""Highest cost of a row in a long step, relative to a row in a normal step."""
ESTIMATED_ROW_COST = 0.6
"""Estimated relative cost of a row before the first long step."""
STEPS_BETWEEN_TRIES = 17
STEPS_BEFORE_TRY = 5
"""Normal steps of a prompt before the first long step. Long steps do not pay at the beginning of a text."""


class StepPace:
    """Number of prompt rows for a step of `seconds`. With `long_steps`, long steps of LONG_STEP_ROWS are tried."""

    def __init__(self, seconds: float, *, minimum: int, maximum: int, long_steps: bool = False) -> None:
        self.seconds = seconds
        self.maximum = maximum
        self.minimum = min(minimum, maximum)
        self.long_steps = long_steps and maximum >= LONG_STEP_ROWS
        self._rows = self.minimum
        self._row_seconds = 0.0
        self._is_long = False
        self._long_step_paid = False
        """Whether a long step of this prompt was faster per row."""
        self._steps_until_try = STEPS_BEFORE_TRY

    @property
    def rows(self) -> int:
        return LONG_STEP_ROWS if self._is_long and self._rows < LONG_STEP_ROWS else self._rows

    def record(self, rows: int, seconds: float) -> None:
        """Record the duration of a step with `rows` prompt rows."""
        if rows < self.rows:
            self._is_long, self._steps_until_try = False, STEPS_BEFORE_TRY
            return
        if rows > self._rows:
            self._evaluate_long_step(seconds)
            return
        self._row_seconds = seconds / rows
        self._adjust(seconds)
        if self.long_steps:
            self._steps_until_try -= 1
            estimated = LONG_STEP_ROWS * ESTIMATED_ROW_COST * self._row_seconds
            self._is_long = self._steps_until_try <= 0 and estimated <= MAX_LONG_STEP * self.seconds
            self._long_step_paid = False

    def _adjust(self, seconds: float) -> None:
        ratio = min(max(self.seconds / max(seconds, 1e-6), 0.5), 2)
        # Only half of the difference, because one slow step may only mean that the machine was busy.
        target = round(self._rows * (1 + ratio) / 2)
        self._rows = min(max(target, self.minimum), self.maximum)

    def _evaluate_long_step(self, seconds: float) -> None:
        """Continue with long steps if the first one paid and the last one did not take too long."""
        self._long_step_paid = self._long_step_paid or seconds <= LONG_STEP_ROWS * MAX_ROW_COST * self._row_seconds
        self._is_long = self._long_step_paid and seconds <= MAX_LONG_STEP * self.seconds
        if not self._is_long:
            # After many long steps the text is much longer, and the previous number of rows would take too long.
            # Restart from the minimum; the right number is found again within a few steps.
            self._steps_until_try, self._rows = STEPS_BETWEEN_TRIES, self.minimum
