"""Selects the server for a request, without I/O. Servers are identified by their index.

Rules
1. Only available servers are chosen: not drained, not suspended, not tried before by this request. Of these, only the
   servers of the lowest rank.
2. A server is suspended ("out") after MAX_FAILURES consecutive failures, or at once if it is unreachable: for one
   second, then for twice as long each time. Then one request is let through, and its result decides.
   An unreachable server is restored earlier, as soon as it answers a probe.
   A server that answers probes too slowly is suspended after MAX_FAILURES consecutive slow probes, but only if it has
   not answered requests in the meantime and another server is available.
3. A server that answers 429 or 503 is paused for the time it asks for, at most MAX_PAUSE_SECONDS.
4. The server with the longest known prefix of the prompt is chosen, unless its load is much higher than the lowest
   load; then the least loaded server is chosen. Load is the number of running requests divided by the weight.
5. Among equally loaded servers, the one that has had the fewest requests per weight is chosen.
"""

import math
from collections.abc import Callable, Collection, Sequence

import msgspec

from dragoman.engines.upstream.prefix_index import PrefixIndex

MAX_FAILURES = 3
FIRST_SUSPENSION_SECONDS = 1.0
MAX_SUSPENSION_SECONDS = 30.0
MAX_PAUSE_SECONDS = 60.0
RECENT_SECONDS = 30.0
"""A server that answered a request within this time is not suspended for slow probes."""
SLACK = 4.0
"""A server with a known prefix may exceed the lowest load by this number of requests,"""
SLACK_SHARE = 0.5
"""or by this fraction of the lowest load."""

Clock = Callable[[], float]


class PoolMember:
    """State of one server in the pool."""

    def __init__(self, weight: float = 1.0, rank: int = 0) -> None:
        self.weight = weight
        self.rank = rank
        self.running = 0
        self.streaming = 0
        """Number of running requests whose reply has begun."""
        self.succeeded_at = -math.inf
        self.failures = 0
        self.slow_probes = 0
        self.suspensions = 0
        """Number of consecutive suspensions; 0 means the server is not suspended."""
        self.suspended_until = 0.0
        self.paused_until = 0.0
        self.is_unreachable = False
        """Whether the current suspension is due to a failed connection."""
        self.is_drained = False
        self.generation = 0
        """Incremented when the server is restored: its prefix cache is then presumed lost."""
        self.served = 0.0
        """Requests per weight so far. A restored server does not catch up."""

    @property
    def load(self) -> float:
        return self.running / self.weight

    def is_available(self, now: float) -> bool:
        """Whether requests may be sent to the server."""
        if self.is_drained or now < self.paused_until:
            return False
        return not self.suspensions or now >= self.suspended_until

    def suspend(self, now: float) -> None:
        self.suspended_until = now + min(
            FIRST_SUSPENSION_SECONDS * 2.0 ** min(self.suspensions, 10), MAX_SUSPENSION_SECONDS
        )
        self.suspensions += 1


class UpstreamState(msgspec.Struct, frozen=True):
    """State of one server, as shown to the operator."""

    url: str
    state: str
    running: int
    failures: int
    weight: float
    rank: int


