"""Which place is asked next, without sockets: what happened goes in, an index comes out.

Rules
1. Asked are only places that are neither drained nor out, and not those that this request has been to already. Of these
   only the ones of the lowest rank.
2. A place is out after FAILURES failures in a row, or at once where nobody answers: for a second, then for twice as
   long each time. After that one request is let through to try; what comes of it decides.
   One at which nobody answered is back before that, as soon as it is seen to answer.
   One that is only slow to show its models is no such place: it is out after FAILURES looks in a row that took too
   long, and only if it does not work meanwhile and somebody else can be asked.
3. A place that asks for patience (429, 503) is left alone for as long as it says, but for LONGEST_REST seconds at most,
   and is otherwise well.
4. Among the rest the one is asked that has the longest beginning of the prompt, unless it has much more to do than
   the one that has the least to do: then that one. What it has to do is counted in requests per weight.
5. Of places with equally much to do, the one that has had the least, in the long run and by weight.
"""

import math
from collections.abc import Callable, Collection, Sequence

import msgspec

from dragoman.engines.upstream.prefix_index import Beginnings

FAILURES = 3
OUT_SECONDS = 1.0
LONGEST_OUT = 30.0
LONGEST_REST = 60.0
RECENT_SECONDS = 30.0
"""Whoever has answered in that time is there, however slow it is otherwise."""
SLACK = 4.0
"""So many more requests than the least busy may a place have, and still be asked for the sake of what it remembers;"""
SLACK_SHARE = 0.5
"""or so much more in proportion, where all have a lot."""
LEAST_LINKS = 1

Clock = Callable[[], float]


class Spot:
    """What is known of one place."""

    def __init__(self, weight: float = 1.0, rank: int = 0) -> None:
        self.weight = weight
        self.rank = rank
        self.running = 0
        self.telling = 0
        """Of those that run, how many have begun to answer."""
        self.worked_at = -math.inf
        self.failures = 0
        self.slow_looks = 0
        self.outs = 0
        """How often in a row it was sent out, or tried and not yet back,"""
        self.out_until = 0.0
        self.rests_until = 0.0
        self.unreached = False
        """and whether because nobody answered."""
        self.is_drained = False
        self.life = 0
        self.had = 0.0
        """Requests per weight so far; whoever comes back does not catch up."""

    @property
    def load(self) -> float:
        return self.running / self.weight

    def is_open(self, now: float) -> bool:
        """Whether it can be asked."""
        if self.is_drained or now < self.rests_until:
            return False
        return not self.outs or now >= self.out_until

    def send_out(self, now: float) -> None:
        self.out_until = now + min(OUT_SECONDS * 2.0 ** min(self.outs, 10), LONGEST_OUT)
        self.outs += 1


class PlaceState(msgspec.Struct, frozen=True):
    """A place as the operator sees it."""

    url: str
    state: str
    running: int
    failures: int
    weight: float
    rank: int


