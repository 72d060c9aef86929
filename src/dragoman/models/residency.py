"""Which models are in memory: events in, effects out, no clock and no engine of its own.

    out -> in line -> loading -> in -> leaving -> out

Rules
1. What is loading, in and leaving takes no more than the budget, as far as its needs are known: the most that was
   expected and measured of each counts. A model that alone needs more is refused; one that has only grown to more, in
   use, is not: it counts for all there is.
2. A model that somebody uses is not unloaded.
3. Models stand in line for memory in the order in which they were first asked for. Only one that needs none overtakes.
4. While somebody stands in line, a model stays for its turn, `turn` seconds from when it came in; then it takes nobody
   in any more, and what is asked of it waits, all together, for its next turn. One with nothing to do makes room after
   `LINGER` seconds already. Of several the one that was used least recently goes first.
5. A model that nobody has used for its keep-alive time is unloaded.
6. A dismissed model accepts no new requests. If it is still loading, the load is aborted and the waiting requests are
   refused.
7. A model that was removed serves those who have asked for it, then it goes.

So with n models that need each other's memory nobody waits for more than n turns, loads and longest requests.
"""

import math
from collections.abc import Iterable, Iterator
from typing import Literal

import msgspec

LINGER = 0.5
UNUSED_SECONDS = 30.0
"""What was loaded because somebody wished so stays for at least so long, to be asked for."""

State = Literal["out", "loading", "in", "leaving"]


class Added(msgspec.Struct, frozen=True):
    """A new model, or new terms for one that there is. One that `stays` is never unloaded to make room or for rest."""

    key: str
    keep_alive: float = math.inf
    stays: bool = False


class Removed(msgspec.Struct, frozen=True):
    key: str
    why: str = "it is configured no longer"


class Bounds(msgspec.Struct, frozen=True):
    budget: int | None
    turn: float


class Asked(msgspec.Struct, frozen=True):
    """Somebody wants to use a model and waits, with this ticket."""

    key: str
    ticket: int


class GaveUp(msgspec.Struct, frozen=True):
    key: str
    ticket: int


class Wished(msgspec.Struct, frozen=True):
    """It is to be loaded, though nobody waits for it."""

    key: str


class Dismissed(msgspec.Struct, frozen=True):
    """It is to be unloaded, as soon as nobody uses it."""

    key: str


class Weighed(msgspec.Struct, frozen=True):
    key: str
    need: int


class Loaded(msgspec.Struct, frozen=True):
    """`need` is what was measured; 0: nobody could."""

    key: str
    need: int


class Measured(msgspec.Struct, frozen=True):
    """It has grown."""

    key: str
    need: int


class Failed(msgspec.Struct, frozen=True):
    """It could not be weighed or loaded."""

    key: str


class Lost(msgspec.Struct, frozen=True):
    """It is not there any more, and its memory is free."""

    key: str


class Unloaded(msgspec.Struct, frozen=True):
    key: str


class Passed(msgspec.Struct, frozen=True):
    """Time, and nothing else."""


Event = (
    Added
    | Removed
    | Bounds
    | Asked
    | GaveUp
    | Wished
    | Dismissed
    | Weighed
    | Loaded
    | Measured
    | Failed
    | Lost
    | Unloaded
    | Passed
)


class Weigh(msgspec.Struct, frozen=True):
    """Find out how much memory it will need."""

    key: str


class Load(msgspec.Struct, frozen=True):
    key: str


class Unload(msgspec.Struct, frozen=True):
    key: str
    why: str


class Admit(msgspec.Struct, frozen=True):
    key: str
    tickets: tuple[int, ...]


class Abort(msgspec.Struct, frozen=True):
    """Cancel a load that is under way; `Unloaded` reports that it has ended."""

    key: str


class Refuse(msgspec.Struct, frozen=True):
    """`need` exceeds the whole budget; None: the load failed, or the model `is_dismissed`."""

    key: str
    tickets: tuple[int, ...]
    need: int | None = None
    is_dismissed: bool = False


class Forget(msgspec.Struct, frozen=True):
    """A removed model has gone."""

    key: str


Effect = Weigh | Load | Abort | Unload | Admit | Refuse | Forget


