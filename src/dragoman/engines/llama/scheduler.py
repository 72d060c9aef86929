"""Which rows the next decode has. Events in, plans out: no model, no thread, no clock of its own.

    waiting ──slot──> seated ──seat──> prefilling ──prompt decoded──> decoding ──end──> gone
                         └──> following ──common part decoded──┘

A job gets a slot, then a seat, which is a sequence of the decoder's memory (`sequences` decides which one, and what is
in it already). Many jobs go through one decode: each one that decodes has one row, and those that still take in their
prompts share a budget of rows. Where nobody does, a job that decodes may have rows for tokens that it is only thought
to go on with: its draft, of which those remain that it really samples.

A job whose prompt begins as that of one who is just taking it in follows that leader: it waits for the common part
instead of computing it a second time, and then takes it from there.

Rules
1. A sequence belongs to one job at the most.
2. The rows of a job are its prompt, then its sampled tokens, at positions 0, 1, 2, … without gap or repetition. What
   was in its sequence when the job got it is `shared` and has no rows. Rows of a draft that were not sampled are cut
   off before anything else is done to the memory, and nobody ever takes them from there.
3. Every job with a sampled token has exactly one row for it in the next plan; prefill never delays it by a plan. Its
   draft follows that row, unless the plan has prefill rows: nobody's prompt waits for somebody's guess.
4. Prefill rows of a plan never exceed the budget, and use all of it that the prompts can fill.
5. Half of the budget is the oldest job's principal's, so that it gets done; the rest is shared evenly between the
   others: nobody gets more by asking more often. Of a principal's part half is the oldest job's, and the rest goes to
   the shortest prompts, one after the other: a short prompt passes a long one, and of many that are alike each is
   answered as soon as it can be, instead of all of them at the end.
   In a plan in which the prompts of one principal end, those of the others get at most REST_ROWS: the step is short,
   and the first token comes soon.
6. A job that wants the logits of every prompt row takes nothing from others; a plan has at most MAX_PROMPT_OUTPUTS such
   rows.
7. Each chunk of a plan is answered by `decoded`, `undone` or `end` of its job before the next plan.
8. `end` works in every state. What the job computed stays for others, unless a decode of it failed: then nobody knows
   what is in memory.
9. Only a job that has a seat is followed, and only for WORTH tokens or more that are in memory nowhere. One that has a
   seat never waits again, so that nobody waits for ever.
10. Rows are in the order of their sequences, as the decoder wants neighbours.
"""

from collections.abc import Callable, Mapping, Sequence

import msgspec

from dragoman.engines.llama.prefix_tree import PrefixTree
from dragoman.engines.llama.sequences import MIN_DECODED_TOKENS, MIN_SHARED_TOKENS, Effect, SequenceAllocator

MAX_PROMPT_OUTPUTS = 64
"""Each takes one float per token of the vocabulary until the next decode."""
REST_ROWS = 16


class Job(msgspec.Struct, frozen=True):
    id: int
    prompt: tuple[int, ...]
    prompt_outputs: bool = False
    principal: str = ""
    keep: float = 0
    """Seconds for which others' prompts do not displace this one."""


class Chunk(msgspec.Struct, frozen=True):
    """Rows of one job: `tokens` at positions from `start` on; the last `outputs` of them want logits."""

    job: int
    sequence: int
    start: int
    tokens: tuple[int, ...]
    outputs: int


class Plan(msgspec.Struct, frozen=True):
    """The effects are to be done in their order, then the chunks in one decode."""

    effects: tuple[Effect, ...] = ()
    chunks: tuple[Chunk, ...] = ()
    prefill_rows: int = 0


