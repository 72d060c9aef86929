"""Which rows the next decode has. Events in, plans out: no model, no thread, no clock.

    waiting ──seat──> prefilling ──prompt decoded──> decoding ──end──> gone
                 └──> following ──copy of the leader──> prefilling (the last prompt token alone)

A job gets a seat, which is one sequence of the decoder's memory. Many jobs go through one decode: each one that
decodes has one row, and those that still take in their prompts share a budget of rows. A job whose prompt is the same
as a seated one's follows that leader: it waits until the leader's prompt is in memory, copies the sequence whole,
forgets everything from the last prompt token on, and decodes that token itself to have logits of its own.

Rules
1. A sequence belongs to one job at the most, and is cleared before another job gets it.
2. The rows of a job are its prompt, then its sampled tokens, at positions 0, 1, 2, … without gap or repetition. What a
   copy brought along is `shared` and has no rows.
3. Every job with a sampled token has exactly one row for it in the next plan; prefill never delays it by a plan.
4. Prefill rows of a plan never exceed the budget, and use all of it that the prompts can fill.
5. Half of the budget is the oldest job's, so that it gets done; the rest is shared evenly, so that a short prompt
   passes a long one.
6. A job that wants the logits of every prompt row shares nothing; a plan has at most MAX_PROMPT_OUTPUTS such rows.
7. Each chunk of a plan is answered by `decoded` or by `end` of its job before the next plan.
8. `end` works in every state, and the sequence is free in the next plan.
9. A leader that ends before its prompt is in memory leaves its sequence to the oldest follower, unless a decode of it
   failed: then nobody knows what is in it.
"""

from collections.abc import Sequence

import msgspec

MAX_PROMPT_OUTPUTS = 64
"""Each takes one float per token of the vocabulary until the next decode."""


class Job(msgspec.Struct, frozen=True):
    id: int
    prompt: tuple[int, ...]
    prompt_outputs: bool = False


class Copy(msgspec.Struct, frozen=True):
    """Make the empty sequence `target` a copy of the whole of `source`."""

    source: int
    target: int


class Trim(msgspec.Struct, frozen=True):
    """Keep the first `length` tokens of a sequence."""

    sequence: int
    length: int


class Chunk(msgspec.Struct, frozen=True):
    """Rows of one job: `tokens` at positions from `start` on; the last `outputs` of them want logits."""

    job: int
    sequence: int
    start: int
    tokens: tuple[int, ...]
    outputs: int


class Plan(msgspec.Struct, frozen=True):
    """To be done in this order; the chunks in one decode."""

    clears: tuple[int, ...] = ()
    copies: tuple[Copy, ...] = ()
    trims: tuple[Trim, ...] = ()
    chunks: tuple[Chunk, ...] = ()
    prefill_rows: int = 0


class _Seat(msgspec.Struct):
    job: Job
    sequence: int
    done: int = 0
    shared: int = 0
    sampled: int | None = None
    leader: int | None = None
    trim: bool = False
    """More than `done` tokens are in the sequence."""

    @property
    def missing(self) -> int:
        return len(self.job.prompt) - self.done

    @property
    def prefilling(self) -> bool:
        return self.missing > 0 and self.leader is None


