"""The entries of the ledger and how they are written: values and rules, without a database.

    entry := id of the request, owner, model, counts and cost of its tokens

    open     the counts are those that are reserved
    closed   the counts are those that were used; the status is that of the response, or `LOST`

Rules
1. An entry is opened once and closed once. What the database has closed is never changed.
2. An entry is written when it is opened and when it is closed; only once if it is closed before it is written.
3. If the result of a request is unknown, because its server or front end died, its entry is closed as `LOST` with the
   counts that were reserved.
4. After a write that failed it is unknown what the database has. It is looked up before the next try.
5. Entries wait while the database is not available. When too many wait, closed entries are lost, and counted in
   `Journal.lost`.
6. The sums of each day contain exactly the closed entries that were opened on it. They change in the same transaction.
"""

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import NamedTuple

import msgspec

from dragoman.protocols.usage import DAY

LOST = 0
"""The status of an entry whose server or front end died."""
MAX_WAITING = 100_000
MAX_TOKENS = 10**12
"""The most tokens that one entry counts: upstream servers may report any number, and sums must fit into 64 bits."""


class Entry(msgspec.Struct, frozen=True, gc=False):
    """A row of the ledger. The fields are its columns, in the same order."""

    id: str
    server: str
    opened: float
    closed: float | None
    key: str
    principal: str
    model: str
    status: int | None
    prompt: int
    cached: int
    completion: int
    reasoning: int
    cost: int

    def as_lost(self, now: float) -> "Entry":
        return msgspec.structs.replace(self, closed=now, status=LOST)


def clip_tokens(count: int) -> int:
    return max(0, min(count, MAX_TOKENS))


UsageKey = tuple[int, str, str, str]
"""Day, key, principal, model: the primary key of the table `usage`."""
UsageSums = list[int]
"""The other columns of the table: requests, prompt, cached, completion, reasoning, cost."""


class EntryGroup(NamedTuple):
    """Entries that are written in one transaction."""

    entries: tuple[Entry, ...]
    open_ids: frozenset[str] = frozenset()
    """Those that the database has as open, unless another server took this one for dead."""
    unknown_ids: frozenset[str] = frozenset()
    """Those that a write which failed may have written."""
    is_new: bool = False
    """Whether all are closed and this is the first try to write them."""

    def split(self) -> "list[EntryGroup]":
        """Each entry as a group of its own."""
        parts = ((entry, frozenset((entry.id,))) for entry in self.entries)
        return [EntryGroup((entry,), self.open_ids & ids, self.unknown_ids & ids, self.is_new) for entry, ids in parts]

    @property
    def looked_up(self) -> frozenset[str]:
        """The entries whose state in the database must be known before they are written."""
        return self.open_ids | self.unknown_ids


class Changes(NamedTuple):
    """What to write."""

    inserted: list[Entry]
    closed: list[Entry]
    """Entries that the database has as open."""
    usage: dict[UsageKey, UsageSums]


def plan_changes(group: EntryGroup, is_closed: Mapping[str, bool]) -> Changes:
    """`is_closed` says whether each `looked_up` entry that the database has is closed there."""
    looked_up = group.looked_up
    if not looked_up:
        return Changes(list(group.entries), [], sum_usage(group.entries))
    inserted, closed = [], []
    for entry in group.entries:
        if entry.id not in looked_up:
            inserted.append(entry)
        elif entry.id in is_closed:
            if entry.closed is not None and not is_closed[entry.id]:
                closed.append(entry)
        elif entry.id in group.unknown_ids:
            inserted.append(entry)
    return Changes(inserted, closed, sum_usage([*inserted, *closed]))


def plan_lost(entries: Iterable[Entry], now: float) -> Changes:
    """Close the open entries of servers that died."""
    lost = [entry.as_lost(now) for entry in entries]
    return Changes([], lost, sum_usage(lost))


