"""Selects the server for a request, without I/O.

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

Prefixes of prompts are hashed in chains:

    chain := H(salt), H(link, block), H(link, block), …          block := BLOCK bytes of model, tools and messages

Prompts that share a prefix share the first links of their chains, one link per block. A server that has computed a
prompt has the KV cache of all its prefixes, until it is restored. Chains are salted with the principal, so that timing
reveals nothing about the requests of others. The index is bounded: the least recently used links are removed first.
"""

import hashlib
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Generic, TypeVar

import msgspec

from dragoman.core.request import GenerationRequest

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
BLOCK = 256
"""Bytes per block: about sixty tokens."""
MAX_BLOCKS = 2048
MAX_LINKS = 200_000
MAX_HOLDERS = 8
_encoder = msgspec.json.Encoder(order="deterministic")


def hash_prefixes(request: GenerationRequest) -> list[bytes]:
    """Return one hash per complete block of the prompt."""
    data = _encoder.encode((request.prompts, request.tools, request.messages))[: BLOCK * MAX_BLOCKS]
    link = hashlib.blake2b(_encoder.encode((request.principal, request.model)), digest_size=16).digest()
    links: list[bytes] = []
    for at in range(0, len(data) - BLOCK + 1, BLOCK):
        link = hashlib.blake2b(data[at : at + BLOCK], digest_size=16, key=link).digest()
        links.append(link)
    return links


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
        """Whether the operator has stopped new requests. Running requests continue."""
        self.generation = 0
        """Incremented when the server is restored: its prefix cache is then presumed lost."""
        self.served = 0.0
        """Requests per weight so far."""

    @property
    def load(self) -> float:
        return self.running / self.weight

    def is_available(self, now: float) -> bool:
        """Whether requests may be sent to the server."""
        if self.is_drained or now < self.paused_until:
            return False
        return not self.suspensions or now >= self.suspended_until

    def suspend(self, now: float) -> None:
        seconds = FIRST_SUSPENSION_SECONDS * 2.0 ** min(self.suspensions, 10)
        self.suspended_until = now + min(seconds, MAX_SUSPENSION_SECONDS)
        self.suspensions += 1


M = TypeVar("M", bound=PoolMember)


class PrefixIndex:
    """The servers that know each prefix, with their generation at that time."""

    def __init__(self, max_links: int) -> None:
        self._max_links = max_links
        self._holders: OrderedDict[bytes, dict[PoolMember, int]] = OrderedDict()
        """By link; the most recently used link is last."""

    def __len__(self) -> int:
        return len(self._holders)

    def add(self, links: Sequence[bytes], member: PoolMember) -> None:
        # In reverse order, so that the first links, which prompts share most often, are removed last.
        for link in reversed(links[: self._max_links]):
            holders = self._holders.pop(link, {})
            holders.pop(member, None)
            holders[member] = member.generation
            if len(holders) > MAX_HOLDERS:
                del holders[next(iter(holders))]
            self._holders[link] = holders
        while len(self._holders) > self._max_links:
            self._holders.popitem(last=False)

    def find_longest(self, links: Sequence[bytes], candidates: Collection[M]) -> list[M]:
        """Return the candidates with the longest known prefix."""
        for link in reversed(links):
            if holders := self._holders.get(link):
                found = [member for member in candidates if holders.get(member) == member.generation]
                if found:
                    return found
        return []


class UpstreamState(msgspec.Struct, frozen=True):
    """State of one server, as shown to the operator."""

    url: str
    state: str
    running: int
    failures: int
    weight: float
    rank: int