class Seat:
    """One model's place, taken or not."""

    def __init__(self, order: int) -> None:
        self.keep_alive = math.inf
        self.stays = False
        self.need: int | None = None
        """To be loaded, as far as it is known."""
        self.grown = 0
        """The most it took in use."""
        self.state: State = "out"
        self.order = order
        self.running = 0
        self.waiting: dict[int, None] = {}
        self.since = self.idle_since = 0.0
        self.is_weighing = self.is_wished = self.is_dismissed = self.is_removed = self.is_closed = False
        self.is_unused = False
        self.removed_why = ""

    @property
    def is_wanted(self) -> bool:
        return bool(self.waiting) or self.is_wished

    @property
    def takes_in(self) -> bool:
        return self.state == "in" and not self.is_closed and not self.is_dismissed

    def claim(self, budget: float) -> float:
        """What it may take of the memory once it is there."""
        return max(self.need or 0, min(self.grown, budget))

    def weight(self, budget: float = math.inf) -> float:
        """What it takes of the memory now."""
        return 0 if self.state == "out" else self.claim(budget)

    @property
    def rests_until(self) -> float:
        keep = max(self.keep_alive, UNUSED_SECONDS) if self.is_unused else self.keep_alive
        return math.inf if self.stays else self.idle_since + keep


