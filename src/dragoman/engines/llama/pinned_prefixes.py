"""Texts that somebody wants to be kept for a while. Pure: the time is told by whoever makes one of these.

Rules
1. There are at most `limit` pins; for another one the oldest gives way.
2. A text that goes on from a pinned one takes its place, and what remains of its time if that is more.
3. A pin says nothing about where its text is, or whether it is anywhere.
"""

from collections.abc import Callable, Sequence

import msgspec


class Pin(msgspec.Struct, frozen=True):
    tokens: tuple[int, ...]
    salt: str
    until: float


class Pins:
    def __init__(self, limit: int, clock: Callable[[], float]) -> None:
        self.limit = limit
        self.clock = clock
        self._pins: list[Pin] = []

    def add(self, tokens: Sequence[int], salt: str, seconds: float) -> None:
        text = tuple(tokens)
        continued = [pin for pin in self.live if pin.salt == salt and text[: len(pin.tokens)] == pin.tokens]
        until = max([self.clock() + seconds, *(pin.until for pin in continued)])
        kept = [pin for pin in self._pins if pin not in continued]
        self._pins = [*kept, Pin(text, salt, until)][-self.limit :] if self.limit else []

    @property
    def live(self) -> Sequence[Pin]:
        """Those whose time is not over, the oldest first."""
        now = self.clock()
        self._pins = [pin for pin in self._pins if pin.until > now]
        return self._pins
