"""The states of batches and lines under random schedules of several servers, without a database."""

from dataclasses import dataclass, field

import msgspec
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from dragoman.core.events import Usage
from dragoman.protocols.batch_lines import LineState
from dragoman.protocols.batches import BatchState, InputError
from dragoman.storage import batch_states
from dragoman.storage.batch_states import (
    FAILED,
    MAX_FAILURES,
    MAX_PAUSE,
    MAX_REFUSALS,
    NOT_READY,
    StoredBatch,
    WrongState,
    next_step,
    retry_pause,
)

SERVERS = ("a", "b", "c")
SERVER, NUMBER = st.sampled_from(SERVERS), st.integers(0, 5)
WINDOW = 1000.0
FOLLOWING: dict[BatchState, set[BatchState]] = {
    "validating": {"in_progress", "finalizing", "cancelling"},
    "in_progress": {"finalizing", "cancelling"},
    "finalizing": {"completed", "failed", "expired"},
    "cancelling": {"cancelled"},
}
"""The states that may follow a state; none follows the others."""


def new_batch(**fields: object) -> StoredBatch:
    usual: dict[str, object] = {"created": 0.0, "expires": WINDOW, "state": "validating", "server": "a"}
    known: dict[str, object] = {
        "id": "batch_0",
        "api": "openai",
        "endpoint": "/v1/chat/completions",
        "principal": "ann",
    }
    return StoredBatch(**(known | usual | {"caller": b"", "source": "file-0", "digest": ""} | fields))  # type: ignore[arg-type]


@dataclass
class Server:
    """What a server believes: that it runs the batch, and which lines it has taken, with their tries."""

    batch: StoredBatch | None = None
    taken: dict[int, int] = field(default_factory=dict)


class Schedule(RuleBasedStateMachine):
    """The database is `batch` and `lines`; a server acts on what it has read, which may be old."""

    @initialize(good=st.integers(0, 5), bad=st.integers(0, 2))
    def create(self, good: int, bad: int) -> None:
        self.now = 0.0
        self.batch = new_batch()
        self.good, self.bad = good, bad
        self.lines: dict[int, tuple[LineState, str]] = {}
        self.servers = {name: Server() for name in SERVERS}
        self.alive = set(SERVERS)
        self.cancelled = False

    def change(self, after: StoredBatch) -> None:
        before, self.batch = self.batch, after
        assert after.state == before.state or after.state in FOLLOWING.get(before.state, set())

    def is_owner(self, name: str) -> bool:
        return name in self.alive and self.batch.server == name

    @rule(name=SERVER)
    def read(self, name: str) -> None:
        if self.is_owner(name):
            self.servers[name].batch = self.batch

    @rule(name=SERVER)
    def validate(self, name: str) -> None:
        if not self.is_owner(name) or next_step(self.batch) != "validate":
            return
        self.lines = dict.fromkeys(range(self.good), ("waiting", ""))
        self.lines |= {self.good + number: ("errored", "input") for number in range(self.bad)}
        errors = tuple(InputError("bad", "", number) for number in range(self.bad))
        self.change(batch_states.validated(self.batch, self.good + self.bad, errors, self.bad, self.now))

    @rule(name=SERVER, number=NUMBER)
    def take(self, name: str, number: int) -> None:
        """Take a line that waits. It may be taken by another server too, which lost the batch without noticing."""
        server = self.servers[name]
        may_run = name in self.alive and server.batch is not None and server.batch.server == name
        if may_run and self.lines.get(number) == ("waiting", ""):
            server.taken.setdefault(number, 0)

    @rule(name=SERVER, number=NUMBER, status=st.sampled_from([200, 200, 400, 429, 502, 503]))
    def answer(self, name: str, number: int, status: int) -> None:
        server = self.servers[name]
        if name not in self.alive or number not in server.taken:
            return
        server.taken[number] += 1
        if retry_pause(status, server.taken[number]) is not None:
            return
        del server.taken[number]
        state, _ = self.lines[number]
        result: LineState = "succeeded" if status == 200 else "errored"
        counted = batch_states.record(self.batch, state, name, result, Usage(prompt=2, completion=1, cached=1))
        if counted is not None:
            self.change(counted)
            self.lines[number] = result, name

    @rule()
    def cancel(self) -> None:
        if self.batch.has_ended:
            with pytest.raises(WrongState):
                batch_states.cancel(self.batch, self.now)
        else:
            self.cancelled = self.cancelled or self.batch.state in ("validating", "in_progress")
            self.change(batch_states.cancel(self.batch, self.now))

    @rule(seconds=st.floats(1, WINDOW / 2))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(name=SERVER)
    def finalize(self, name: str) -> None:
        if self.is_owner(name) and next_step(self.batch) == "run":
            self.change(batch_states.finalize(self.batch, self.now))

    @rule(name=SERVER)
    def write_results(self, name: str) -> None:
        if self.is_owner(name) and next_step(self.batch) == "write_results":
            self.change(batch_states.end(self.batch, "file-1", None, self.now))

    @rule(name=SERVER)
    def die(self, name: str) -> None:
        """kill -9, or so slow that the others take it for dead: then it goes on without knowing."""
        self.alive.discard(name)

    @rule(name=SERVER, forgets=st.booleans())
    def start(self, name: str, forgets: bool) -> None:
        if name not in self.alive:
            self.alive.add(name)
            if forgets:
                self.servers[name] = Server()

    @rule(name=SERVER)
    def take_over(self, name: str) -> None:
        if name in self.alive and not self.batch.has_ended and self.batch.server not in self.alive:
            # Only the column changes.
            self.change(msgspec.structs.replace(self.batch, server=name))

    @invariant()
    def counts_are_those_of_the_lines(self) -> None:
        states = [state for state, _ in self.lines.values()]
        batch = self.batch
        if batch.is_validated:
            assert (batch.total, batch.succeeded) == (len(states), states.count("succeeded"))
            assert (batch.errored, batch.waiting) == (states.count("errored"), states.count("waiting"))
            ran = batch.succeeded + batch.errored - self.bad
            assert (batch.prompt, batch.completion, batch.cached) == (2 * ran, ran, ran)

    @invariant()
    def an_ended_batch_has_the_state_of_its_lines(self) -> None:
        batch = self.batch
        if not batch.has_ended:
            return
        assert next_step(batch) is None
        assert batch.server is None
        assert (batch.state == "cancelled") == self.cancelled
        if batch.state == "completed":
            assert batch.waiting == 0 < self.good
        if batch.state == "failed":
            assert self.good == 0
        if batch.state == "expired":
            assert batch.waiting
            assert self.now >= batch.expires

    def teardown(self) -> None:
        """Every batch ends, whatever happened, if one server lives: no line waits for ever."""
        if not hasattr(self, "batch"):
            return
        self.alive = {"a"}
        self.servers["a"] = Server()
        self.take_over("a")
        self.validate("a")
        for number in list(self.lines):
            self.read("a")
            if next_step(self.batch) == "run":
                self.take("a", number)
                self.answer("a", number, 200)
        self.finalize("a")
        self.write_results("a")
        assert self.batch.has_ended
        self.an_ended_batch_has_the_state_of_its_lines()
        self.counts_are_those_of_the_lines()