class Scheduler:
    def __init__(self, slots: int, *, sharing: bool = True) -> None:
        self.sharing = sharing
        self.waiting: dict[int, Job] = {}
        self.seats: dict[int, _Seat] = {}
        self.leaders: dict[tuple[int, ...], int] = {}
        self.free = list(range(slots))
        self.used: list[int] = []
        self.in_flight: dict[int, Chunk] = {}

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.seats

    def add(self, job: Job) -> None:
        self.waiting[job.id] = job

    def decoded(self, chunk: Chunk) -> None:
        """The chunk's rows are in memory."""
        if self.in_flight.pop(chunk.job, None) is not None:
            seat = self.seats[chunk.job]
            seat.done += len(chunk.tokens)
            seat.sampled = None

    def sampled(self, job: int, token: int) -> None:
        """The job goes on with `token`."""
        self.seats[job].sampled = token

    def end(self, job: int) -> None:
        """The job is done, failed or not wanted any more. One that is gone already may end again."""
        if self.waiting.pop(job, None) is not None:
            return
        seat = self.seats.pop(job, None)
        if seat is None:
            return
        failed = self.in_flight.pop(job, None) is not None
        if self.leaders.get(seat.job.prompt) == job:
            self._succeed(seat, failed)
        if seat.done or failed:
            self.used.append(seat.sequence)
        else:
            self.free.append(seat.sequence)

    def prompt_done(self, job: int) -> bool:
        return self.seats[job].missing <= 0

    def shared(self, job: int) -> int:
        """How many of its prompt's tokens the job did not have to decode itself."""
        return self.seats[job].shared

    def plan(self, prefill_budget: int) -> Plan:
        if self.in_flight:
            raise RuntimeError(f"jobs {sorted(self.in_flight)} have not been heard of since the last plan")
        clears, self.used = tuple(self.used), []
        self.free.extend(clears)
        self._seat_waiting()
        copies = self._copies()
        trims = self._trims()
        rows, prefill = self._next_rows(), self._prefill(prefill_budget)
        self.in_flight = {chunk.job: chunk for chunk in (*rows, *prefill)}
        return Plan(clears, copies, trims, (*rows, *prefill), sum(len(chunk.tokens) for chunk in prefill))

    def _seat_waiting(self) -> None:
        while self.free and self.waiting:
            job = self.waiting.pop(next(iter(self.waiting)))
            self.seats[job.id] = _Seat(job, self.free.pop(0), leader=self._leader(job))

    def _leader(self, job: Job) -> int | None:
        """The job to follow; None where this one leads, or where there is nothing to share."""
        if not self.sharing or job.prompt_outputs or len(job.prompt) < 2:
            return None
        leader = self.leaders.setdefault(job.prompt, job.id)
        return None if leader == job.id else leader

    def _copies(self) -> tuple[Copy, ...]:
        copies = []
        for seat in self.seats.values():
            leader = None if seat.leader is None else self.seats[seat.leader]
            if leader is not None and leader.missing <= 0:
                copies.append(Copy(leader.sequence, seat.sequence))
                seat.leader = None
                seat.done = seat.shared = len(seat.job.prompt) - 1
                seat.trim = True
        return tuple(copies)

    def _trims(self) -> tuple[Trim, ...]:
        seats = [seat for seat in self.seats.values() if seat.trim]
        for seat in seats:
            seat.trim = False
        return tuple(Trim(seat.sequence, seat.done) for seat in seats)

    def _succeed(self, gone: _Seat, failed: bool) -> None:
        """The next job with the same prompt leads from now on. Those behind it have all copied, or none of them has."""
        prompt = gone.job.prompt
        del self.leaders[prompt]
        alike = [seat for seat in self.seats.values() if seat.job.prompt == prompt and not seat.job.prompt_outputs]
        if not alike:
            return
        heir = alike[0]
        self.leaders[prompt] = heir.job.id
        for seat in alike:
            seat.leader = None if seat is heir or seat.leader is None else heir.job.id
        if not heir.done and not failed:
            self._inherit(heir, gone)

    def _inherit(self, heir: _Seat, gone: _Seat) -> None:
        heir.sequence, gone.sequence = gone.sequence, heir.sequence
        # The heir has no logits of the last prompt token, so it decodes that one in any case.
        heir.done = heir.shared = min(gone.done, len(heir.job.prompt) - 1)
        heir.trim = gone.trim or gone.done > heir.done
        gone.done = 0

    def _next_rows(self) -> list[Chunk]:
        return [
            Chunk(seat.job.id, seat.sequence, seat.done, (seat.sampled,), 1)
            for seat in self.seats.values()
            if seat.sampled is not None
        ]

    def _prefill(self, budget: int) -> list[Chunk]:
        seats = [seat for seat in self.seats.values() if seat.prefilling]
        wanting = [seat for seat in seats if seat.job.prompt_outputs]
        outputs = share([seat.missing for seat in wanting], min(budget, MAX_PROMPT_OUTPUTS))
        most = {seat.job.id: rows for seat, rows in zip(wanting, outputs, strict=True)}
        rows = share([most.get(seat.job.id, seat.missing) for seat in seats], budget)
        return [self._chunk(seat, count) for seat, count in zip(seats, rows, strict=True) if count]

    def _chunk(self, seat: _Seat, count: int) -> Chunk:
        job = seat.job
        outputs = count if job.prompt_outputs else int(count == seat.missing)
        return Chunk(job.id, seat.sequence, seat.done, job.prompt[seat.done : seat.done + count], outputs)


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