class _Slot(msgspec.Struct):
    job: Job
    sequence: int = -1
    done: int = 0
    shared: int = 0
    sampled: int | None = None
    reply: list[int] = []
    """The sampled tokens that are in memory."""
    draft: tuple[int, ...] = ()
    """Tokens that are in memory behind those, not sampled yet."""
    leader: int = -1
    common: int = 0
    """How much of the leader's prompt is worth waiting for."""

    @property
    def missing(self) -> int:
        return len(self.job.prompt) - self.done

    @property
    def seated(self) -> bool:
        return self.sequence >= 0


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
        """`cached` is how many more sequences than slots there are; `isolate`: principals share nothing. By the `clock`
        the time of what is to be kept is over."""
        self.limit = slots
        self.sharing = sharing
        self.isolate = isolate
        self.waiting: dict[int, Job] = {}
        self.slots: dict[int, _Slot] = {}
        self.sequences = SequenceAllocator(slots, cached if sharing else 0, sharing=sharing, clock=clock)
        self.promised = PrefixTree()
        """The prompts of those that are prefilling."""
        self.in_flight: dict[int, Chunk] = {}

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.slots

    @property
    def decoding(self) -> list[int]:
        """The jobs that wait for the token after the last one."""
        return [job for job, slot in self.slots.items() if slot.sampled is not None]

    @property
    def tokens(self) -> int:
        """Those that jobs have in memory; what is only kept for later counts as room."""
        return sum(slot.done for slot in self.slots.values())

    def add(self, job: Job) -> None:
        self.waiting[job.id] = job

    def decoded(self, chunk: Chunk) -> None:
        """The chunk's rows are in memory."""
        if self.in_flight.pop(chunk.job, None) is None:
            return
        slot = self.slots[chunk.job]
        if slot.missing > 0:
            self.sequences.grew(slot.sequence, chunk.tokens)
            slot.done += len(chunk.tokens)
        else:
            slot.reply.append(chunk.tokens[0])
            slot.done += 1
            slot.draft = chunk.tokens[1:]
        slot.sampled = None
        if slot.missing <= 0:
            self.promised.drop(chunk.job)

    def undone(self, chunk: Chunk) -> None:
        """The chunk's rows are not in memory, and have to be planned again."""
        self.in_flight.pop(chunk.job, None)

    def sampled(self, job: int, token: int) -> bool:
        """The job goes on with `token`. Whether that was drafted, so that the next one can be sampled already."""
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
        """The job is done, failed or not wanted any more. One that is gone already may end again."""
        self.waiting.pop(job, None)
        slot = self.slots.pop(job, None)
        if slot is None or not slot.seated:
            return
        self.promised.drop(job)
        self._cut_draft(slot)
        self.sequences.grew(slot.sequence, slot.reply)
        spoilt = self.in_flight.pop(job, None) is not None
        self.sequences.leave(slot.sequence, spoilt=spoilt)
        if self._keeps(slot.job) and slot.missing <= 0 and not spoilt:
            self.sequences.pin(slot.job.prompt, self._salt(slot.job), slot.job.keep)

    def prompt_done(self, job: int) -> bool:
        return self.slots[job].missing <= 0

    def shared(self, job: int) -> int:
        """How many of its prompt's tokens the job did not have to decode itself."""
        return self.slots[job].shared

    def kept(self, job: int) -> int:
        """How many of its prompt's tokens are kept for a while because of it, and were not there before."""
        slot = self.slots[job]
        return len(slot.job.prompt) - slot.shared if self._keeps(slot.job) else 0

    def plan(self, prefill_budget: int, drafts: Mapping[int, Sequence[int]] | None = None) -> Plan:
        """`drafts`: by which tokens jobs that have sampled one are thought to go on."""
        if self.in_flight:
            raise RuntimeError(f"jobs {sorted(self.in_flight)} have not been heard of since the last plan")
        while self.waiting and len(self.slots) < self.limit:
            job = self.waiting.pop(next(iter(self.waiting)))
            self.slots[job.id] = _Slot(job)
        for slot in self.slots.values():
            if not slot.seated and not self._follows(slot):
                self._seat(slot)
        self._close_up()
        prefill = self._prefill(prefill_budget)
        decoding = self._next_rows({} if prefill or drafts is None else drafts)
        chunks = sorted((*decoding, *prefill), key=lambda chunk: chunk.sequence)
        self.in_flight = {chunk.job: chunk for chunk in chunks}
        return Plan(self.sequences.drain(), tuple(chunks), sum(len(chunk.tokens) for chunk in prefill))

    def _takes(self, job: Job) -> bool:
        return self.sharing and not job.prompt_outputs

    def _keeps(self, job: Job) -> bool:
        return job.keep > 0 and len(job.prompt) >= MIN_SHARED_TOKENS and self.sequences.pins.limit > 0

    def _salt(self, job: Job) -> str:
        return job.principal if self.isolate else ""

    def _follows(self, slot: _Slot) -> bool:
        """Whether somebody is computing what this job can use."""
        job, leader = slot.job, self.slots.get(slot.leader)
        if not self._takes(job):
            return False
        if leader is not None and leader.done < slot.common:
            return True
        coming, leaders = self.promised.longest(job.prompt[:-MIN_DECODED_TOKENS], self._salt(job))
        if coming < self.sequences.prefix(job.prompt, self._salt(job))[0] + MIN_SHARED_TOKENS:
            return False
        slot.leader = max(leaders, key=lambda leader: self.slots[leader].done)
        slot.common = coming
        return True

    def _seat(self, slot: _Slot) -> None:
        job = slot.job
        slot.sequence, shared = self.sequences.take(job.prompt, self._salt(job), reuse=self._takes(job))
        slot.done = slot.shared = shared
        if self.sharing:
            self.promised.hold(job.id, job.prompt, self._salt(job))

    def _close_up(self) -> None:
        if (move := self.sequences.close_gap()) is not None:
            seat, free = move
            next(slot for slot in self.slots.values() if slot.sequence == seat).sequence = free

    def _cut_draft(self, slot: _Slot) -> None:
        if slot.draft:
            self.sequences.cut(slot.sequence, slot.done)
            slot.draft = ()

    def _next_rows(self, drafts: Mapping[int, Sequence[int]]) -> list[Chunk]:
        chunks = []
        for slot in self.slots.values():
            if slot.sampled is not None:
                tokens = (slot.sampled, *drafts.get(slot.job.id, ()))
                chunks.append(Chunk(slot.job.id, slot.sequence, slot.done, tokens, len(tokens)))
        return chunks

    def _prefill(self, budget: int) -> list[Chunk]:
        slots = [slot for slot in self.slots.values() if slot.seated and slot.missing > 0]
        wanting = [slot for slot in slots if slot.job.prompt_outputs]
        outputs = share([slot.missing for slot in wanting], min(budget, MAX_PROMPT_OUTPUTS))
        most = {slot.job.id: rows for slot, rows in zip(wanting, outputs, strict=True)}
        wants = [most.get(slot.job.id, slot.missing) for slot in slots]
        owners = [slot.job.principal for slot in slots]
        rows = cap_beside_finished(owners, wants, share_between(owners, wants, budget))
        return [self._chunk(slot, count) for slot, count in zip(slots, rows, strict=True) if count]

    def _chunk(self, slot: _Slot, count: int) -> Chunk:
        job = slot.job
        outputs = count if job.prompt_outputs else int(count == slot.missing)
        return Chunk(job.id, slot.sequence, slot.done, job.prompt[slot.done : slot.done + count], outputs)


