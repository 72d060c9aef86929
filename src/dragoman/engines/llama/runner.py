"""The thread that runs the decoder.

    repeat
      receive jobs and cancellations from the event loop
      plan the next step, with drafts that are likely to pay; clear, copy and trim sequences
      decode, and compute the masks of grammars meanwhile
      sample a token for every row that has logits, up to the first draft token that was wrong
      hand all events of the step to the event loop in one call

Rules
1. While a job decodes, a step takes about `gap` seconds, whatever is prefilled; up to 1.8 times as long if that
   finishes long prompts much sooner (see `pace`). Otherwise it takes up to ALONE_SECONDS, which bounds the wait of new
   prompts and cancellations. If several principals sent jobs within RECENT_SECONDS, a step with prefill rows takes at
   most SHARED_SECONDS, so that the prompts of one principal do not delay the first token of another.
2. A decode that fails is repeated job by job; only the jobs that fail alone are failed. A decode for a single job is
   aborted if the job is cancelled.
3. A grammar that fails, fails its own job.
4. Steps run in the compute thread, which several runners may share.
5. No exception ends the thread: an unexpected error fails the current jobs, clears the memory and continues.
"""

import asyncio
import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from dragoman.core.errors import DragomanError, EngineFailed
from dragoman.core.events import Event, Finished
from dragoman.engines.llama.binding import ABORTED, Context
from dragoman.engines.llama.compute_thread import STOPPED, ComputeThread
from dragoman.engines.llama.generation import Generation
from dragoman.engines.llama.pace import StepPace
from dragoman.engines.llama.scheduler import Chunk, Plan, Scheduler
from dragoman.engines.llama.sequences import Clear, Copy
from dragoman.engines.llama.speculation import MAX_DRAFTED, StepCost, choose_draft_counts
from dragoman.grammar.masks import Guide

log = logging.getLogger("dragoman.engine")

LEAST_CHUNK = 16
"""Smaller chunks cost more throughput than they save latency."""
ALONE_SECONDS = 0.25
RECENT_SECONDS = 10.0
SHARED_SECONDS = 0.05
"""Longest step with prefill rows while several principals are active."""
LEAST_CHUNK_ALONE = 64
"""From this number of rows on, prefill runs at nearly full speed on any CPU."""


class _Cancel:
    def __init__(self, generation: Generation) -> None:
        self.generation = generation


