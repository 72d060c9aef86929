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
3. Every job with a sampled token has exactly one row for it in the next plan; prefill never delays it by a plan. Its
   draft follows that row, unless the plan has prefill rows.
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
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import msgspec

from dragoman.core.decaying_counter import DecayingCounter
from dragoman.engines.llama.prefix_tree import PrefixTree
from dragoman.engines.llama.sequences import MIN_DECODED_TOKENS, MIN_SHARED_TOKENS, Effect, SequenceAllocator, Trim

MAX_PROMPT_OUTPUTS = 64
"""Each such row needs one float per vocabulary token until the next decode."""
REST_ROWS = 8
MAX_SHORT_ROWS = 64
"""Prompts that have no more rows left are decoded in one step."""
FIRST_SHARE = 0.75
"""Part of the budget for the principal with the fewest recent rows."""
RECENT_ROWS_SECONDS = 10.0
"""The weight of past rows halves in this time."""


class Job(msgspec.Struct, frozen=True):
    id: int
    prompt: tuple[int, ...]
    prompt_outputs: bool = False
    principal: str = ""
    keep: float = 0
    """Seconds for which the prompt is pinned in memory."""


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
        self.usage = RecentUsage(clock)

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.slots

    @property
    def decoding(self) -> list[int]:
        """Jobs that have sampled a token and need the next one."""
        return [job for job, slot in self.slots.items() if slot.sampled is not None]

    @property
    def tokens(self) -> int:
        """Tokens of running jobs in memory. Cached prefixes do not count."""
        return sum(slot.done for slot in self.slots.values())

    @property
    def expects_lighter_principal(self) -> bool:
        """Whether the prompts are long, and an active principal without a prompt now has fewer prefill rows."""
        slots = [slot for slot in self.slots.values() if slot.missing > 0]
        is_long = bool(self.waiting) or not slots or sum(slot.missing for slot in slots) > MAX_SHORT_ROWS
        return is_long and self.usage.has_lighter(self._missing_rows())

    def _missing_rows(self) -> Counter[str]:
        """The prefill rows to come, by principal."""
        rows: Counter[str] = Counter()
        for job in self.waiting.values():
            rows[job.principal] += len(job.prompt)
        for slot in self.slots.values():
            if slot.missing > 0:
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
        self.sequences.release(slot.sequence, is_invalid=is_invalid)
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

    def plan(self, prefill_budget: int, drafts: Mapping[int, Sequence[int]] | None = None) -> Plan:
        """`drafts` are the predicted tokens of decoding jobs."""
        if self.in_flight:
            raise RuntimeError(f"jobs {sorted(self.in_flight)} were not reported after the last plan")
        while self.waiting and len(self.slots) < self.limit:
            job = self.waiting.pop(next(iter(self.waiting)))
            salt = job.principal if self.isolate else ""
            self.slots[job.id] = _Slot(job, salt, reuses=self.sharing and not job.prompt_outputs)
        for slot in self.slots.values():
            if not slot.has_sequence and not self._follows(slot):
                self._assign_sequence(slot)
        if (move := self.sequences.close_gap()) is not None:
            sequence, free = move
            next(slot for slot in self.slots.values() if slot.sequence == sequence).sequence = free
        prefill = self._prefill(prefill_budget)
        decoding = self._next_rows({} if prefill or drafts is None else drafts)
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

    def _next_rows(self, drafts: Mapping[int, Sequence[int]]) -> list[Chunk]:
        chunks = []
        for job, slot in self.slots.items():
            if slot.sampled is not None:
                tokens = (slot.sampled, *drafts.get(job, ()))
                chunks.append(Chunk(job, slot.sequence, slot.done, tokens, len(tokens)))
        return chunks

    def _prefill(self, budget: int) -> list[Chunk]:
        slots = [slot for slot in self.slots.values() if slot.has_sequence and slot.missing > 0]
        wanting = [slot for slot in slots if slot.job.prompt_outputs]
        outputs = shortest_first([slot.missing for slot in wanting], min(budget, MAX_PROMPT_OUTPUTS))
        most = {slot.job.id: rows for slot, rows in zip(wanting, outputs, strict=True)}
        wants = [most.get(slot.job.id, slot.missing) for slot in slots]
        owners = [slot.job.principal for slot in slots]
        order = self.usage.order(owners, self._missing_rows())
        rows = cap_beside_finished(owners, wants, share_between(order, owners, wants, budget))
        self.usage.record(owners, rows)
        return [slot.next_chunk(count) for slot, count in zip(slots, rows, strict=True) if count]


