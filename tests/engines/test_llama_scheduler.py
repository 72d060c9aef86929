"""The scheduler against a memory that is only lists of tokens: whatever happens in whatever order, a job sees its own
prompt and its own tokens, and nothing else."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dragoman.engines.llama.pins import Pin
from dragoman.engines.llama.radix import Prefixes, _Node
from dragoman.engines.llama.scheduler import MAX_PROMPT_OUTPUTS, Chunk, Job, Plan, Scheduler, share, share_between
from dragoman.engines.llama.sequences import WORTH, Clear, Copy, Trim

SCHEDULES = 10_000
WRONG = 77
Cell = tuple[int, str]
"""A token, and the principal whose job computed it."""


class Memory:
    """What the sequences of a decoder hold; carries plans out and checks what llama.cpp would not forgive."""

    def __init__(self, sequences: int) -> None:
        self.sequences: list[list[Cell]] = [[] for _ in range(sequences)]

    def prepare(self, plan: Plan) -> None:
        for effect in plan.effects:
            if isinstance(effect, Clear):
                self.sequences[effect.sequence] = []
            elif isinstance(effect, Copy):
                assert not self.sequences[effect.target], "a copy goes into an empty sequence"
                self.sequences[effect.target] = list(self.sequences[effect.source])
            else:
                assert len(self.sequences[effect.sequence]) >= effect.length
                del self.sequences[effect.sequence][effect.length :]

    def decode(self, chunk: Chunk, principal: str) -> None:
        assert len(self.sequences[chunk.sequence]) == chunk.start, "no gap, no repetition"
        self.sequences[chunk.sequence].extend((token, principal) for token in chunk.tokens)

    def tokens(self, sequence: int) -> list[int]:
        return [token for token, _ in self.sequences[sequence]]


def text(tree: Prefixes, holder: int) -> list[int]:
    tokens: list[int] = []
    node: _Node | None = tree.ends[holder]
    while node is not None:
        tokens = node.edge + tokens
        node = node.parent
    return tokens


class World:
    """A scheduler, its memory, and what each job must have seen by now."""

    def __init__(self, slots: int, cached: int = 0, *, sharing: bool = True, isolate: bool = False) -> None:
        self.slots = slots
        self.now = 0.0
        self.scheduler = Scheduler(slots, cached, sharing=sharing, isolate=isolate, clock=lambda: self.now)
        self.memory = Memory(slots + cached)
        self.jobs: dict[int, Job] = {}
        self.limits: dict[int, int] = {}
        self.replies: dict[int, list[int]] = {}
        self.rows: dict[int, int] = {}
        self.ended: set[int] = set()

    def add(
        self,
        prompt: tuple[int, ...],
        limit: int,
        prompt_outputs: bool = False,
        principal: str = "",
        keep: float = 0,
    ) -> None:
        job = Job(len(self.jobs), prompt, prompt_outputs, principal, keep)
        self.jobs[job.id], self.limits[job.id] = job, limit
        self.replies[job.id], self.rows[job.id] = [], 0
        self.scheduler.add(job)

    def end(self, job: int) -> None:
        self.ended.add(job)
        self.scheduler.end(job)

    def draft(self, job: int, right: int, wrong: int) -> tuple[int, ...]:
        """Tokens that the job will sample, and some that it will not."""
        known = len(self.replies[job])
        return (*(self.token(known + ahead) for ahead in range(right)), *[WRONG] * wrong)

    def token(self, at: int) -> int:
        return at % 3

    def step(self, budget: int, failing: frozenset[int] = frozenset(), right: int = 0, wrong: int = 0) -> Plan:
        due = {job for job, reply in self.replies.items() if reply and job not in self.ended}
        assert set(self.scheduler.decoding) == due
        drafts = {job: self.draft(job, (right + job) % 5, (wrong + job) % 3) for job in due if right + wrong}
        pinned = self.covered()
        plan = self.scheduler.plan(budget, drafts)
        self.check(plan, budget, due)
        self.check_drafts(plan, drafts)
        self.memory.prepare(plan)
        self.check_pins(pinned)
        for chunk in plan.chunks:
            if chunk.job in failing:
                self.memory.sequences[chunk.sequence].append((-1, "?"))
                self.end(chunk.job)
            else:
                self.memory.decode(chunk, self.jobs[chunk.job].principal)
                self.scheduler.decoded(chunk)
                self.read(chunk)
        self.check_memory()
        return plan

    def check(self, plan: Plan, budget: int, due: set[int]) -> None:
        used = [chunk.sequence for chunk in plan.chunks]
        assert used == sorted(set(used))
        assert set(used) <= set(range(self.slots))
        assert not {chunk.job for chunk in plan.chunks} & self.ended
        prefill = [chunk for chunk in plan.chunks if not self.replies[chunk.job]]
        assert plan.prefill_rows == sum(len(chunk.tokens) for chunk in prefill) <= budget
        outputs = [chunk.outputs for chunk in prefill if self.jobs[chunk.job].prompt_outputs]
        assert sum(outputs) <= MAX_PROMPT_OUTPUTS
        assert {chunk.job for chunk in plan.chunks if self.replies[chunk.job]} == due
        assert plan.chunks or self.scheduler.idle, "somebody always gets on"

    def check_drafts(self, plan: Plan, drafts: dict[int, tuple[int, ...]]) -> None:
        for chunk in plan.chunks:
            if reply := self.replies[chunk.job]:
                draft = () if plan.prefill_rows else drafts.get(chunk.job, ())
                assert chunk.tokens == (reply[-1], *draft)
                assert chunk.outputs == len(chunk.tokens)

    def covered(self) -> dict[Pin, int]:
        """How much of each pinned text is in memory."""
        sequences = self.scheduler.sequences
        return {pin: sequences.held.longest(pin.tokens, pin.salt)[0] for pin in sequences.pins.live}

    def check_pins(self, before: dict[Pin, int]) -> None:
        after = self.covered()
        assert len(after) <= len(self.scheduler.sequences.shelf) // 2
        for pin, length in after.items():
            assert length >= before[pin] or before[pin] < WORTH, "what is pinned is not given up"

    def check_memory(self) -> None:
        scheduler, sequences = self.scheduler, self.scheduler.sequences
        seats = [slot.sequence for slot in scheduler.slots.values() if slot.seated]
        assert len(scheduler.slots) <= self.slots
        assert len(seats) == len(set(seats))
        assert sequences.taken == set(seats)
        trimmed = {effect.sequence: effect.length for effect in sequences.effects if isinstance(effect, Trim)}
        assert len(trimmed) == len(sequences.effects), "between plans only drafts are cut"
        for sequence, cells in enumerate(self.memory.sequences):
            assert not cells or sequence in sequences.filled
            if sequence in sequences.held:
                known, there = text(sequences.held, sequence), self.memory.tokens(sequence)[: trimmed.get(sequence)]
                assert known == there[: len(known)]
                assert sequence in sequences.taken or known == there

    def read(self, chunk: Chunk) -> None:
        job, reply = self.jobs[chunk.job], self.replies[chunk.job]
        ahead = len(chunk.tokens) - 1 if reply else 0
        seen = self.memory.tokens(chunk.sequence)
        seen = seen[: len(seen) - ahead]
        assert seen == [*job.prompt, *reply][: len(seen)]
        if self.scheduler.isolate:
            assert {principal for _, principal in self.memory.sequences[chunk.sequence]} == {job.principal}
        self.rows[job.id] += len(chunk.tokens)
        complete = len(seen) >= len(job.prompt)
        assert chunk.outputs - ahead == (len(chunk.tokens) if job.prompt_outputs and not reply else int(complete))
        if not complete:
            return
        if not reply:
            shared = self.scheduler.shared(job.id)
            assert self.scheduler.prompt_done(job.id)
            assert self.rows[job.id] + shared == len(job.prompt)
            assert not (shared and (job.prompt_outputs or not self.scheduler.sharing))
        self.sample(job.id, chunk.tokens[len(chunk.tokens) - ahead :])

    def sample(self, job: int, draft: tuple[int, ...]) -> None:
        reply = self.replies[job]
        while len(reply) < self.limits[job]:
            reply.append(self.token(len(reply)))
            drafted, draft = draft[:1] == (reply[-1],), draft[1:]
            assert self.scheduler.sampled(job, reply[-1]) == drafted
            if not drafted:
                return
        self.end(job)

    def finish(self) -> None:
        for _ in range(10_000):
            if self.scheduler.idle:
                break
            self.step(7)
        assert self.scheduler.idle
        assert self.ended == set(self.jobs)
        assert not self.scheduler.sequences.taken
        assert not self.scheduler.promised.roots
        self.check_memory()


LONG = [tuple(range(90)), (*range(50), *range(90, 200)), (*range(120), 7, 7, 7)]


@pytest.mark.parametrize("part", range(4))
def test_any_schedule(part: int) -> None:
    for seed in range(part * SCHEDULES // 4, (part + 1) * SCHEDULES // 4):
        chance = random.Random(seed)
        sharing = chance.random() < 0.9
        world = World(
            chance.randint(1, 5),
            chance.randint(0, 5) if sharing else 0,
            sharing=sharing,
            isolate=chance.random() < 0.3,
        )
        for _ in range(chance.randrange(40)):
            happen(chance, world)
        world.finish()


def happen(chance: random.Random, world: World) -> None:
    what = chance.random()
    world.now += chance.random()
    if what < 0.35:
        prompt = chance.choice(LONG)[: chance.randrange(1, 200)]
        prompt += tuple(chance.randrange(3) for _ in range(chance.randrange(6)))
        if world.jobs and chance.random() < 0.3:
            earlier = chance.choice(list(world.jobs))
            prompt = (*world.jobs[earlier].prompt, *world.replies[earlier], *prompt[:40])
        keep = chance.choice([0, 0, 5, 50])
        world.add(prompt, chance.randrange(12), chance.random() < 0.1, chance.choice(["ann", "bob"]), keep)
    elif what < 0.45 and world.jobs:
        world.end(chance.choice(list(world.jobs)))
    else:
        failing = [chance.choice(list(world.jobs))] if world.jobs and chance.random() < 0.1 else []
        drafting = (chance.randrange(5), chance.randrange(3)) if chance.random() < 0.6 else (0, 0)
        world.step(chance.randint(1, 150), frozenset(failing), *drafting)


PROMPTS = st.one_of(
    st.sampled_from([(1,), (1, 2), tuple(range(20)), *LONG]),
    st.lists(st.integers(0, 3), min_size=1, max_size=30).map(tuple),
)
ADD = st.tuples(st.just("add"), PROMPTS, st.integers(0, 6), st.booleans() | st.just(False))
END = st.tuples(st.just("end"), st.integers(0, 30))
DRAFT = st.tuples(st.integers(0, 4), st.integers(0, 2))
STEP = st.tuples(st.just("step"), st.integers(1, 150), st.frozensets(st.integers(0, 30), max_size=2), DRAFT)
CALM = st.tuples(st.just("step"), st.integers(1, 150), st.frozensets(st.integers(), max_size=0), DRAFT)


@settings(max_examples=100, deadline=None)
@given(slots=st.integers(1, 5), happenings=st.lists(st.one_of(ADD, ADD, CALM, CALM, END, STEP), max_size=60))
def test_any_order_of_happenings(slots: int, happenings: list[tuple[object, ...]]) -> None:
    world = World(slots, 2)
    for happening in happenings:
        match happening:
            case "add", tuple(prompt), int(limit), bool(prompt_outputs):
                world.add(prompt, limit, prompt_outputs)
            case "end", int(job) if job in world.jobs:
                world.end(job)
            case "step", int(budget), frozenset(failing), (int(right), int(wrong)):
                world.step(budget, failing, right, wrong)
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


@given(wants=st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 500)), max_size=12), budget=st.integers(1, 512))
def test_sharing_between_principals_gives_out_as_much(wants: list[tuple[str, int]], budget: int) -> None:
    given_out = share_between([owner for owner, _ in wants], [rows for _, rows in wants], budget)
    assert all(got <= want for got, (_, want) in zip(given_out, wants, strict=True))
    assert sum(given_out) == min(budget, sum(rows for _, rows in wants))


def test_nobody_gets_more_by_asking_more_often() -> None:
    assert share_between(["ann", "ann", "ann", "bob"], [1000] * 4, 120) == [30, 15, 15, 60]


def test_equal_prompts_wait_for_the_first_and_decode_the_last_two_tokens() -> None:
    world = World(3)
    for _ in range(3):
        world.add(tuple(range(100)), 9)
    assert chunks_of(world.step(64)) == [(0, 0, 64, 0)]
    assert chunks_of(world.step(64)) == [(0, 64, 36, 1)]
    third = world.step(64)
    assert third.effects == (Copy(0, 1), Trim(1, 98), Copy(1, 2), Trim(2, 98))
    assert chunks_of(third) == [(0, 100, 1, 1), (1, 98, 2, 1), (2, 98, 2, 1)]
    assert [world.scheduler.shared(job) for job in range(3)] == [0, 98, 98]


def test_a_common_beginning_is_computed_once_and_waited_for_no_longer_than_that() -> None:
    world = World(3)
    common = tuple(range(100))
    for own in range(3):
        world.add((*common, *[200 + own] * 300), 1)
    assert chunks_of(world.step(64)) == [(0, 0, 64, 0)]
    assert chunks_of(world.step(64)) == [(0, 64, 64, 0)]
    assert [(job, start) for job, start, *_ in chunks_of(world.step(64))] == [(0, 128), (1, 100), (2, 100)]
    world.finish()


def test_a_beginning_that_is_short_is_not_waited_for() -> None:
    world = World(2)
    world.add((*range(31), 500), 1)
    world.add((*range(31), 600), 1)
    assert chunks_of(world.step(64)) == [(0, 0, 32, 1), (1, 0, 32, 1)]


def test_the_next_turn_of_a_conversation_goes_on_where_the_last_one_ended() -> None:
    world = World(2)
    world.add(tuple(range(100)), 5)
    world.finish()
    world.add((*range(100), *world.replies[0], 7, 7, 7), 1)
    plan = world.step(64)
    assert plan.effects == (Trim(0, 105),)
    assert chunks_of(plan) == [(1, 105, 3, 1)]


def test_a_leader_that_is_cancelled_leaves_its_work() -> None:
    world = World(2)
    for _ in range(2):
        world.add(tuple(range(100)), 1)
    world.step(64)
    world.end(0)
    plan = world.step(64)
    assert chunks_of(plan) == [(1, 64, 36, 1)]
    assert plan.chunks[0].sequence == 0
    assert world.scheduler.shared(1) == 64


def test_a_leader_whose_decode_failed_leaves_nothing() -> None:
    world = World(2)
    for _ in range(2):
        world.add(tuple(range(100)), 1)
    world.step(64, failing=frozenset({0}))
    plan = world.step(64)
    assert not plan.effects
    assert chunks_of(plan) == [(1, 0, 64, 0)]


def test_a_text_that_must_leave_its_seat_is_shelved_and_found_again() -> None:
    world = World(1, 1)
    first, second = tuple(range(100)), tuple(range(200, 300))
    world.add(first, 0)
    world.finish()
    world.add(second, 0)
    assert world.step(200).effects == (Copy(0, 1), Clear(0))
    world.finish()
    world.add(first, 0)
    plan = world.step(200)
    assert chunks_of(plan) == [(2, 98, 2, 1)]
    world.finish()
    assert Copy(1, 0) in plan.effects


def test_the_shelf_gives_up_what_has_not_been_used_for_longest() -> None:
    world = World(1, 2)
    texts = [tuple(range(100 * at, 100 * at + 90)) for at in range(5)]
    for prompt in texts[:3]:
        world.add(prompt, 0)
        world.finish()
    world.add(texts[0], 0)
    world.finish()
    world.add(texts[3], 0)
    world.finish()
    world.add(texts[0], 0)
    assert len(world.step(200).chunks[0].tokens) == 2
    world.finish()
    world.add(texts[1], 0)
    assert len(world.step(200).chunks[0].tokens) == 90


def test_jobs_sit_side_by_side() -> None:
    world = World(6)
    for at in range(6):
        world.add(tuple(range(100 * at, 100 * at + 40)), 50)
    world.step(600)
    for job in (1, 3, 4, 5):
        world.end(job)
    world.add(tuple(range(500, 550)), 9)
    assert [chunk.sequence for chunk in world.step(600).chunks] == [0, 1, 2]


def test_a_waiting_job_takes_the_sequence_that_becomes_free() -> None:
    world = World(1)
    world.add((1, 2, 3), 9)
    world.add((4, 5), 9)
    world.step(64)
    assert chunks_of(world.step(64)) == [(0, 3, 1, 1)]
    world.end(0)
    plan = world.step(64)
    assert plan.effects == (Clear(0),)
    assert chunks_of(plan) == [(1, 0, 2, 1)]


def test_principals_that_are_kept_apart_share_nothing() -> None:
    world = World(2, isolate=True)
    for principal in ("ann", "bob"):
        world.add(tuple(range(100)), 0, principal=principal)
    assert chunks_of(world.step(200)) == [(0, 0, 100, 1), (1, 0, 100, 1)]
    world.add(tuple(range(100)), 0, principal="bob")
    assert chunks_of(world.step(200)) == [(2, 98, 2, 1)]


def test_without_sharing_everybody_prefills() -> None:
    world = World(2, sharing=False)
    for _ in range(2):
        world.add(tuple(range(50)), 0)
    assert chunks_of(world.step(100)) == [(0, 0, 50, 1), (1, 0, 50, 1)]


def test_a_draft_is_kept_as_far_as_it_is_sampled_and_the_rest_cut_off() -> None:
    world = World(2)
    world.add(tuple(range(40)), 9)
    world.step(64)
    assert world.step(64, right=2, wrong=1).chunks[0].tokens == (0, 1, 2, WRONG)
    assert world.replies[0] == [0, 1, 2, 0]
    plan = world.step(64)
    assert plan.effects == (Trim(0, 43),)
    assert chunks_of(plan) == [(0, 43, 1, 1)]


def test_a_draft_that_is_right_is_followed_at_once() -> None:
    world = World(2)
    world.add(tuple(range(40)), 9)
    world.step(64)
    world.step(64, right=3)
    plan = world.step(64)
    assert not plan.effects
    assert chunks_of(plan) == [(0, 44, 1, 1)]


def test_nobodys_prompt_waits_for_a_draft() -> None:
    world = World(2)
    world.add(tuple(range(40)), 9)
    world.step(64)
    world.add(tuple(range(100, 200)), 1)
    assert chunks_of(world.step(64, right=3)) == [(0, 40, 1, 1), (1, 0, 64, 0)]


def test_what_was_drafted_and_not_sampled_is_taken_by_nobody() -> None:
    world = World(1)
    world.add(tuple(range(40)), 3)
    world.step(64)
    world.step(64, right=4, wrong=2)
    assert world.ended == {0}
    world.add((*range(40), 0, 1, 2, 0, 1, 2, WRONG, WRONG), 1)
    plan = world.step(64)
    assert plan.effects == (Trim(0, 43), Trim(0, 43))
    assert plan.chunks[0].start == 43


def test_a_plan_must_be_answered() -> None:
    scheduler = Scheduler(1)
    scheduler.add(Job(0, (1, 2, 3)))
    scheduler.plan(64)
    with pytest.raises(RuntimeError, match="not been heard of"):
        scheduler.plan(64)
