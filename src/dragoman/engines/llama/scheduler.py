"""Decides which rows the next decode has. No I/O: events in, plans out.

    waiting ──slot──> admitted ──sequence──> prefilling ──prompt decoded──> decoding ──end──> removed
                         └──> following ──common prefix decoded──┘

A job gets a slot, then a sequence of the decoder's memory (see `sequences`). One decode serves many jobs: each decoding
job has one row, and prefilling jobs share a budget of rows. If no job prefills, a decoding job may have further rows
for its draft: predicted tokens, of which the correctly predicted ones are kept.

A job whose prompt begins like that of a prefilling job follows this leader: it waits until the common prefix is in
memory and copies it, instead of computing it again.

Rules
1. A sequence belongs to at most one job.
2. The rows of a job are its prompt, then its sampled tokens, at positions 0, 1, 2, … without gaps. The part of the
   prompt that was in the sequence already is `shared` and has no rows. Draft rows that were not sampled are trimmed
   before any other effect, and are never shared.
3. Every job with a sampled token has exactly one row for it in the next plan, except for rule 12; prefill never delays
   it by a plan. Its draft follows that row, unless the plan has prefill rows.
4. The prefill rows of a plan never exceed the budget, and use all of it that the prompts can fill, except for rule 6.
5. The principal with the fewest prefill rows, recent and still to come, gets up to three quarters of the budget, the
   next one three quarters of the rest, and so on: a short prompt overtakes the many or long prompts of another one.
   Within the share of a principal, half goes to its oldest job and the rest to the shortest prompts, so that a short
   prompt overtakes a long one.
6. If the prompts of one principal end in a plan, those of the others get at most REST_ROWS rows: the step is short, and
   the first token comes soon.
7. A job that wants the logits of every prompt row reuses nothing; a plan has at most MAX_PROMPT_OUTPUTS such rows.
8. Each chunk of a plan is answered by `decoded`, `undone` or `end` of its job before the next plan.
9. `end` works in every state. The computed tokens stay for other jobs, unless a decode of the job failed: then the
   content of its sequence is unknown.
10. Only a job with a sequence is followed, and only for MIN_SHARED_TOKENS or more that are not in memory yet. A job
    with a sequence never waits again, so followers cannot wait forever.
11. Rows are sorted by sequence, because the decoder processes adjacent sequences together.

Batch jobs use only the time and the slots that interactive jobs leave free:

12. While the prompt of an interactive job is read, batch jobs are paused: plans have no rows for them. After each
    PAUSE_SECONDS one plan has, with at most REST_ROWS prefill rows, so they always proceed. While interactive jobs only
    decode, the plans with rows for batch jobs take at most BATCH_SHARE of the time.
13. Interactive jobs come first to the slots. They do not follow batch jobs, but copy what these have in memory. The
    memory of ended batch jobs is reused before that of interactive ones.
14. Shares are divided among batch jobs alone, and their rows do not count for their principal's other jobs.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import msgspec

from dragoman.engines.llama.prefill_shares import (
    REST_ROWS,
    RecentUsage,
    cap_beside_finished,
    share_between,
    shortest_first,
)
from dragoman.engines.llama.prefix_tree import PrefixTree
from dragoman.engines.llama.sequences import MIN_DECODED_TOKENS, MIN_SHARED_TOKENS, Effect, SequenceAllocator, Trim

MAX_PROMPT_OUTPUTS = 64
"""Each such row needs one float per vocabulary token until the next decode."""
MAX_SHORT_ROWS = 64
"""Prompts that have no more rows left are decoded in one step."""
PAUSE_SECONDS = 1.0
"""Longest pause of batch jobs."""
BATCH_SHARE = 0.2
"""Part of the time for plans with rows of batch jobs, while interactive replies are decoded."""


class Job(msgspec.Struct, frozen=True):
    id: int
    prompt: tuple[int, ...]
    prompt_outputs: bool = False
    principal: str = ""
    keep: float = 0
    """Seconds for which the prompt is pinned in memory."""
    is_batch: bool = False


class Chunk(msgspec.Struct, frozen=True):
    """Rows of one job: `tokens` at positions from `start` on. The last `outputs` of them need logits."""

    job: int
    sequence: int
    start: int
    tokens: tuple[int, ...]
    outputs: int


class Plan(msgspec.Struct, frozen=True):
    """Apply the effects in order, then decode the chunks in one batch."""

    effects: tuple[Effect, ...] = ()
    chunks: tuple[Chunk, ...] = ()
    prefill_rows: int = 0


class Workload(msgspec.Struct, frozen=True):
    """Which jobs there are, and whether prompts of interactive ones are read, or their replies decoded."""

    has_batch: bool
    has_interactive: bool
    is_reading: bool
    is_decoding: bool


class BatchPause:
    """Pauses batch jobs beside interactive ones, but never for long."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._is_paused = True
        self._ran_at = self._resumes_at = clock()
        """When the last plan with rows for batch jobs began, and when the next one may, beside replies."""

    def decide(self, workloads: Sequence[Workload]) -> bool:
        """Whether the next plan has no rows for batch jobs."""
        now = self._clock()
        if not self._is_paused:
            self._resumes_at = now + min(PAUSE_SECONDS, (now - self._ran_at) * (1 / BATCH_SHARE - 1))
        if any(load.is_reading for load in workloads):
            self._is_paused = now < self._ran_at + PAUSE_SECONDS
        else:
            self._is_paused = now < self._resumes_at and any(load.is_decoding for load in workloads)
        if not self._is_paused:
            self._ran_at = now
        return self._is_paused