class RecentUsage:
    """Prefill rows of each principal, of which older ones count less."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._rows = DecayingCounter(RECENT_ROWS_SECONDS, least=1, clock=clock)

    def order(self, owners: Sequence[str], missing: Mapping[str, int]) -> list[str]:
        """Return the distinct owners, the one with the fewest rows first, and of equals the one of the oldest job.
        `missing` are rows to come."""
        return sorted(dict.fromkeys(owners), key=lambda owner: self._rows.get(owner) + missing.get(owner, 0))

    def has_lighter(self, missing: Mapping[str, int]) -> bool:
        """Whether another principal had fewer rows than each of these with its rows to come; without any, whether there
        are several principals."""
        if not missing:
            return len(self._rows) > 1
        least = min(self._rows.get(owner) + rows for owner, rows in missing.items())
        return any(self._rows.get(principal) < least for principal in self._rows if principal not in missing)

    def record(self, owners: Sequence[str], rows: Sequence[int]) -> None:
        self._rows.add(zip(owners, rows, strict=True))


def share_between(order: Sequence[str], owners: Sequence[str], wants: Sequence[int], budget: int) -> list[int]:
    """Divide the budget between the owners in this order, then between the requests of each."""
    given = [0] * len(wants)
    parts = share_in_order(
        [sum(want for want, who in zip(wants, owners, strict=True) if who == owner) for owner in order], budget
    )
    for owner, part in zip(order, parts, strict=True):
        mine = [at for at, who in enumerate(owners) if who == owner]
        for at, rows in zip(mine, shortest_first([wants[at] for at in mine], part), strict=True):
            given[at] = rows
    return given


def share_in_order(wants: Sequence[int], budget: int) -> list[int]:
    """Give each FIRST_SHARE of what is left, the last one all of it, and what remains to the first that want more."""
    given, left = [], budget
    for at, want in enumerate(wants):
        is_last = at == len(wants) - 1
        given.append(min(want, left if is_last else math.ceil(left * FIRST_SHARE)))
        left -= given[-1]
    return _give_rest(given, wants, range(len(wants)), left)


def cap_beside_finished(owners: Sequence[str], wants: Sequence[int], given: list[int]) -> list[int]:
    """If one owner gets all that it wants and another does not, leave the other REST_ROWS."""
    unfinished = {owner for owner, want, got in zip(owners, wants, given, strict=True) if got < want}
    if not unfinished or unfinished.issuperset(owners):
        return given
    left = dict.fromkeys(unfinished, REST_ROWS)
    capped = []
    for owner, got in zip(owners, given, strict=True):
        if owner in left:
            got = min(got, left[owner])
            left[owner] -= got
        capped.append(got)
    return capped


def shortest_first(wants: Sequence[int], budget: int) -> list[int]:
    """Give half of the budget to the first, and the rest to the smallest requests first."""
    given = [min(want, (budget + 1) // 2) if at == 0 else 0 for at, want in enumerate(wants)]
    order = sorted(range(len(wants)), key=lambda at: wants[at] - given[at])
    return _give_rest(given, wants, order, budget - sum(given))


def _give_rest(given: list[int], wants: Sequence[int], order: Sequence[int], left: int) -> list[int]:
    """Give each in this order what it still wants, as far as the rest of the budget goes."""
    for at in order:
        more = min(wants[at] - given[at], left)
        given[at] += more
        left -= more
    return given
