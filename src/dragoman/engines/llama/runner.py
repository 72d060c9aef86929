"""Runs the steps of a decoder, in the compute thread.

    plan the step, with drafts that are likely to pay; clear, copy and trim sequences
    decode, and compute the masks of grammars meanwhile
    sample a token for every row that has logits, up to the first draft token that was wrong
    hand all events of the step to the event loop in one call

Rules
1. While a job decodes, a step takes about `gap` seconds, whatever is prefilled; up to 1.8 times as long if that
   finishes long prompts much sooner (see `StepPace`). Otherwise it takes up to ALONE_SECONDS, which bounds the wait of
   new prompts and cancellations. A step of long prompts takes at most SHARED_SECONDS while another principal is active
   that had fewer prefill rows: its next prompt must not wait for long.
2. A decode that fails is repeated job by job; only the jobs that fail alone are failed. A decode for a single job is
   aborted if the job is cancelled.
3. A grammar that fails, fails its own job.
4. If there are only batch jobs, a step takes up to ALONE_SECONDS too, and a new interactive job aborts it: the step is
   planned again later. Models that cannot undo a step have steps of SHARED_SECONDS instead, and so does a batch prompt
   beside interactive jobs. Batch jobs are paused for an interactive prompt of any runner.
"""

import itertools
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

from dragoman.core.errors import DragomanError, EngineFailed
from dragoman.core.events import Event
from dragoman.engines.llama.binding import ABORTED, Context
from dragoman.engines.llama.compute_thread import ComputeThread, StepPace
from dragoman.engines.llama.generation import Generation
from dragoman.engines.llama.options import LlamaOptions
from dragoman.engines.llama.scheduler import Chunk, Plan, Scheduler
from dragoman.engines.llama.sequences import Clear, Copy
from dragoman.engines.llama.speculation import MAX_DRAFTED, StepCost, choose_draft_counts
from dragoman.grammar.masks import Guide

log = logging.getLogger("dragoman.engine")

MIN_CHUNK = 16
"""Smaller chunks cost more throughput than they save latency."""
ALONE_SECONDS = 0.25
SHARED_SECONDS = 0.05
MIN_CHUNK_ALONE = 64
"""From this number of rows on, prefill runs at nearly full speed on any CPU."""


StepEvents = Sequence[Callable[[], None]]
"""Calls that put the events of a step into the queues of their generations."""