class ServerPool(Generic[M]):
    def __init__(
        self, members: Iterable[M], clock: Callable[[], float] = time.monotonic, max_links: int = MAX_LINKS
    ) -> None:
        self.members = list(members)
        self._clock = clock
        self._prefixes = PrefixIndex(max_links)

    def add(self, member: M) -> None:
        self.members.append(member)
        self._skip_missed_requests(member)

    def choose(self, links: Sequence[bytes] = (), without: Collection[M] = ()) -> M | None:
        """Choose a server and count the request there; None if no server is available."""
        chosen = self.find_preferred(links, without)
        if chosen is not None:
            self.take(chosen, links)
        return chosen

    def find_preferred(self, links: Sequence[bytes] = (), without: Collection[M] = ()) -> M | None:
        """Choose a server without counting the request."""
        now = self._clock()
        available = [member for member in self.members if member not in without and member.is_available(now)]
        if not available:
            return None
        rank = min(member.rank for member in available)
        candidates = [member for member in available if member.rank == rank]
        least = min(candidates, key=_load_order)
        holders = self._prefixes.find_longest(links, candidates) if len(candidates) > 1 else []
        holder = min(holders, key=_load_order, default=least)
        return holder if holder.load <= least.load + max(SLACK, least.load * SLACK_SHARE) else least

    def take(self, member: M, links: Sequence[bytes] = ()) -> None:
        """Count a request as running on the server."""
        member.running += 1
        member.served += 1 / member.weight
        if member.suspensions:
            # This request is the trial; no other is let through until it is decided or takes too long.
            member.suspend(self._clock())
        self._prefixes.add(links, member)

    def ended(self, member: M, begun: bool = False) -> None:
        """Count a request as ended; `begun` is whether its reply had begun."""
        member.running -= 1
        member.streaming -= begun

    def record_reply_start(self, member: M) -> None:
        """Record that a reply has begun and continues."""
        member.streaming += 1
        self.record_success(member)

    def record_success(self, member: M) -> None:
        """Record a successful answer."""
        member.failures = member.slow_probes = 0
        member.succeeded_at = self._clock()
        if member.suspensions:
            self._restore(member)

    def record_failure(self, member: M, is_unreachable: bool) -> None:
        member.failures += 1
        if not is_unreachable and member.failures < MAX_FAILURES and not member.suspensions:
            return
        now = self._clock()
        # Requests that fail together count as one suspension.
        if now >= member.suspended_until:
            member.suspend(now)
        member.is_unreachable = is_unreachable

    def pause(self, member: M, seconds: float) -> None:
        member.paused_until = max(member.paused_until, self._clock() + min(seconds, MAX_PAUSE_SECONDS))

    def record_probe(self, member: M) -> None:
        """Record an answered probe; an unreachable server is restored."""
        member.slow_probes = 0
        if member.suspensions and member.is_unreachable:
            member.failures = 0
            self._restore(member)

    def record_slow_probe(self, member: M) -> None:
        """Record a probe that timed out."""
        now = self._clock()
        member.slow_probes += 1
        is_working = member.streaming > 0 or now - member.succeeded_at < RECENT_SECONDS
        has_others = any(other is not member and other.is_available(now) for other in self.members)
        if member.slow_probes >= MAX_FAILURES and has_others and not is_working:
            self.record_failure(member, is_unreachable=True)

    def seconds_until_available(self) -> float:
        """Estimate the seconds until a server is available."""
        now = self._clock()
        available_at = [
            max(member.suspended_until if member.suspensions else 0, member.paused_until)
            for member in self.members
            if not member.is_drained
        ]
        return max(1.0, min(available_at) - now) if available_at else MAX_SUSPENSION_SECONDS

    @property
    def is_known_unreachable(self) -> bool:
        """Whether all servers are suspended, and not just one server for the first time."""
        return (
            all(member.suspensions for member in self.members)
            and sum(member.suspensions for member in self.members) > 1
        )

    def state(self, member: M) -> str:
        if member.is_drained:
            return "draining" if member.running else "drained"
        if member.suspensions:
            return "out"
        return "resting" if self._clock() < member.paused_until else "up"

    def _restore(self, member: M) -> None:
        member.suspensions = 0
        member.suspended_until = 0.0
        member.generation += 1
        self._skip_missed_requests(member)

    def _skip_missed_requests(self, member: M) -> None:
        """A new or restored server does not catch up with the requests that the others have had."""
        others = [other.served for other in self.members if other is not member and not other.suspensions]
        member.served = max(member.served, min(others, default=0.0))


def _load_order(member: PoolMember) -> tuple[float, float]:
    return member.load, member.served