class _Slot(msgspec.Struct):
    job: Job
    salt: str
    """Prefixes are shared only between jobs with the same salt."""
    reuses: bool
    """Whether the job may reuse the prefixes of others."""
    sequence: int = -1
    done: int = 0
    shared: int = 0
    sampled: int | None = None
    reply: list[int] = []
    """Sampled tokens in memory."""
    draft: tuple[int, ...] = ()
    """Predicted tokens in memory after the reply, not sampled yet."""
    leader: int = -1
    common: int = 0
    """Tokens of the leader's prompt to wait for."""

    @property
    def missing(self) -> int:
        return len(self.job.prompt) - self.done

    @property
    def has_sequence(self) -> bool:
        return self.sequence >= 0

    def next_chunk(self, count: int) -> Chunk:
        """Return the next `count` rows of the prompt."""
        outputs = count if self.job.prompt_outputs else int(count == self.missing)
        tokens = self.job.prompt[self.done : self.done + count]
        return Chunk(self.job.id, self.sequence, self.done, tokens, outputs)


class Scheduler:
    def __init__(
        self,
        slots: int,
        cached: int = 0,
        *,
        sharing: bool = True,
        isolate: bool = False,
        clock: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """`cached` is the number of sequences beyond the slots. With `isolate`, principals share no prefixes."""
        self.limit = slots
        self.sharing = sharing
        self.isolate = isolate
        self.waiting: dict[int, Job] = {}
        self.slots: dict[int, _Slot] = {}
        self.sequences = SequenceAllocator(slots, cached, sharing=sharing, clock=clock)
        self.promised = PrefixTree()
        """The prompts of prefilling jobs."""
        self.in_flight: dict[int, Chunk] = {}
        self.usage, self.batch_usage = RecentUsage(clock), RecentUsage(clock)
        self.pause = BatchPause(clock)

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.slots

    @property
    def decoding(self) -> list[int]:
        """Jobs that have sampled a token and need the next one."""
        return [job for job, slot in self.slots.items() if slot.sampled is not None]

    @property
    def workload(self) -> Workload:
        kinds = {job.is_batch for job in self.waiting.values()} | {slot.job.is_batch for slot in self.slots.values()}
        slots = [slot for slot in self.slots.values() if not slot.job.is_batch]
        return Workload(
            has_batch=True in kinds,
            has_interactive=False in kinds,
            is_reading=any(slot.missing > 0 for slot in slots),
            is_decoding=any(slot.sampled is not None for slot in slots),
        )

    @property
    def tokens(self) -> int:
        """Tokens of running jobs in memory. Cached prefixes do not count."""
        return sum(slot.done for slot in self.slots.values())

    @property
    def expects_lighter_principal(self) -> bool:
        """Whether the prompts are long, and an active principal without a prompt now has fewer prefill rows."""
        slots = [slot for slot in self.slots.values() if slot.missing > 0 and not slot.job.is_batch]
        has_waiting = any(not job.is_batch for job in self.waiting.values())
        is_long = has_waiting or not slots or sum(slot.missing for slot in slots) > MAX_SHORT_ROWS
        return is_long and self.usage.has_lighter(self._missing_rows(is_batch=False))

    def _missing_rows(self, *, is_batch: bool) -> Counter[str]:
        """The prefill rows to come, by principal."""
        rows: Counter[str] = Counter()
        for job in self.waiting.values():
            if job.is_batch == is_batch:
                rows[job.principal] += len(job.prompt)
        for slot in self.slots.values():
            if slot.missing > 0 and slot.job.is_batch == is_batch:
                rows[slot.job.principal] += slot.missing
        return rows

    def add(self, job: Job) -> None:
        self.waiting[job.id] = job

    def decoded(self, chunk: Chunk) -> None:
        """Record that the rows of a chunk are in memory."""
        del self.in_flight[chunk.job]
        slot = self.slots[chunk.job]
        if slot.missing > 0:
            self.sequences.append(slot.sequence, chunk.tokens)
            slot.done += len(chunk.tokens)
        else:
            slot.reply.append(chunk.tokens[0])
            slot.done += 1
            slot.draft = chunk.tokens[1:]
        slot.sampled = None
        if slot.missing <= 0:
            self.promised.remove(chunk.job)

    def undone(self, chunk: Chunk) -> None:
        """Record that the rows of a chunk are not in memory; they are planned again."""
        del self.in_flight[chunk.job]

    def sampled(self, job: int, token: int) -> bool:
        """Record a sampled token. Returns whether it was drafted, so that the next one can be sampled at once."""
        slot = self.slots[job]
        if slot.draft[:1] == (token,):
            slot.reply.append(token)
            slot.done += 1
            slot.draft = slot.draft[1:]
            return True
        self._cut_draft(slot)
        slot.sampled = token
        return False

    def end(self, job: int) -> None:
        """Remove a job that has finished, failed or been cancelled. Unknown jobs are ignored."""
        self.waiting.pop(job, None)
        slot = self.slots.pop(job, None)
        if slot is None or not slot.has_sequence:
            return
        self.promised.remove(job)
        self._cut_draft(slot)
        self.sequences.append(slot.sequence, slot.reply)
        is_invalid = self.in_flight.pop(job, None) is not None
        self.sequences.release(slot.sequence, is_invalid=is_invalid, is_batch=slot.job.is_batch)
        if self._keeps(slot.job) and slot.missing <= 0 and not is_invalid:
            self.sequences.pins.add(slot.job.prompt, slot.salt, slot.job.keep)

    def prompt_done(self, job: int) -> bool:
        return self.slots[job].missing <= 0

    def shared(self, job: int) -> int:
        """Prompt tokens that were reused from memory."""
        return self.slots[job].shared

    def kept(self, job: int) -> int:
        """Prompt tokens that are newly pinned because of this job."""
        slot = self.slots[job]
        return len(slot.job.prompt) - slot.shared if self._keeps(slot.job) else 0

    def plan(
        self,
        prefill_budget: int,
        drafts: Mapping[int, Sequence[int]] | None = None,
        others: Sequence[Workload] = (),
    ) -> Plan:
        """`drafts` are the predicted tokens of decoding jobs; `others` the workloads of the schedulers that take turns
        with this one."""
        if self.in_flight:
            raise RuntimeError(f"jobs {sorted(self.in_flight)} were not reported after the last plan")
        while self.waiting and len(self.slots) < self.limit:
            interactive = (job.id for job in self.waiting.values() if not job.is_batch)
            job = self.waiting.pop(next(interactive, next(iter(self.waiting))))
            salt = job.principal if self.isolate else ""
            self.slots[job.id] = _Slot(job, salt, reuses=self.sharing and not job.prompt_outputs)
        for slot in self.slots.values():
            if not slot.has_sequence and not self._follows(slot):
                self._assign_sequence(slot)
        if (move := self.sequences.close_gap()) is not None:
            sequence, free = move
            next(slot for slot in self.slots.values() if slot.sequence == sequence).sequence = free
        is_paused = self.pause.decide([self.workload, *others])
        slots = [slot for slot in self.slots.values() if not (is_paused and slot.job.is_batch)]
        prefill = self._prefill([slot for slot in slots if slot.has_sequence and slot.missing > 0], prefill_budget)
        decoding = self._next_rows(slots, {} if prefill or drafts is None else drafts)
        chunks = sorted((*decoding, *prefill), key=lambda chunk: chunk.sequence)
        self.in_flight = {chunk.job: chunk for chunk in chunks}
        return Plan(self.sequences.drain(), tuple(chunks), sum(len(chunk.tokens) for chunk in prefill))

    def _keeps(self, job: Job) -> bool:
        return job.keep > 0 and len(job.prompt) >= MIN_SHARED_TOKENS and self.sequences.pins.limit > 0

    def _follows(self, slot: _Slot) -> bool:
        """Whether another job is computing a prefix that this job can use."""
        if not slot.reuses:
            return False
        prompt, leader = slot.job.prompt, self.slots.get(slot.leader)
        if leader is not None and leader.done < slot.common:
            return True
        coming, leaders = self.promised.longest_prefix(prompt[:-MIN_DECODED_TOKENS], slot.salt)
        if coming < self.sequences.find_prefix(prompt, slot.salt)[0] + MIN_SHARED_TOKENS:
            return False
        if not slot.job.is_batch:
            leaders = frozenset(leader for leader in leaders if not self.slots[leader].job.is_batch)
        if not leaders:
            return False
        slot.leader = max(leaders, key=lambda leader: self.slots[leader].done)
        slot.common = coming
        return True

    def _assign_sequence(self, slot: _Slot) -> None:
        job = slot.job
        slot.sequence, slot.shared = self.sequences.acquire(job.prompt, slot.salt, reuse=slot.reuses)
        slot.done = slot.shared
        if self.sharing:
            self.promised.add(job.id, job.prompt, slot.salt)

    def _cut_draft(self, slot: _Slot) -> None:
        if slot.draft:
            self.sequences.effects.append(Trim(slot.sequence, slot.done))
            slot.draft = ()

    def _next_rows(self, slots: Sequence[_Slot], drafts: Mapping[int, Sequence[int]]) -> list[Chunk]:
        chunks = []
        for slot in slots:
            if slot.sampled is not None:
                tokens = (slot.sampled, *drafts.get(slot.job.id, ()))
                chunks.append(Chunk(slot.job.id, slot.sequence, slot.done, tokens, len(tokens)))
        return chunks

    def _prefill(self, slots: Sequence[_Slot], budget: int) -> list[Chunk]:
        batch = [slot for slot in slots if slot.job.is_batch]
        interactive = [slot for slot in slots if not slot.job.is_batch]
        rest = min(REST_ROWS, budget // 2) if interactive else budget
        chunks = self._share(batch, rest, MAX_PROMPT_OUTPUTS, is_batch=True)
        left = MAX_PROMPT_OUTPUTS - sum(chunk.outputs for chunk in chunks)
        budget -= sum(len(chunk.tokens) for chunk in chunks)
        return chunks + self._share(interactive, budget, left, is_batch=False)

    def _share(self, slots: Sequence[_Slot], budget: int, most_outputs: int, *, is_batch: bool) -> list[Chunk]:
        """Divide the budget between prefilling jobs of one priority."""
        usage = self.batch_usage if is_batch else self.usage
        wanting = [slot for slot in slots if slot.job.prompt_outputs]
        outputs = shortest_first([slot.missing for slot in wanting], min(budget, most_outputs))
        most = {slot.job.id: rows for slot, rows in zip(wanting, outputs, strict=True)}
        wants = [most.get(slot.job.id, slot.missing) for slot in slots]
        owners = [slot.job.principal for slot in slots]
        order = usage.order(owners, self._missing_rows(is_batch=is_batch))
        rows = cap_beside_finished(owners, wants, share_between(order, owners, wants, budget))
        usage.record(owners, rows)
        return [slot.next_chunk(count) for slot, count in zip(slots, rows, strict=True) if count]
