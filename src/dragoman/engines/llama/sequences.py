"""Which sequence of the decoder's memory holds what, and which one a job gets. Pure: effects are for others to do.

    seats  0 … slots-1                  where jobs decode
    shelf  slots … slots+cached-1       where beginnings are kept that would have to leave a seat

What an ended job has left in its seat stays there, and is found by whoever begins with the same tokens. A job takes the
longest beginning that is anywhere: in its seat already, on the shelf, or in the seat of a job that is still running.
Memory can only be copied whole, so a copy is made of all of a sequence and then cut.

Rules
1. A seat belongs to one job at the most. What is on the shelf belongs to nobody.
2. Sequences that decode together lie side by side where that can be: llama.cpp works on neighbours in one go, and goes
   through the weights again for each gap. That is worth more than a copy, so it comes first in the choice of a seat,
   and where jobs that have gone left a gap that nobody fills, another one moves there. One in a plan: copies take time.
3. A beginning of fewer than WORTH tokens is neither taken nor kept: computing it is as fast as copying a sequence.
4. A job that gets a seat shelves what only this seat holds. The shelf gives up what others hold too, then what has not
   been used for the longest time; what was used before everything on the shelf is not shelved.
5. At least the last two tokens of a prompt are left to be decoded: the last one's logits are wanted, and llama.cpp
   computes a row that is alone in another way than several, so that the same request would not get the same answer.
6. Beginnings are shared within one salt only.
7. What only one sequence holds of a pinned text is not given up: it is shelved when its seat is given to a job, to the
   last token, and stays on the shelf. At most half of the shelf is pinned, so that there is always a place.
"""

from collections.abc import Callable, Sequence, Set

import msgspec

from dragoman.engines.llama.pinned_prefixes import Pins
from dragoman.engines.llama.prefix_tree import Prefixes

WORTH = 32
LEFT = 2
PATIENCE = 2
"""Plans for which a gap waits for a new job, since a conversation mostly goes on at once."""


class Clear(msgspec.Struct, frozen=True):
    sequence: int


class Copy(msgspec.Struct, frozen=True):
    """Make the empty sequence `target` a copy of the whole of `source`."""

    source: int
    target: int


class Trim(msgspec.Struct, frozen=True):
    """Keep the first `length` tokens of a sequence."""

    sequence: int
    length: int


Effect = Clear | Copy | Trim


