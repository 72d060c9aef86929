"""What trying another layout tells: plain values, and the messages in which they cross a pipe.

message := Progress | Tried | Made | Failed   one JSON object per line; whatever is no Progress is the last
"""

import math

import msgspec


class Speed(msgspec.Struct, frozen=True):
    """Tokens per second: of a prompt, of one reply, of eight at once."""

    prompt: float = 0.0
    one: float = 0.0
    eight: float = 0.0

    def times(self, other: "Speed") -> "Speed":
        """How many times as fast as the other."""
        return Speed(self.prompt / other.prompt, self.one / other.one, self.eight / other.eight)

    @property
    def least(self) -> float:
        return min(self.prompt, self.one, self.eight)

    @property
    def mean(self) -> float:
        return math.prod((self.prompt, self.one, self.eight)) ** (1 / 3)


class Quality(msgspec.Struct, frozen=True):
    """How close to the original it stays: see the module `quality`."""

    tokens: int
    divergence: float
    agreement: float


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    doing: str
    done: float


class Tried(msgspec.Struct, frozen=True, tag="tried"):
    sha256: str
    share: float
    """Of the cores' time that was to be had while it was measured."""
    before: Speed
    after: Speed
    quality: Quality


class Made(msgspec.Struct, frozen=True, tag="made"):
    """The file again, of which everything else is known."""

    sha256: str


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    reason: str
    lasting: bool = True
    """Whether it would fail again; a full disk is another thing."""


Message = Progress | Tried | Made | Failed