def share_between(owners: Sequence[str], wants: Sequence[int], budget: int) -> list[int]:
    """What each gets of the budget if it is shared between the owners first, then by what each of them wants."""
    places: dict[str, list[int]] = {}
    for at, owner in enumerate(owners):
        places.setdefault(owner, []).append(at)
    parts = share([sum(wants[at] for at in mine) for mine in places.values()], budget)
    given = [0] * len(wants)
    for mine, part in zip(places.values(), parts, strict=True):
        for at, rows in zip(mine, shortest_first([wants[at] for at in mine], part), strict=True):
            given[at] = rows
    return given


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


def share(wants: Sequence[int], budget: int) -> list[int]:
    """What each gets of the budget: the first half of it, the others even parts of the rest, then what is left over
    in order of age."""
    given = [0] * len(wants)
    if not wants:
        return given
    given[0] = min(wants[0], (budget + 1) // 2 if len(wants) > 1 else budget)
    left = budget - given[0]
    others = sorted(range(1, len(wants)), key=lambda at: wants[at])
    for rank, at in enumerate(others):
        given[at] = min(wants[at], left // (len(others) - rank))
        left -= given[at]
    for at, want in enumerate(wants):
        more = min(want - given[at], left)
        given[at] += more
        left -= more
    return given


def shortest_first(wants: Sequence[int], budget: int) -> list[int]:
    """What each gets of the budget: the first half of it, then all of them what they still want, in order of that."""
    given = [0] * len(wants)
    if not wants:
        return given
    given[0] = min(wants[0], (budget + 1) // 2)
    left = budget - given[0]
    for at in sorted(range(len(wants)), key=lambda at: wants[at] - given[at]):
        more = min(wants[at] - given[at], left)
        given[at] += more
        left -= more
    return given