TestSchedule = Schedule.TestCase
"""Runs the schedules."""


def running(**fields: object) -> StoredBatch:
    return batch_states.validated(new_batch(), 3, (), 1, now=1.0) if not fields else new_batch(**fields)


def test_result_of_a_line_is_recorded_once_and_only_by_the_server_of_the_batch() -> None:
    batch = running()
    recorded = batch_states.record(batch, "waiting", "a", "succeeded", Usage(prompt=3))
    assert recorded is not None
    assert (recorded.succeeded, recorded.errored, recorded.prompt) == (1, 1, 3)
    assert batch_states.record(recorded, "succeeded", "a", "errored", Usage()) is None
    assert batch_states.record(recorded, "waiting", "b", "succeeded", Usage()) is None


def test_batch_expires_only_if_lines_wait() -> None:
    batch = running()
    assert batch_states.finalize(batch, WINDOW - 1) is batch
    assert batch_states.finalize(batch, WINDOW).outcome == "expired"
    for _ in range(2):
        answered = batch_states.record(batch, "waiting", "a", "succeeded", Usage())
        assert answered is not None
        batch = answered
    assert batch_states.finalize(batch, WINDOW).outcome == "completed"


def test_batch_that_is_cancelled_before_its_validation_is_validated_for_its_results() -> None:
    batch = batch_states.cancel(new_batch(), now=1.0)
    assert next_step(batch) == "validate"
    batch = batch_states.validated(batch, 3, (), 0, now=2.0)
    assert (batch.state, next_step(batch)) == ("cancelling", "write_results")
    with pytest.raises(WrongState):
        batch_states.validated(batch, 3, (), 0, now=2.0)


@pytest.mark.parametrize("status", [200, 400, 401, 403, 404, 413, 422, 500, 501])
def test_other_answers_are_final(status: int) -> None:
    assert retry_pause(status, 1) is None


@pytest.mark.parametrize(("statuses", "most"), [(NOT_READY, MAX_REFUSALS), (FAILED, MAX_FAILURES)])
def test_transient_failures_are_retried_with_growing_pauses(statuses: frozenset[int], most: int) -> None:
    for status in statuses:
        pauses = [retry_pause(status, tries) for tries in range(1, most + 1)]
        assert pauses[-1] is None
        assert pauses[:-1] == sorted(pause for pause in pauses if pause is not None)
        assert max(pauses[:-1]) <= MAX_PAUSE  # type: ignore[type-var, operator]
        assert retry_pause(status, 1, wanted=7) == 7
        assert retry_pause(status, 1, wanted=7000) == MAX_PAUSE