class Sequences:
    def __init__(
        self, slots: int, cached: int = 0, *, sharing: bool = True, clock: Callable[[], float] = lambda: 0.0
    ) -> None:
        self.seats = range(slots)
        self.shelf = range(slots, slots + cached)
        self.sharing = sharing
        self.held = Prefixes()
        self.pins = Pins(cached // 2, clock)
        self.taken: set[int] = set()
        self.filled: set[int] = set()
        """Those that may have something in memory, known or not."""
        self.last_use = dict.fromkeys(range(slots + cached), 0)
        self.effects: list[Effect] = []
        self._now = 0
        self._apart = 0
        """For how many plans those that decode have not lain side by side."""

    def prefix(self, prompt: Sequence[int], salt: str) -> tuple[int, frozenset[int]]:
        """How much of a prompt can be taken, and where it is."""
        length, holders = self.held.longest(prompt[:-LEFT], salt)
        return (length, holders) if length >= WORTH else (0, frozenset())

    def take(self, prompt: Sequence[int], salt: str, *, reuse: bool = True) -> tuple[int, int]:
        """A seat for a job, and how many tokens of its prompt are in it already."""
        length, holders = self.prefix(prompt, salt) if reuse else (0, frozenset())
        pinned = self._pinned()

        def loses(seat: int) -> bool:
            return self._loss(seat, length, holders) >= (1 if seat in pinned else WORTH)

        seat = min(
            (seat for seat in self.seats if seat not in self.taken),
            key=lambda seat: (
                -self._neighbours(seat),
                seat not in holders,
                loses(seat),
                self.last_use[seat],
            ),
        )
        source = max(holders, key=self.last_use.__getitem__, default=seat)
        if loses(seat):
            self._shelve(seat, source, pinned)
        if seat in holders:
            self._cut(seat, length)
        else:
            self._fill(seat, source, length)
        self._hold(seat, prompt[:length], salt)
        return seat, length

    def close_up(self) -> tuple[int, int] | None:
        """Once for each plan; from which seat to which one a job has to move, if any."""
        seats = self.taken
        if not self.sharing or not seats or max(seats) - min(seats) < len(seats):
            self._apart = 0
            return None
        self._apart += 1
        if self._apart <= PATIENCE:
            return None
        first = max(self.seats[: 1 - len(seats)], key=lambda first: _within(seats, first))
        together = range(first, first + len(seats))
        seat, free = max(seats.difference(together)), min(set(together) - seats)
        self._move(seat, free)
        return seat, free

    def grew(self, seat: int, tokens: Sequence[int]) -> None:
        """These tokens are in memory now, after those that were."""
        if self.sharing:
            self.held.extend(seat, tokens)

    def cut(self, seat: int, length: int) -> None:
        """What lies in memory behind so many tokens, of which nobody was told, is not wanted."""
        self.effects.append(Trim(seat, length))

    def leave(self, seat: int, *, spoilt: bool) -> None:
        """The job is gone; `spoilt`: nobody knows what it left in memory."""
        self.taken.remove(seat)
        self._touch(seat)
        if spoilt or not self.sharing:
            self.held.drop(seat)

    def pin(self, tokens: Sequence[int], salt: str, seconds: float) -> None:
        """Keep a text that is in memory for so long."""
        self.pins.add(tokens, salt, seconds)

    def drain(self) -> tuple[Effect, ...]:
        effects, self.effects = tuple(self.effects), []
        return effects

    def _move(self, seat: int, free: int) -> None:
        pinned = self._pinned()
        if self.held.alone(free) >= (1 if free in pinned else WORTH):
            self._shelve(free, seat, pinned)
        self._empty(free)
        self.effects.append(Copy(seat, free))
        self.filled.add(free)
        self.held.move(seat, free)
        self.taken.remove(seat)
        self.taken.add(free)
        self._touch(free)

    def _neighbours(self, seat: int) -> int:
        return (seat - 1 in self.taken) + (seat + 1 in self.taken)

    def _loss(self, seat: int, length: int, holders: frozenset[int]) -> int:
        """How many tokens would be nowhere in memory any more if the seat were given to the job."""
        alone = self.held.alone(seat)
        return min(alone, self.held.length(seat) - length) if seat in holders else alone

    def _pinned(self) -> frozenset[int]:
        """Those that alone hold what there is of a pinned text."""
        found = [self.held.longest(pin.tokens, pin.salt) for pin in self.pins.live]
        return frozenset().union(*(holders for length, holders in found if length >= WORTH and len(holders) == 1))

    def _shelve(self, seat: int, source: int, pinned: frozenset[int]) -> None:
        places = [place for place in self.shelf if place != source and place not in pinned]
        if not places:
            return
        place = min(places, key=lambda place: (self.held.alone(place) >= WORTH, self.last_use[place]))
        in_use = self.held.alone(place) >= WORTH and self.last_use[place] > self.last_use[seat]
        if in_use and seat not in pinned:
            return
        self._empty(place)
        self.effects.append(Copy(seat, place))
        self.filled.add(place)
        self.held.move(seat, place)
        self.last_use[place] = self.last_use[seat]

    def _cut(self, seat: int, length: int) -> None:
        self.held.drop(seat)
        self.effects.append(Trim(seat, length))

    def _fill(self, seat: int, source: int, length: int) -> None:
        self._empty(seat)
        if length:
            self._touch(source)
            self.effects += [Copy(source, seat), Trim(seat, length)]

    def _empty(self, sequence: int) -> None:
        self.held.drop(sequence)
        if sequence in self.filled:
            self.filled.remove(sequence)
            self.effects.append(Clear(sequence))

    def _hold(self, seat: int, tokens: Sequence[int], salt: str) -> None:
        self.taken.add(seat)
        self.filled.add(seat)
        self._touch(seat)
        if self.sharing:
            self.held.hold(seat, tokens, salt)

    def _touch(self, sequence: int) -> None:
        self._now += 1
        self.last_use[sequence] = self._now


def _within(seats: Set[int], first: int) -> int:
    """How many of the seats are among as many that follow each other."""
    return sum(first <= seat < first + len(seats) for seat in seats)
