"""Messages from a layout trial to the process that started it.

message := TrialProgress | TrialResult | CopyMade | TrialFailed     one JSON object per line

`TrialProgress` may come any number of times. Any other message is the last one.
"""

import math

import msgspec


class Speed(msgspec.Struct, frozen=True):
    """Tokens per second of a prompt, of one reply, and of eight replies at once."""

    prompt: float = 0.0
    one: float = 0.0
    eight: float = 0.0

    def ratio(self, other: "Speed") -> "Speed":
        return Speed(self.prompt / other.prompt, self.one / other.one, self.eight / other.eight)

    @property
    def minimum(self) -> float:
        return min(self.prompt, self.one, self.eight)

    @property
    def mean(self) -> float:
        """The geometric mean."""
        return math.prod((self.prompt, self.one, self.eight)) ** (1 / 3)


class Quality(msgspec.Struct, frozen=True):
    """Difference between the copy and the original. The `quality` module defines the figures."""

    tokens: int
    divergence: float
    agreement: float


class TrialProgress(msgspec.Struct, frozen=True, tag="progress"):
    doing: str
    done: float


class TrialResult(msgspec.Struct, frozen=True, tag="tried"):
    sha256: str
    share: float
    """Fraction of the cores' time that the process got during the measurement."""
    before: Speed
    after: Speed
    quality: Quality


class CopyMade(msgspec.Struct, frozen=True, tag="made"):
    """The copy was recreated without a new measurement."""

    sha256: str


class TrialFailed(msgspec.Struct, frozen=True, tag="failed"):
    reason: str
    lasting: bool = True
    """True if a retry would fail in the same way. A full disk, for example, is temporary."""


Message = TrialProgress | TrialResult | CopyMade | TrialFailed