class Runner:
    def __init__(
        self,
        context: Context,
        loop: asyncio.AbstractEventLoop,
        schedule: Callable[[], Scheduler],
        *,
        batch: int,
        gap: float,
        long_steps: bool,
        compute_thread: ComputeThread,
    ) -> None:
        """`batch` is the maximum number of prompt tokens in a step, `gap` the target seconds between two tokens.
        `long_steps` allows steps longer than `gap` where they pay."""
        self.context = context
        self.schedule = schedule
        self.scheduler = schedule()
        self.compute_thread = compute_thread
        self.neighbours: Sequence[Runner] = ()
        """Other runners on the same compute thread."""
        self.decodes = False
        self.tokens = 0
        """Tokens of its jobs in memory after the last step."""
        self.alone = StepPace(ALONE_SECONDS, minimum=LEAST_CHUNK_ALONE, maximum=batch)
        self.among_others = StepPace(gap, minimum=LEAST_CHUNK, maximum=batch, long_steps=long_steps)
        self.among_principals = StepPace(min(gap, SHARED_SECONDS), minimum=LEAST_CHUNK, maximum=batch)
        self._last_job: dict[str, float] = {}
        """When each principal sent its latest job."""
        self.gap = gap
        self.most_drafted = min(batch, MAX_DRAFTED)
        self.cost = StepCost()
        self.drafted = self.accepted = 0
        self.live: dict[int, Generation] = {}
        self.sole: Generation | None = None
        """The generation of a decode that has rows of a single job."""
        self.commands: queue.SimpleQueue[Generation | _Cancel | None] = queue.SimpleQueue()
        self.closed = False
        self.stopping = False
        self.loop = loop
        self.outbox: list[tuple[Generation, Sequence[Event] | DragomanError]] = []
        self.thread = threading.Thread(target=self._work, name="dragoman-llama", daemon=True)
        self.masks = ThreadPoolExecutor(1, thread_name_prefix="dragoman-masks")

    # Called in the event loop

    def start(self) -> None:
        self.thread.start()

    def submit(self, generation: Generation) -> None:
        if self.closed:
            generation.inbox.fail(EngineFailed(STOPPED))
        else:
            self.commands.put(generation)

    def cancel(self, generation: Generation) -> None:
        self.commands.put(_Cancel(generation))
        if self.sole is generation:
            self.context.abort()

    def close(self) -> None:
        """Refuse further jobs and fail the current ones."""
        self.closed = True
        self.commands.put(None)

    def join(self) -> None:
        """Wait for the thread to end. May be called from any thread."""
        self.thread.join()

    # Called in the thread

    def _work(self) -> None:
        while not self.stopping:
            try:
                self._process_commands()
                if not self.scheduler.idle:
                    self.compute_thread.run(self._step)
            except Exception:
                log.exception("a step of the decoder failed")
                self._start_over(EngineFailed("the engine failed; see the server log"))
            self.decodes = bool(self.scheduler.decoding)
            self.tokens = self.scheduler.tokens
            self._deliver()
        self._start_over(EngineFailed(STOPPED))
        self._deliver()
        self.masks.shutdown()

    def _process_commands(self) -> None:
        """Process all pending commands. Blocks while there is no job."""
        block = self.scheduler.idle
        while True:
            try:
                command = self.commands.get(block=block)
            except queue.Empty:
                return
            block = False
            if command is None:
                self.stopping = True
            elif isinstance(command, _Cancel):
                self._end(command.generation)
            else:
                self.live[command.job.id] = command
                self.scheduler.add(command.job)
                self._last_job[command.job.principal] = time.monotonic()

    def _step(self) -> None:
        pace = self._pace()
        plan = self.scheduler.plan(pace.rows, self._drafts())
        self._prepare(plan)
        if not plan.chunks:
            return
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
        if len(self._last_job) > 1:
            oldest = time.monotonic() - RECENT_SECONDS
            self._last_job = {principal: at for principal, at in self._last_job.items() if at > oldest}
            if len(self._last_job) > 1:
                return self.among_principals
        awaited = self.scheduler.decoding or any(other.decodes for other in self.neighbours)
        return self.among_others if awaited else self.alone

    def _drafts(self) -> dict[int, Sequence[int]]:
        draft_chances = {job: self.live[job].draft_chances() for job in self.scheduler.decoding}
        counts = choose_draft_counts(self.cost, draft_chances, self.gap, self.most_drafted)
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
        code = self.context.decode(
            [token for chunk in chunks for token in chunk.tokens],
            [chunk.start + at for chunk in chunks for at in range(len(chunk.tokens))],
            [chunk.sequence for chunk in chunks for _ in chunk.tokens],
            [at >= len(chunk.tokens) - chunk.outputs for chunk in chunks for at in range(len(chunk.tokens))],
        )
        self.sole = None
        if masks is not None:
            masks.result()
        if code:
            return code
        row = 0
        for chunk in chunks:
            self._process_chunk(chunk, row)
            row += len(chunk.tokens)
        return 0

    def _compute_masks(self, chunks: Sequence[Chunk]) -> Future[None] | None:
        """Compute the masks while the decoder runs without the GIL."""
        guides = [guide for chunk in chunks if (guide := self.live[chunk.job].guide) is not None and guide.stale]
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

    def _process_chunk(self, chunk: Chunk, first_row: int) -> None:
        """Process the rows of a decoded chunk."""
        generation = self.live[chunk.job]
        self.scheduler.decoded(chunk)
        try:
            self._advance(generation, chunk, first_row)
        except DragomanError as error:
            self._fail(generation, error)

    def _advance(self, generation: Generation, chunk: Chunk, first_row: int) -> None:
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
        if not events or type(events[-1]) is not Finished:
            events += self._pick(generation, first_row)
        self.outbox.append((generation, events))
        if type(events[-1]) is Finished:
            self._end(generation)

    def _pick(self, generation: Generation, row: int) -> list[Event]:
        """Sample the next token, and further ones as long as they match the draft."""
        events: list[Event] = []
        for ahead in itertools.count():
            try:
                token, more = generation.step(self.context, row + ahead)
            except DragomanError:
                if events:
                    self.outbox.append((generation, events))
                raise
            events += more
            if type(more[-1]) is Finished or not self.scheduler.sampled(generation.job.id, token):
                break
            self.accepted += 1
        return events

    def _fail(self, generation: Generation, error: DragomanError) -> None:
        self.outbox.append((generation, error))
        self._end(generation)

    def _end(self, generation: Generation) -> None:
        self.scheduler.end(generation.job.id)
        self.live.pop(generation.job.id, None)
        generation.close()

    def _start_over(self, error: DragomanError) -> None:
        # Do not use the old scheduler: it may be what failed.
        self.scheduler = self.schedule()
        live, self.live = self.live, {}
        for generation in live.values():
            self.outbox.append((generation, error))
            generation.close()
        self.context.clear_all()

    def _deliver(self) -> None:
        if not self.outbox:
            return
        outbox, self.outbox = self.outbox, []
        try:
            self.loop.call_soon_threadsafe(_deliver_events, outbox)
        except RuntimeError:
            # The event loop is closed, so there are no readers.
            for generation in list(self.live.values()):
                self._end(generation)


def _compute(guides: Sequence[Guide]) -> None:
    for guide in guides:
        guide.compute()


def _deliver_events(outbox: Sequence[tuple[Generation, Sequence[Event] | DragomanError]]) -> None:
    for generation, batch in outbox:
        if isinstance(batch, DragomanError):
            generation.inbox.fail(batch)
        else:
            generation.inbox.put(batch)
            if type(batch[-1]) is Finished:
                generation.inbox.end()