class Residency:
    def __init__(self, budget: int | None = None, turn: float = 10.0) -> None:
        self.budget = budget
        self.turn = turn
        self.seats: dict[str, Seat] = {}
        self.due = math.inf
        """When it wants to hear of the time again."""
        self._orders = 0

    def enter(self, key: str) -> bool:
        """What `Asked` would come to, where nobody has to wait; False where somebody has."""
        seat = self.seats[key]
        if not seat.takes_in or seat.waiting:
            return False
        seat.running += 1
        seat.is_unused = False
        return True

    def leave(self, key: str, now: float) -> bool:
        """Somebody has finished using it. False: there is something to decide, and it wants to hear of the time."""
        seat = self.seats[key]
        seat.running -= 1
        seat.idle_since = now
        if seat.running:
            return True
        goes = seat.is_removed or seat.is_dismissed or (seat.keep_alive < math.inf and not seat.stays)
        return self.budget is None and not goes

    def feed(self, event: Event, now: float) -> list[Effect]:
        return self._take(event, now) + list(self._decide(now))

    def _take(self, event: Event, now: float) -> list[Effect]:
        """Note what happened."""
        if isinstance(event, Bounds):
            self.budget, self.turn = event.budget, event.turn
        elif isinstance(event, Added):
            seat = self.seats.setdefault(event.key, Seat(0))
            seat.keep_alive, seat.stays, seat.is_removed = event.keep_alive, event.stays, False
        elif not isinstance(event, Passed):
            return self._take_of(self.seats[event.key], event, now)
        return []

    def _take_of(self, seat: Seat, event: Event, now: float) -> list[Effect]:
        if isinstance(event, Asked | Wished):
            if not seat.is_wanted:
                self._orders += 1
                seat.order = self._orders
            if isinstance(event, Asked):
                seat.waiting[event.ticket] = None
            elif seat.state in ("out", "leaving"):
                seat.is_wished = True
        elif isinstance(event, GaveUp):
            seat.waiting.pop(event.ticket, None)
        elif isinstance(event, Removed):
            seat.is_removed, seat.removed_why = True, event.why
            seat.is_wished = False
        elif isinstance(event, Dismissed):
            return self._dismissed(event.key, seat)
        elif isinstance(event, Weighed):
            seat.need, seat.is_weighing = event.need, False
        elif isinstance(event, Measured):
            seat.grown = max(seat.grown, event.need)
        elif isinstance(event, Loaded):
            return self._came_in(seat, event, now)
        elif isinstance(event, Failed | Lost):
            return self._fell_out(seat, event)
        elif isinstance(event, Unloaded):
            seat.state, seat.is_dismissed = "out", False
        return []

    def _dismissed(self, key: str, seat: Seat) -> list[Effect]:
        seat.is_wished = False
        if seat.state != "loading":
            seat.is_dismissed = seat.state == "in"
            return []
        seat.state = "leaving"
        tickets = tuple(seat.waiting)
        seat.waiting.clear()
        return [Refuse(key, tickets, is_dismissed=True), Abort(key)]

    def _came_in(self, seat: Seat, event: Loaded, now: float) -> list[Effect]:
        # Where nothing is known it stays so: it is weighed when that matters.
        seat.need = max(seat.need or 0, event.need) or seat.need
        seat.since = seat.idle_since = now
        seat.is_closed, seat.is_unused, seat.is_wished = False, not seat.waiting, False
        if self.budget is not None and (seat.need or 0) > self.budget and not seat.stays:
            seat.state = "leaving"
            return [Unload(event.key, "it needs more memory than there may be"), self._refused(event.key, seat)]
        seat.state = "in"
        return []

    def _admitted(self, key: str, seat: Seat) -> Admit:
        tickets = tuple(seat.waiting)
        seat.waiting.clear()
        seat.running += len(tickets)
        seat.is_unused = False
        return Admit(key, tickets)

    def _fell_out(self, seat: Seat, event: Failed | Lost) -> list[Effect]:
        seat.is_weighing = seat.is_wished = seat.is_dismissed = False
        seat.state = "out"
        if isinstance(event, Lost) or not seat.waiting:
            return []
        tickets = tuple(seat.waiting)
        seat.waiting.clear()
        return [Refuse(event.key, tickets)]

    def _refused(self, key: str, seat: Seat) -> Refuse:
        """Because it needs too much."""
        tickets = tuple(seat.waiting)
        seat.waiting.clear()
        seat.is_wished = False
        return Refuse(key, tickets, seat.need)

    def _decide(self, now: float) -> Iterator[Effect]:
        self.due = math.inf
        yield from self._let_rest(now)
        yield from self._load_in_line(now)
        for key, seat in self.seats.items():
            if seat.waiting and seat.takes_in:
                yield self._admitted(key, seat)

    def _let_rest(self, now: float) -> Iterator[Effect]:
        """Unload what has had its time, or was told to go."""
        for key, seat in list(self.seats.items()):
            if seat.running or (seat.waiting and not seat.is_dismissed):
                continue
            if seat.state == "out" and seat.is_removed:
                del self.seats[key]
                yield Forget(key)
            elif seat.state == "in" and seat.is_removed:
                yield self._unload(key, seat, seat.removed_why)
            elif seat.state == "in" and seat.is_dismissed:
                yield self._unload(key, seat, "somebody asked for it")
            elif seat.state == "in" and now >= seat.rests_until:
                yield self._unload(key, seat, f"nobody used it for {seat.keep_alive:g} s")
            elif seat.state == "in":
                self.due = min(self.due, seat.rests_until)

    def _load_in_line(self, now: float) -> Iterator[Effect]:
        line = sorted(
            ((key, seat) for key, seat in self.seats.items() if seat.state == "out" and seat.is_wanted),
            key=lambda entry: entry[1].order,
        )
        is_blocked = False
        for seat in self.seats.values():
            seat.is_closed = False
        for key, seat in line:
            need, claim = 0 if self.budget is None else seat.need, seat.claim(self._most)
            if need is None:
                if not seat.is_weighing:
                    seat.is_weighing = True
                    yield Weigh(key)
            elif need > self._most:
                yield self._refused(key, seat)
            elif claim == 0 or (not is_blocked and claim <= self._room()):
                seat.state = "loading"
                yield Load(key)
            elif not is_blocked:
                is_blocked = True
                yield from self._make_room(claim - self._room(), now, f"room is needed for {key}", closing=True)
        if not is_blocked and self._room() < 0:
            yield from self._make_room(-self._room(), now, "memory is short", closing=False)

    @property
    def _most(self) -> float:
        return math.inf if self.budget is None else self.budget

    def _room(self) -> float:
        return self._most - sum(seat.weight(self._most) for seat in self.seats.values())

    def _make_room(self, shortage: float, now: float, why: str, closing: bool) -> Iterator[Effect]:
        """Unload what may go, and close what may not go yet, until enough is on its way."""
        shortage -= sum(seat.weight(self._most) for seat in self.seats.values() if seat.state == "leaving")
        for key, seat in self._by_use():
            if shortage <= 0:
                return
            shortage -= seat.weight(self._most)
            until = seat.since + self.turn
            if not seat.running:
                until = min(until, seat.idle_since + min(LINGER, self.turn / 4))
            if now < until:
                self.due = min(self.due, until)
            elif not seat.running:
                yield self._unload(key, seat, why)
            elif closing:
                seat.is_closed = True

    def _by_use(self) -> Iterable[tuple[str, Seat]]:
        """The models that may have to go: first those with nothing to do, the least recently used one first."""
        seats = [entry for entry in self.seats.items() if entry[1].state == "in" and entry[1].weight()]
        return sorted(
            (entry for entry in seats if not entry[1].stays),
            key=lambda entry: (entry[1].running > 0, entry[1].since if entry[1].running else entry[1].idle_since),
        )

    def _unload(self, key: str, seat: Seat, why: str) -> Unload:
        seat.state = "leaving"
        return Unload(key, why)
