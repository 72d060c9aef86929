"""The scheduler against a memory that is only lists of tokens: whatever happens in whatever order, a job sees its own
prompt and its own tokens, and nothing else."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dragoman.engines.llama.scheduler import MAX_PROMPT_OUTPUTS, Chunk, Copy, Job, Plan, Scheduler, share


class Memory:
    """What the sequences of a decoder hold; carries plans out and checks what llama.cpp would not forgive."""

    def __init__(self, slots: int) -> None:
        self.sequences: list[list[int]] = [[] for _ in range(slots)]

    def prepare(self, plan: Plan) -> None:
        for sequence in plan.clears:
            self.sequences[sequence] = []
        for copy in plan.copies:
            assert not self.sequences[copy.target], "a copy goes into an empty sequence"
            self.sequences[copy.target] = list(self.sequences[copy.source])
        for trim in plan.trims:
            assert len(self.sequences[trim.sequence]) >= trim.length
            del self.sequences[trim.sequence][trim.length :]

    def decode(self, chunk: Chunk) -> None:
        assert len(self.sequences[chunk.sequence]) == chunk.start, "no gap, no repetition"
        self.sequences[chunk.sequence].extend(chunk.tokens)


class World:
    """A scheduler, its memory, and what each job must have seen by now."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.scheduler = Scheduler(slots)
        self.memory = Memory(slots)
        self.jobs: dict[int, Job] = {}
        self.limits: dict[int, int] = {}
        self.replies: dict[int, list[int]] = {}
        self.rows: dict[int, int] = {}
        self.ended: set[int] = set()

    def add(self, prompt: tuple[int, ...], limit: int, prompt_outputs: bool) -> None:
        job = Job(len(self.jobs), prompt, prompt_outputs)
        self.jobs[job.id], self.limits[job.id] = job, limit
        self.replies[job.id], self.rows[job.id] = [], 0
        self.scheduler.add(job)

    def end(self, job: int) -> None:
        self.ended.add(job)
        self.scheduler.end(job)

    def step(self, budget: int, failing: frozenset[int] = frozenset()) -> None:
        due = {job for job, reply in self.replies.items() if reply and job not in self.ended}
        plan = self.scheduler.plan(budget)
        self.check(plan, budget, due)
        self.memory.prepare(plan)
        for chunk in plan.chunks:
            if chunk.job in failing:
                self.memory.sequences[chunk.sequence].append(-1)
                self.end(chunk.job)
            else:
                self.memory.decode(chunk)
                self.scheduler.decoded(chunk)
                self.read(chunk)

    def check(self, plan: Plan, budget: int, due: set[int]) -> None:
        assert len({chunk.sequence for chunk in plan.chunks}) == len(plan.chunks)
        assert not {chunk.job for chunk in plan.chunks} & self.ended
        prefill = [chunk for chunk in plan.chunks if not self.replies[chunk.job]]
        assert plan.prefill_rows == sum(len(chunk.tokens) for chunk in prefill) <= budget
        outputs = [chunk.outputs for chunk in prefill if self.jobs[chunk.job].prompt_outputs]
        assert sum(outputs) <= MAX_PROMPT_OUTPUTS
        assert {chunk.job for chunk in plan.chunks if self.replies[chunk.job]} == due

    def read(self, chunk: Chunk) -> None:
        job, reply = self.jobs[chunk.job], self.replies[chunk.job]
        seen = self.memory.sequences[chunk.sequence]
        assert seen == [*job.prompt, *reply][: len(seen)]
        self.rows[job.id] += len(chunk.tokens)
        complete = len(seen) >= len(job.prompt)
        assert chunk.outputs == (len(chunk.tokens) if job.prompt_outputs and not reply else int(complete))
        if not complete:
            return
        if not reply:
            shared = self.scheduler.shared(job.id)
            assert self.scheduler.prompt_done(job.id)
            assert self.rows[job.id] + shared == len(job.prompt)
            assert not (job.prompt_outputs and shared)
        if len(reply) == self.limits[job.id]:
            self.end(job.id)
        else:
            reply.append(1000 * (job.id + 1) + len(reply))
            self.scheduler.sampled(job.id, reply[-1])

    def finish(self) -> None:
        for _ in range(10_000):
            if self.scheduler.idle:
                break
            self.step(7)
        assert self.scheduler.idle
        assert self.ended == set(self.jobs)
        self.memory.prepare(self.scheduler.plan(1))
        assert sorted(self.scheduler.free) == list(range(self.slots))
        assert not any(self.memory.sequences)
        assert not self.scheduler.leaders


PROMPTS = st.one_of(
    st.sampled_from([(1,), (1, 2), (1, 2, 3), tuple(range(20)), tuple(range(90)), tuple(range(200))]),
    st.lists(st.integers(0, 3), min_size=1, max_size=30).map(tuple),
)
ADD = st.tuples(st.just("add"), PROMPTS, st.integers(0, 6), st.booleans() | st.just(False))
END = st.tuples(st.just("end"), st.integers(0, 30))
STEP = st.tuples(st.just("step"), st.integers(1, 150), st.frozensets(st.integers(0, 30), max_size=2))
CALM = st.tuples(st.just("step"), st.integers(1, 150), st.frozensets(st.integers(), max_size=0))


