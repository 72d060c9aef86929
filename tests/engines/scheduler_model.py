"""Runs the llama scheduler with a model of the decoder's memory: lists of tokens."""

from dragoman.engines.llama.prefix_tree import PrefixTree
from dragoman.engines.llama.scheduler import MAX_PROMPT_OUTPUTS, Chunk, Job, Plan, Scheduler
from dragoman.engines.llama.sequences import MIN_SHARED_TOKENS, Clear, Copy, PinnedPrefix, Trim

WRONG = 77
Cell = tuple[int, str]
"""A token and the principal whose job computed it."""


class Memory:
    """The tokens in a decoder's sequences. Applies plans and checks the preconditions of llama.cpp."""

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


def text_of(tree: PrefixTree, holder: int) -> list[int]:
    edges = [node.edge for node in tree.path(holder)]
    return [token for edge in reversed(edges) for token in edge]


class SchedulerModel:
    """A scheduler and its memory. Checks after every step that each job sees its own prompt and reply."""

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
        is_batch: bool = False,
    ) -> None:
        job = Job(len(self.jobs), prompt, prompt_outputs, principal, keep, is_batch)
        self.jobs[job.id], self.limits[job.id] = job, limit
        self.replies[job.id], self.rows[job.id] = [], 0
        self.scheduler.add(job)

    def end(self, job: int) -> None:
        self.ended.add(job)
        self.scheduler.end(job)

    def draft(self, job: int, right: int, wrong: int) -> tuple[int, ...]:
        """Return tokens that the job will sample, followed by wrong ones."""
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
        decoding = {chunk.job for chunk in plan.chunks if self.replies[chunk.job]}
        assert decoding <= due
        assert all(self.jobs[job].is_batch for job in due - decoding), "only batch jobs are paused"
        assert plan.chunks or self.scheduler.idle, "every plan makes progress"

    def check_drafts(self, plan: Plan, drafts: dict[int, tuple[int, ...]]) -> None:
        for chunk in plan.chunks:
            if reply := self.replies[chunk.job]:
                draft = () if plan.prefill_rows else drafts.get(chunk.job, ())
                assert chunk.tokens == (reply[-1], *draft)
                assert chunk.outputs == len(chunk.tokens)

    def covered(self) -> dict[PinnedPrefix, int]:
        """Return how many tokens of each pinned prefix are in memory."""
        sequences = self.scheduler.sequences
        return {pin: sequences.held.longest_prefix(pin.tokens, pin.salt)[0] for pin in sequences.pins.live}

    def check_pins(self, before: dict[PinnedPrefix, int]) -> None:
        after = self.covered()
        assert len(after) <= len(self.scheduler.sequences.cache) // 2
        for pin, length in after.items():
            assert length >= before[pin] or before[pin] < MIN_SHARED_TOKENS, "a pinned prefix was evicted"

    def check_memory(self) -> None:
        scheduler, sequences = self.scheduler, self.scheduler.sequences
        used = [slot.sequence for slot in scheduler.slots.values() if slot.has_sequence]
        assert len(scheduler.slots) <= self.slots
        assert len(used) == len(set(used))
        assert sequences.occupied == set(used)
        trimmed = {effect.sequence: effect.length for effect in sequences.effects if isinstance(effect, Trim)}
        assert len(trimmed) == len(sequences.effects), "between plans only drafts are trimmed"
        for sequence, cells in enumerate(self.memory.sequences):
            assert not cells or sequence in sequences.filled
            if sequence in sequences.held.ends:
                known, actual = text_of(sequences.held, sequence), self.memory.tokens(sequence)[: trimmed.get(sequence)]
                assert known == actual[: len(known)]
                assert sequence in sequences.occupied or known == actual

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
        assert not self.scheduler.sequences.occupied
        assert not self.scheduler.promised.roots
        self.check_memory()


def chunks_of(plan: Plan) -> list[tuple[int, int, int, int]]:
    return [(chunk.job, chunk.start, len(chunk.tokens), chunk.outputs) for chunk in plan.chunks]
