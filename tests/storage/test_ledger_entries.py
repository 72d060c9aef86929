"""The journal of the ledger, without a database."""

import msgspec
from hypothesis import example, given
from hypothesis import strategies as st

from dragoman.storage.ledger_entries import LOST, Entry, EntryGroup, Journal, plan_changes, plan_lost, sum_usage
from tests.storage.journal_steps import JournalRun, MemoryStore, steps

OPEN = Entry("req-1", "srv-1", 86400.0, None, "k1", "user:anna", "echo", None, 10, 0, 20, 0, 30)
CLOSED = msgspec.structs.replace(
    OPEN, closed=86401.0, status=200, prompt=5, cached=1, completion=6, reasoning=2, cost=9
)


@given(steps)
@example([("open", 0), ("take", 0), ("close", 0), ("fail after", 0)])
@example([("reserve", 0), ("close", 0), ("fail after", 0), ("take", 7), ("fail after", 0)])
@example([("open", 0), ("take", 0), ("write", 0), ("lose", 0), ("close", 0), ("kill", 0)])
def test_store_and_journal_agree_after_any_steps(made: list[tuple[str, int]]) -> None:
    run = JournalRun(MemoryStore())
    for name, number in made:
        run.step(name, number)
    run.finish()
    run.check()
    assert not len(run.journal)
    assert not any(run.journal.knows(name) for name in run.closed)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3)), max_size=30))
def test_full_journal_loses_only_ended_requests_and_counts_them(made: list[tuple[bool, int]]) -> None:
    journal, refused = Journal(most=3), 0
    for number, (is_new, name) in enumerate(made):
        entry = msgspec.structs.replace(CLOSED, id=f"new-{number}" if is_new else str(name))
        refused += not (journal.add if is_new else journal.put)(entry)
        assert len(journal) <= 3
    assert journal.lost == refused


def test_entry_that_is_known_is_accepted_by_a_full_journal() -> None:
    journal = Journal(most=1)
    assert journal.put(OPEN)
    assert not journal.put(msgspec.structs.replace(OPEN, id="req-2"))
    assert journal.lost == 0
    assert journal.put(CLOSED)
    group = journal.take(10)
    assert group == EntryGroup((CLOSED,))


def test_new_entries_that_fail_are_looked_up_at_the_next_try() -> None:
    journal = Journal()
    other = msgspec.structs.replace(CLOSED, opened=86500.0)
    assert journal.add(CLOSED)
    assert journal.add(other)
    group = journal.take(10)
    assert group == EntryGroup((CLOSED, other), is_new=True)
    journal.note_failed(group)
    again = journal.take(10)
    # A job ran twice: both entries are kept.
    second = msgspec.structs.replace(other, id="req-1.86500.0")
    assert again == EntryGroup((CLOSED, second), unknown_ids=frozenset({"req-1", second.id}))
    journal.note_written(again)
    assert not len(journal)


def test_entries_in_flight_are_not_taken_again() -> None:
    journal = Journal()
    journal.put(OPEN)
    group = journal.take(10)
    journal.put(CLOSED)
    assert group is not None
    assert journal.take(10) is None
    journal.note_written(group)
    assert journal.take(10) == EntryGroup((CLOSED,), open_ids=frozenset({"req-1"}))


def test_refused_and_dropped_entries_are_forgotten() -> None:
    journal = Journal()
    journal.refuse(journal.hold(OPEN))
    assert not journal.knows("req-1")
    assert journal.lost == 0
    journal.put(CLOSED)
    group = journal.take(1)
    assert group is not None
    journal.drop(group)
    assert (journal.lost, journal.knows("req-1"), journal.take(1)) == (1, False, None)


def test_group_is_split_into_its_entries() -> None:
    other = msgspec.structs.replace(CLOSED, id="req-2")
    group = EntryGroup((CLOSED, other), frozenset({"req-1"}), frozenset({"req-2"}))
    assert group.split() == [
        EntryGroup((CLOSED,), open_ids=frozenset({"req-1"})),
        EntryGroup((other,), unknown_ids=frozenset({"req-2"})),
    ]


def test_entry_that_the_database_closed_is_not_changed() -> None:
    for group in (EntryGroup((CLOSED,), unknown_ids=frozenset({"req-1"})), EntryGroup((CLOSED,), frozenset({"req-1"}))):
        assert plan_changes(group, {"req-1": True}) == ([], [], {})
    assert plan_changes(EntryGroup((CLOSED,), frozenset({"req-1"})), {}) == ([], [], {})


def test_lost_entries_count_what_they_reserved() -> None:
    changes = plan_lost([OPEN], 90000.0)
    assert changes.closed == [msgspec.structs.replace(OPEN, closed=90000.0, status=LOST)]
    assert changes.usage == {(1, "k1", "user:anna", "echo"): [1, 10, 0, 20, 0, 30]}


def test_sums_are_by_the_day_on_which_a_request_began() -> None:
    late = msgspec.structs.replace(CLOSED, id="late", opened=86400.0 * 2 - 0.001, closed=86400.0 * 2 + 1)
    assert sum_usage([OPEN, CLOSED, late]) == {(1, "k1", "user:anna", "echo"): [2, 10, 2, 12, 4, 18]}
