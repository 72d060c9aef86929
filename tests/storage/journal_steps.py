"""Runs a `Journal` through random steps, on any store, and checks that store and journal agree afterwards.

step := open | reserve | close | take          of the server
      | short                                  a request that begins and ends before anything is written
      | write                                  the oldest group in flight is written, and the journal is told so
      | fail before | fail after               the same, but the journal is told of a failure; `after` wrote it
      | lose                                   another server takes this one for dead
      | kill                                   the server is killed and starts again
"""

from collections import deque
from collections.abc import Callable
from typing import Protocol

from hypothesis import strategies as st

from dragoman.storage.ledger_entries import (
    LOST,
    Entry,
    EntryGroup,
    Journal,
    UsageKey,
    UsageSums,
    plan_changes,
    plan_lost,
    sum_usage,
)

STEPS = ("open", "reserve", "close", "short", "take", "write", "fail before", "fail after", "lose", "kill")
steps = st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 7)), max_size=60)
"""Steps, and numbers that choose an entry or a size."""
RESERVED = 100
DAYS = (0.5, 86400.5)


class Store(Protocol):
    def write(self, group: EntryGroup) -> None: ...

    def reserve(self, entry: Entry) -> None: ...

    def close_lost(self, server: str) -> None:
        """Close the open entries of a server that died."""

    def entries(self) -> list[Entry]: ...

    def sums(self) -> dict[UsageKey, UsageSums]: ...


class MemoryStore:
    """What `ledger_sql` does in a database."""

    def __init__(self) -> None:
        self._rows: list[Entry] = []
        self._sums: dict[UsageKey, UsageSums] = {}

    def write(self, group: EntryGroup) -> None:
        ids = group.looked_up
        server = group.entries[0].server
        found = {row.id: row.closed is not None for row in self._rows if row.id in ids and row.server == server}
        # Like the database: entries that are known to be open are looked up among the open ones only.
        found = {name: closed for name, closed in found.items() if name in group.unknown_ids or not closed}
        changes = plan_changes(group, found)
        self._rows += changes.inserted
        self._replace(changes.closed)
        self._add(changes.usage)

    def reserve(self, entry: Entry) -> None:
        self._rows.append(entry)

    def close_lost(self, server: str) -> None:
        changes = plan_lost([row for row in self._rows if row.closed is None and row.server == server], 9.0)
        self._replace(changes.closed)
        self._add(changes.usage)

    def entries(self) -> list[Entry]:
        return self._rows

    def sums(self) -> dict[UsageKey, UsageSums]:
        return self._sums

    def _replace(self, closed: list[Entry]) -> None:
        by_id = {(entry.id, entry.server): entry for entry in closed}
        self._rows = [row if row.closed is not None else by_id.get((row.id, row.server), row) for row in self._rows]

    def _add(self, usage: dict[UsageKey, UsageSums]) -> None:
        for key, added in usage.items():
            known = self._sums.get(key, [0] * len(added))
            self._sums[key] = [old + new for old, new in zip(known, added, strict=True)]


class JournalRun:
    """A server with a journal. `acknowledged` are entries that a killed server had told to be written."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.journal = Journal()
        self.server = "srv-0"
        self.count = 0
        self.running: dict[str, Entry] = {}
        self.closed: dict[str, Entry] = {}
        self.acknowledged: dict[str, Entry] = {}
        self.may_be_lost: set[str] = set()
        """Entries that another server may have closed."""
        self.may_be_missing: set[str] = set()
        """Entries of which a killed server had not been told that they are written."""
        self.in_flight: deque[tuple[EntryGroup, bool]] = deque()
        """Groups, and whether they are reservations."""

    def step(self, name: str, number: int) -> None:
        if name in ("open", "reserve"):
            self._open(number, has_reservation=name == "reserve")
        elif name == "close" and self.running:
            self._close(sorted(self.running)[number % len(self.running)])
        elif name == "short":
            self._open(number, is_put=False)
        elif name == "take":
            group = self.journal.take(number + 1)
            if group is not None:
                self.in_flight.append((group, False))
        elif name in ("write", "fail before", "fail after") and self.in_flight:
            self._end_write(is_written=name != "fail before", is_told=name == "write")
        elif name == "lose":
            self.may_be_lost |= self.running.keys() | self.closed.keys() - self.acknowledged.keys()
            self.store.close_lost(self.server)
        elif name == "kill":
            self._kill()

    def finish(self) -> None:
        """Everything ends and is written."""
        for name in list(self.running):
            self._close(name)
        while self.in_flight or len(self.journal):
            self.step("take", 1000)
            self.step("write", 0)

    def check(self) -> None:
        entries = self.store.entries()
        by_id = {entry.id: entry for entry in entries}
        assert len(by_id) == len(entries)
        assert self.store.sums() == sum_usage(entries)
        assert all(entry.closed is not None for entry in entries)
        assert self.closed.keys() - by_id.keys() <= self.may_be_missing
        for name, entry in by_id.items():
            if entry.status == LOST:
                assert name in self.may_be_lost
                assert entry.prompt == RESERVED
            else:
                assert entry == self.closed[name]
        for name, entry in self.acknowledged.items():
            assert by_id[name] == entry or by_id[name].status == LOST

    def _open(self, number: int, *, has_reservation: bool = False, is_put: bool = True) -> None:
        self.count += 1
        name = f"req-{self.count}"
        owner = ("", f"user:{number % 2}", "model")
        opened = DAYS[number % len(DAYS)] + self.count
        entry = Entry(name, self.server, opened, None, *owner, None, RESERVED, 0, RESERVED, 0, 7)
        self.running[name] = entry
        if has_reservation:
            self.in_flight.append((self.journal.hold(entry), True))
        elif is_put:
            assert self.journal.put(entry)
        else:
            self._close(name, self.journal.add)

    def _close(self, name: str, put: Callable[[Entry], bool] | None = None) -> None:
        entry = self.running.pop(name)
        values = (entry.id, entry.server, entry.opened, entry.opened + 1, entry.key, entry.principal, "answered", 200)
        self.closed[name] = ended = Entry(*values, 3, 1, 4, 2, 5)
        assert (put or self.journal.put)(ended)

    def _end_write(self, *, is_written: bool, is_told: bool) -> None:
        group, is_reservation = self.in_flight.popleft()
        if is_written:
            if is_reservation:
                self.store.reserve(group.entries[0])
            else:
                self.store.write(group)
        if is_told:
            self.journal.note_written(group)
            self.acknowledged |= {entry.id: entry for entry in group.entries if entry.closed is not None}
        else:
            self.journal.note_failed(group)

    def _kill(self) -> None:
        unsettled = self.running.keys() | (self.closed.keys() - self.acknowledged.keys())
        self.may_be_lost |= unsettled
        self.may_be_missing |= unsettled
        self.closed |= self.running
        self.running.clear()
        self.in_flight.clear()
        self.journal = Journal()
        self.store.close_lost(self.server)
        self.server = f"srv-{self.count}-{len(self.may_be_lost)}"