@settings(max_examples=400, deadline=None)
@given(slots=st.integers(1, 5), happenings=st.lists(st.one_of(ADD, ADD, CALM, CALM, END, STEP), max_size=60))
def test_any_order_of_happenings(slots: int, happenings: list[tuple[object, ...]]) -> None:
    world = World(slots)
    for happening in happenings:
        match happening:
            case "add", tuple(prompt), int(limit), bool(prompt_outputs):
                world.add(prompt, limit, prompt_outputs)
            case "end", int(job) if job in world.jobs:
                world.end(job)
            case "step", int(budget), frozenset(failing):
                world.step(budget, failing)
    world.finish()


@given(wants=st.lists(st.integers(0, 500), max_size=12), budget=st.integers(1, 512))
def test_share_gives_out_all_that_is_wanted_and_no_more(wants: list[int], budget: int) -> None:
    given_out = share(wants, budget)
    assert all(got <= want for got, want in zip(given_out, wants, strict=True))
    assert sum(given_out) == min(budget, sum(wants))


def test_the_oldest_has_half_and_a_short_prompt_passes() -> None:
    assert share([1000, 1000, 10], 128) == [64, 54, 10]
    assert share([10, 1000], 128) == [10, 118]
    assert share([1000], 128) == [128]


def chunks_of(plan: Plan) -> list[tuple[int, int, int, int]]:
    return [(chunk.job, chunk.start, len(chunk.tokens), chunk.outputs) for chunk in plan.chunks]


def settle(scheduler: Scheduler, plan: Plan) -> None:
    for chunk in plan.chunks:
        scheduler.decoded(chunk)


def test_followers_copy_the_leader_and_decode_the_last_token() -> None:
    scheduler = Scheduler(3)
    prompt = tuple(range(100))
    for job in range(3):
        scheduler.add(Job(job, prompt))
    first = scheduler.plan(64)
    assert chunks_of(first) == [(0, 0, 64, 0)]
    settle(scheduler, first)
    second = scheduler.plan(64)
    assert chunks_of(second) == [(0, 64, 36, 1)]
    settle(scheduler, second)
    scheduler.sampled(0, 7)
    third = scheduler.plan(64)
    assert third.copies == (Copy(0, 1), Copy(0, 2))
    assert [(trim.sequence, trim.length) for trim in third.trims] == [(1, 99), (2, 99)]
    assert chunks_of(third) == [(0, 100, 1, 1), (1, 99, 1, 1), (2, 99, 1, 1)]
    assert [scheduler.shared(job) for job in range(3)] == [0, 99, 99]


def test_a_leader_that_is_cancelled_leaves_its_work_to_a_follower() -> None:
    scheduler = Scheduler(2)
    for job in range(2):
        scheduler.add(Job(job, tuple(range(100))))
    settle(scheduler, scheduler.plan(64))
    scheduler.end(0)
    plan = scheduler.plan(64)
    assert chunks_of(plan) == [(1, 64, 36, 1)]
    assert plan.chunks[0].sequence == 0
    assert not plan.clears


def test_a_sequence_that_is_left_twice_before_a_plan_is_still_trimmed() -> None:
    scheduler = Scheduler(3)
    for job in range(3):
        scheduler.add(Job(job, (1, 2, 3)))
    settle(scheduler, scheduler.plan(64))
    scheduler.end(0)
    scheduler.end(1)
    plan = scheduler.plan(64)
    assert [(trim.sequence, trim.length) for trim in plan.trims] == [(0, 2)]
    assert chunks_of(plan) == [(2, 2, 1, 1)]


def test_a_leader_whose_decode_failed_leaves_nothing() -> None:
    scheduler = Scheduler(2)
    for job in range(2):
        scheduler.add(Job(job, tuple(range(100))))
    scheduler.plan(64)
    scheduler.end(0)
    plan = scheduler.plan(64)
    assert plan.clears == (0,)
    assert chunks_of(plan) == [(1, 0, 64, 0)]


def test_a_waiting_job_takes_the_sequence_that_becomes_free() -> None:
    scheduler = Scheduler(1)
    scheduler.add(Job(0, (1, 2, 3)))
    scheduler.add(Job(1, (4, 5)))
    settle(scheduler, scheduler.plan(64))
    scheduler.sampled(0, 9)
    assert chunks_of(scheduler.plan(64)) == [(0, 3, 1, 1)]
    scheduler.end(0)
    plan = scheduler.plan(64)
    assert plan.clears == (0,)
    assert chunks_of(plan) == [(1, 0, 2, 1)]


def test_without_sharing_everybody_prefills() -> None:
    scheduler = Scheduler(2, sharing=False)
    for job in range(2):
        scheduler.add(Job(job, (1, 2, 3)))
    assert chunks_of(scheduler.plan(64)) == [(0, 0, 3, 1), (1, 0, 3, 1)]


def test_a_plan_must_be_answered() -> None:
    scheduler = Scheduler(1)
    scheduler.add(Job(0, (1, 2, 3)))
    scheduler.plan(64)
    with pytest.raises(RuntimeError, match="not been heard of"):
        scheduler.plan(64)