def sum_usage(entries: Iterable[Entry]) -> dict[UsageKey, UsageSums]:
    """Sum the closed entries."""
    sums: dict[UsageKey, UsageSums] = {}
    for entry in entries:
        if entry.closed is None:
            continue
        at = int(entry.opened // DAY), entry.key, entry.principal, entry.model
        known = sums.get(at)
        if known is None:
            sums[at] = known = [0] * 6
        known[0] += 1
        known[1] += entry.prompt
        known[2] += entry.cached
        known[3] += entry.completion
        known[4] += entry.reasoning
        known[5] += entry.cost
    return sums


class Journal:
    """The entries of this server that the database does not have yet, or has as open."""

    def __init__(self, most: int = MAX_WAITING) -> None:
        self._most = most
        self._new: list[Entry] = []
        """Entries of requests that began and ended since the last write. Most are such, so they have a fast path."""
        self._waiting: dict[str, Entry] = {}
        """Oldest first, until they are written."""
        self._in_flight: set[str] = set()
        """Those that are being written now."""
        self._open: set[str] = set()
        """Those that the database has as open."""
        self._unknown: set[str] = set()
        self.lost = 0

    def __len__(self) -> int:
        return len(self._new) + len(self._waiting)

    def add(self, entry: Entry) -> bool:
        """Add a closed entry that was never put. False if too many wait."""
        if len(self._new) + len(self._waiting) >= self._most:
            self.lost += 1
            return False
        self._new.append(entry)
        return True

    def put(self, entry: Entry) -> bool:
        """Add an entry that was opened or closed. False if too many wait; a closed entry is lost then."""
        if len(self) >= self._most and not self.knows(entry.id):
            self.lost += entry.closed is not None
            return False
        self._waiting[entry.id] = entry
        return True

    def knows(self, entry_id: str) -> bool:
        """Whether an entry with this id is not closed in the database, or may not be."""
        return (
            entry_id in self._waiting
            or entry_id in self._open
            or entry_id in self._unknown
            or entry_id in self._in_flight
        )

    def take(self, most: int) -> EntryGroup | None:
        """Return waiting entries, to be written now. Then call `note_written`, `note_failed` or `drop`."""
        waiting = (entry for entry in self._waiting.values() if entry.id not in self._in_flight)
        if entries := tuple(islice(waiting, most)):
            ids = {entry.id for entry in entries}
            self._in_flight |= ids
            return EntryGroup(entries, frozenset(ids & self._open), frozenset(ids & self._unknown))
        if self._new:
            new, self._new = tuple(self._new[:most]), self._new[most:]
            return EntryGroup(new, is_new=True)
        return None

    def hold(self, entry: Entry) -> EntryGroup:
        """Return an entry that is written by itself, because it needs a reservation."""
        self._in_flight.add(entry.id)
        return EntryGroup((entry,))

    def note_written(self, group: EntryGroup) -> None:
        if group.is_new:
            return
        for entry in group.entries:
            self._in_flight.discard(entry.id)
            self._unknown.discard(entry.id)
            if entry.closed is None:
                self._open.add(entry.id)
            else:
                self._open.discard(entry.id)
            if self._waiting.get(entry.id) is entry:
                del self._waiting[entry.id]

    def note_failed(self, group: EntryGroup) -> None:
        """The entries wait for the next try."""
        for entry in group.entries:
            if group.is_new:
                # A job may have run twice with the same id.
                entry = (
                    msgspec.structs.replace(entry, id=f"{entry.id}.{entry.opened}") if self.knows(entry.id) else entry
                )
                self._waiting[entry.id] = entry
            self._in_flight.discard(entry.id)
            self._unknown.add(entry.id)

    def refuse(self, group: EntryGroup) -> None:
        """Forget an entry that has no reservation."""
        for entry in group.entries:
            self._forget(entry.id)

    def drop(self, group: EntryGroup) -> None:
        """Discard entries that the database does not accept."""
        for entry in group.entries:
            self.lost += entry.closed is not None
            if not group.is_new:
                self._forget(entry.id)

    def _forget(self, entry_id: str) -> None:
        for known in (self._in_flight, self._unknown, self._open):
            known.discard(entry_id)
        self._waiting.pop(entry_id, None)