class Pool:
    def __init__(self, spots: Sequence[Spot], clock: Clock, beginnings: Beginnings | None = None) -> None:
        self.spots = list(spots)
        self._clock = clock
        self._beginnings = Beginnings() if beginnings is None else beginnings

    def choose(self, links: Sequence[bytes] = (), without: Collection[int] = ()) -> int | None:
        """The place for a request, which is counted there from now on; None where nobody can be asked."""
        chosen = self.preferred(links, without)
        if chosen is not None:
            self.take(chosen, links)
        return chosen

    def preferred(self, links: Sequence[bytes] = (), without: Collection[int] = ()) -> int | None:
        """The same without counting it."""
        now = self._clock()
        fit = [at for at, spot in enumerate(self.spots) if at not in without and spot.is_open(now)]
        if not fit:
            return None
        rank = min(self.spots[at].rank for at in fit)
        return self._best([at for at in fit if self.spots[at].rank == rank], links)

    def take(self, at: int, links: Sequence[bytes] = ()) -> None:
        """A request is there from now on."""
        spot = self.spots[at]
        spot.running += 1
        spot.had += 1 / spot.weight
        if spot.outs:
            # This one tries; until that is decided, or takes too long, nobody else does.
            spot.send_out(self._clock())
        self._beginnings.note(links, at, spot.life)

    def _best(self, fit: Sequence[int], links: Sequence[bytes]) -> int:
        least = min(fit, key=self._business)
        if len(fit) == 1 or not links:
            return least
        holders, count = self._beginnings.longest(links, {at: self.spots[at].life for at in fit})
        if count < LEAST_LINKS:
            return least
        holder = min(holders, key=self._business)
        lowest = self.spots[least].load
        return holder if self.spots[holder].load <= lowest + max(SLACK, lowest * SLACK_SHARE) else least

    def _business(self, at: int) -> tuple[float, float]:
        return self.spots[at].load, self.spots[at].had

    def ended(self, at: int, begun: bool = False) -> None:
        """A request is no longer there, whatever came of it."""
        self.spots[at].running -= 1
        self.spots[at].telling -= begun

    def begun(self, at: int) -> None:
        """It answers as it should, and has more to say."""
        self.spots[at].telling += 1
        self.worked(at)

    def worked(self, at: int) -> None:
        """It has answered as it should."""
        spot = self.spots[at]
        spot.failures = spot.slow_looks = 0
        spot.worked_at = self._clock()
        if spot.outs:
            self._back(spot)

    def failed(self, at: int, unreached: bool) -> None:
        spot = self.spots[at]
        spot.failures += 1
        if not unreached and spot.failures < FAILURES and not spot.outs:
            return
        now = self._clock()
        # Several requests that go down together are one failure; so are a trial and what comes of it.
        if now >= spot.out_until:
            spot.send_out(now)
        spot.unreached = unreached

    def rests(self, at: int, seconds: float) -> None:
        spot = self.spots[at]
        spot.rests_until = max(spot.rests_until, self._clock() + min(seconds, LONGEST_REST))

    def seen(self, at: int) -> None:
        """It answers when it is looked at: it is back, if that was what was wrong."""
        spot = self.spots[at]
        spot.slow_looks = 0
        if spot.outs and spot.unreached:
            spot.failures = 0
            self._back(spot)

    def slow(self, at: int) -> None:
        """It was looked at, and did not answer in time."""
        spot, now = self.spots[at], self._clock()
        spot.slow_looks += 1
        works = spot.telling > 0 or now - spot.worked_at < RECENT_SECONDS
        others = any(other is not spot and other.is_open(now) for other in self.spots)
        if spot.slow_looks >= FAILURES and others and not works:
            self.failed(at, unreached=True)

    def drain(self, at: int, drained: bool) -> None:
        """What is running there goes on; nothing new comes."""
        self.spots[at].is_drained = drained

    def renew(self, at: int) -> None:
        """Somebody else is there now, of whom nothing is known."""
        self.drain(at, drained=False)
        self._back(self.spots[at])

    def wait(self) -> float:
        """Seconds until somebody can be asked again, as far as that can be told."""
        now = self._clock()
        waits = [max(spot.out_until if spot.outs else 0, spot.rests_until) - now for spot in self.spots]
        open_again = [wait for wait, spot in zip(waits, self.spots, strict=True) if not spot.is_drained]
        return max(1.0, min(open_again, default=LONGEST_OUT))

    @property
    def is_away(self) -> bool:
        """Whether all are out, and this is known of more than one, or for longer than just now."""
        return all(spot.outs for spot in self.spots) and sum(spot.outs for spot in self.spots) > 1

    def state(self, at: int) -> str:
        spot, now = self.spots[at], self._clock()
        if spot.is_drained:
            return "draining" if spot.running else "drained"
        if spot.outs:
            return "out"
        return "resting" if now < spot.rests_until else "up"

    def _back(self, spot: Spot) -> None:
        spot.outs = 0
        spot.out_until = 0.0
        spot.life += 1
        others = [other.had for other in self.spots if other is not spot and not other.outs]
        spot.had = max(spot.had, min(others, default=0.0))