class Runner:
    def __init__(
        self,
        context: Context,
        schedule: Callable[[], Scheduler],
        options: LlamaOptions,
        compute_thread: ComputeThread,
        deliver: Callable[[StepEvents], None],
        runners: "Sequence[Runner]",
    ) -> None:
        """`deliver` is called in the event loop with the events of a step. `runners` are all those in the thread."""
        self.context = context
        self.schedule = schedule
        self.scheduler = schedule()
        self.compute_thread = compute_thread
        self.deliver = deliver
        self.runners = runners
        self.tokens = 0
        """Tokens of its jobs in memory after the last step."""
        self.gap = gap = options.gap_ms / 1000
        batch = options.batch
        self.alone = StepPace(ALONE_SECONDS, minimum=MIN_CHUNK_ALONE, maximum=batch)
        self.among_others = StepPace(gap, minimum=MIN_CHUNK, maximum=batch, long_steps=options.flash_attention)
        self.among_principals = StepPace(min(gap, SHARED_SECONDS), minimum=MIN_CHUNK, maximum=batch)
        self.most_drafted = min(batch, MAX_DRAFTED)
        self.cost = StepCost()
        self.drafted = self.accepted = 0
        self.live: dict[int, Generation] = {}
        self.sole: Generation | None = None
        """The generation of a decode that has rows of a single job."""
        self.is_batch_step = False
        """Whether the decode has only rows of batch jobs and can be undone."""
        self.outbox: list[Callable[[], None]] = []
        self.masks = ThreadPoolExecutor(1, thread_name_prefix="dragoman-masks")

    # Called in the event loop

    def submit(self, generation: Generation) -> None:
        self.compute_thread.require_open()
        self.compute_thread.call(self, partial(self._add, generation))
        if not generation.job.is_batch:
            for runner in self.runners:
                if runner.is_batch_step:
                    runner.context.abort()

    def cancel(self, generation: Generation) -> None:
        self.compute_thread.call(self, partial(self._end, generation))
        if self.sole is generation:
            self.context.abort()

    # Called in the compute thread

    @property
    def has_work(self) -> bool:
        return not self.scheduler.idle

    def step(self) -> None:
        pace = self._pace()
        others = [runner.scheduler.workload for runner in self.runners if runner is not self]
        plan = self.scheduler.plan(pace.rows, self._drafts(min(pace.seconds, self.gap)), others)
        self._prepare(plan)
        if plan.chunks:
            self._run(plan, pace)
        self._deliver()

    def reset(self, error: DragomanError) -> None:
        # Do not use the old scheduler: it may be what failed.
        self.scheduler = self.schedule()
        live, self.live = self.live, {}
        for generation in live.values():
            self.outbox.append(partial(generation.events.fail, error))
            generation.close()
        self.context.clear_all()
        self._deliver()

    def close(self) -> None:
        self.masks.shutdown()
        self.context.close()
        if self.drafted:
            log.info("%d of %d drafted tokens were accepted", self.accepted, self.drafted)

    def _add(self, generation: Generation) -> None:
        self.live[generation.job.id] = generation
        self.scheduler.add(generation.job)

    def _run(self, plan: Plan, pace: StepPace) -> None:
        begun = time.monotonic()
        code = self._decode(plan.chunks)
        if code == ABORTED:
            self._undo(plan.chunks)
        elif code:
            self._decode_alone(plan.chunks, code)
        elif plan.prefill_rows:
            pace.record(plan.prefill_rows, time.monotonic() - begun)
        else:
            rows = sum(len(chunk.tokens) for chunk in plan.chunks)
            self.cost.record(rows, rows - len(plan.chunks), time.monotonic() - begun)

    def _pace(self) -> StepPace:
        loads = [runner.scheduler.workload for runner in self.runners]
        if not any(load.has_interactive for load in loads):
            return self.alone if self.scheduler.sharing else self.among_principals
        is_reading = any(load.is_reading for load in loads)
        if self.scheduler.expects_lighter_principal or (self.scheduler.workload.has_batch and not is_reading):
            return self.among_principals
        return self.among_others if any(load.is_decoding for load in loads) else self.alone

    def _drafts(self, seconds: float) -> dict[int, Sequence[int]]:
        """Return drafts that are likely to pay in a step of at most `seconds`."""
        draft_chances = {job: self.live[job].draft_chances() for job in self.scheduler.decoding}
        counts = choose_draft_counts(self.cost, draft_chances, seconds, self.most_drafted)
        return {job: self.live[job].draft(count) for job, count in counts.items()}

    def _prepare(self, plan: Plan) -> None:
        for effect in plan.effects:
            if isinstance(effect, Clear):
                self.context.clear(effect.sequence)
            elif isinstance(effect, Copy):
                self.context.copy(effect.source, effect.target)
            else:
                self.context.trim(effect.sequence, effect.length)

    def _decode(self, chunks: Sequence[Chunk]) -> int:
        masks = self._compute_masks(chunks)
        self.sole = self.live[chunks[0].job] if len(chunks) == 1 else None
        self.is_batch_step = self.scheduler.sharing and all(self.live[chunk.job].job.is_batch for chunk in chunks)
        code = self.context.decode(
            [token for chunk in chunks for token in chunk.tokens],
            [chunk.start + at for chunk in chunks for at in range(len(chunk.tokens))],
            [chunk.sequence for chunk in chunks for _ in chunk.tokens],
            [at >= len(chunk.tokens) - chunk.outputs for chunk in chunks for at in range(len(chunk.tokens))],
        )
        self.sole, self.is_batch_step = None, False
        if masks is not None:
            masks.result()
        if code:
            return code
        row = 0
        for chunk in chunks:
            generation = self.live[chunk.job]
            self.scheduler.decoded(chunk)
            try:
                self._advance(generation, chunk, row)
            except DragomanError as error:
                self._fail(generation, error)
            row += len(chunk.tokens)
        return 0

    def _compute_masks(self, chunks: Sequence[Chunk]) -> Future[None] | None:
        """Compute the masks while the decoder runs without the GIL."""
        guides = [guide for chunk in chunks if (guide := self.live[chunk.job].guide) is not None and guide.is_stale]
        return self.masks.submit(_compute, guides) if guides else None

    def _undo(self, chunks: Sequence[Chunk]) -> None:
        """Undo the planned chunks: the abort may have been meant for the previous decode."""
        for chunk in chunks:
            if self.context.trim(chunk.sequence, chunk.start):
                self.scheduler.undone(chunk)
            else:
                self._fail(self.live[chunk.job], EngineFailed("the model could not be run any further"))

    def _decode_alone(self, chunks: Sequence[Chunk], code: int) -> None:
        log.warning("a decode of %d jobs failed with code %d; trying one by one", len(chunks), code)
        # Some rows of the failed decode may be in memory.
        kept = [(chunk, self.context.trim(chunk.sequence, chunk.start)) for chunk in chunks]
        for chunk, trimmed in kept:
            alone = self._decode([chunk]) if trimmed else code
            if alone:
                self._fail(self.live[chunk.job], EngineFailed(f"the model could not be run (code {alone})"))

    def _advance(self, generation: Generation, chunk: Chunk, first_row: int) -> None:
        """Process the rows of a decoded chunk."""
        if generation.job.prompt_outputs and chunk.start < len(generation.job.prompt):
            generation.read_prompt(self.context, chunk, first_row)
        if not self.scheduler.prompt_done(chunk.job):
            return
        events: list[Event] = []
        if chunk.start < len(generation.job.prompt):
            events += generation.start(self.scheduler.shared(chunk.job), self.scheduler.kept(chunk.job))
            first_row += len(chunk.tokens) - 1
        else:
            self.drafted += len(chunk.tokens) - 1
        if not generation.has_ended:
            events += self._pick(generation, first_row)
        self.outbox.append(partial(generation.events.put, events))
        if generation.has_ended:
            self.outbox.append(generation.events.end)
            self._end(generation)

    def _pick(self, generation: Generation, row: int) -> list[Event]:
        """Sample the next token, and further ones as long as they match the draft."""
        events: list[Event] = []
        for ahead in itertools.count():
            try:
                token, more = generation.step(self.context, row + ahead)
            except DragomanError:
                self.outbox.append(partial(generation.events.put, events))
                raise
            events += more
            if generation.has_ended or not self.scheduler.sampled(generation.job.id, token):
                break
            self.accepted += 1
        return events

    def _fail(self, generation: Generation, error: DragomanError) -> None:
        self.outbox.append(partial(generation.events.fail, error))
        self._end(generation)

    def _end(self, generation: Generation) -> None:
        self.scheduler.end(generation.job.id)
        self.live.pop(generation.job.id, None)
        generation.close()

    def _deliver(self) -> None:
        self.tokens = self.scheduler.tokens
        if self.outbox:
            self.compute_thread.post(self.deliver, self.outbox)
            self.outbox = []


def _compute(guides: Sequence[Guide]) -> None:
    for guide in guides:
        guide.compute_mask()