class ServerPool:
    def __init__(self, members: Sequence[PoolMember], clock: Clock, prefixes: PrefixIndex | None = None) -> None:
        self.members = list(members)
        self._clock = clock
        self._prefixes = PrefixIndex() if prefixes is None else prefixes

    def choose(self, links: Sequence[bytes] = (), without: Collection[int] = ()) -> int | None:
        """Choose a server and count the request there; None if no server is available."""
        chosen = self.find_preferred(links, without)
        if chosen is not None:
            self.take(chosen, links)
        return chosen

    def find_preferred(self, links: Sequence[bytes] = (), without: Collection[int] = ()) -> int | None:
        """Choose a server without counting the request."""
        now = self._clock()
        available = [at for at, spot in enumerate(self.members) if at not in without and spot.is_available(now)]
        if not available:
            return None
        rank = min(self.members[at].rank for at in available)
        return self._best([at for at in available if self.members[at].rank == rank], links)

    def take(self, at: int, links: Sequence[bytes] = ()) -> None:
        """Count a request as running on the server."""
        spot = self.members[at]
        spot.running += 1
        spot.served += 1 / spot.weight
        if spot.suspensions:
            # This request is the trial; no other is let through until it is decided or takes too long.
            spot.suspend(self._clock())
        self._prefixes.add(links, at, spot.generation)

    def _best(self, candidates: Sequence[int], links: Sequence[bytes]) -> int:
        least = min(candidates, key=self._load_order)
        if len(candidates) == 1 or not links:
            return least
        holders, count = self._prefixes.find_longest(links, {at: self.members[at].generation for at in candidates})
        if not count:
            return least
        holder = min(holders, key=self._load_order)
        lowest = self.members[least].load
        return holder if self.members[holder].load <= lowest + max(SLACK, lowest * SLACK_SHARE) else least

    def _load_order(self, at: int) -> tuple[float, float]:
        return self.members[at].load, self.members[at].served

    def ended(self, at: int, begun: bool = False) -> None:
        """Count a request as ended; `begun` is whether its reply had begun."""
        self.members[at].running -= 1
        self.members[at].streaming -= begun

    def record_reply_start(self, at: int) -> None:
        """Record that a reply has begun and continues."""
        self.members[at].streaming += 1
        self.record_success(at)

    def record_success(self, at: int) -> None:
        """Record a successful answer."""
        spot = self.members[at]
        spot.failures = spot.slow_probes = 0
        spot.succeeded_at = self._clock()
        if spot.suspensions:
            self._restore(spot)

    def record_failure(self, at: int, is_unreachable: bool) -> None:
        spot = self.members[at]
        spot.failures += 1
        if not is_unreachable and spot.failures < MAX_FAILURES and not spot.suspensions:
            return
        now = self._clock()
        # Requests that fail together count as one suspension.
        if now >= spot.suspended_until:
            spot.suspend(now)
        spot.is_unreachable = is_unreachable

    def pause(self, at: int, seconds: float) -> None:
        spot = self.members[at]
        spot.paused_until = max(spot.paused_until, self._clock() + min(seconds, MAX_PAUSE_SECONDS))

    def record_probe(self, at: int) -> None:
        """Record an answered probe; an unreachable server is restored."""
        spot = self.members[at]
        spot.slow_probes = 0
        if spot.suspensions and spot.is_unreachable:
            spot.failures = 0
            self._restore(spot)

    def record_slow_probe(self, at: int) -> None:
        """Record a probe that timed out."""
        spot, now = self.members[at], self._clock()
        spot.slow_probes += 1
        is_working = spot.streaming > 0 or now - spot.succeeded_at < RECENT_SECONDS
        has_others = any(other is not spot and other.is_available(now) for other in self.members)
        if spot.slow_probes >= MAX_FAILURES and has_others and not is_working:
            self.record_failure(at, is_unreachable=True)

    def drain(self, at: int, drained: bool) -> None:
        """Stop or resume sending requests to the server. Running requests continue."""
        self.members[at].is_drained = drained

    def reset_member(self, at: int) -> None:
        """Reset the state of a server that has been replaced."""
        self.drain(at, drained=False)
        self._restore(self.members[at])

    def seconds_until_available(self) -> float:
        """Estimate the seconds until a server is available."""
        now = self._clock()
        available_at = [
            max(spot.suspended_until if spot.suspensions else 0, spot.paused_until)
            for spot in self.members
            if not spot.is_drained
        ]
        return max(1.0, min(available_at) - now) if available_at else MAX_SUSPENSION_SECONDS

    @property
    def is_known_unreachable(self) -> bool:
        """Whether all servers are suspended, and not just one server for the first time."""
        return all(spot.suspensions for spot in self.members) and sum(spot.suspensions for spot in self.members) > 1

    def state(self, at: int) -> str:
        spot, now = self.members[at], self._clock()
        if spot.is_drained:
            return "draining" if spot.running else "drained"
        if spot.suspensions:
            return "out"
        return "resting" if now < spot.paused_until else "up"

    def _restore(self, spot: PoolMember) -> None:
        spot.suspensions = 0
        spot.suspended_until = 0.0
        spot.generation += 1
        others = [other.served for other in self.members if other is not spot and not other.suspensions]
        spot.served = max(spot.served, min(others, default=0.0))
