"""The thread that creates embeddings.

    tokens of a text ──sequence──> rows of one or more steps ──all rows decoded──> pooled and normalized vector

A job holds the texts of one request. It completes when all of them are done.

Rules
1. A step takes about STEP_SECONDS. While the model also generates text, steps take BUSY_STEP_SECONDS, and the thread
   pauses after each step for as long as the step took.
2. A text is decoded in chunks. For a bidirectional model it is decoded whole, and a step has at least one text.
3. Each active text has a sequence of the decoder's memory. Jobs take turns for free sequences.
4. No exception ends the thread: an unexpected one fails the current jobs and clears the memory.
"""

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from dragoman.core.embeddings import Embedding, Input, map_inputs
from dragoman.core.errors import BadRequest, ContextTooLong, DragomanError, EngineFailed
from dragoman.engines.llama.binding import Context, LlamaModel, Vectors
from dragoman.engines.llama.compute_thread import STOPPED, ComputeThread
from dragoman.engines.llama.pace import StepPace
from dragoman.engines.llama.scheduler import share
from dragoman.engines.prompt_reader import check_tokens

log = logging.getLogger("dragoman.engine")

STEP_SECONDS = 0.25
MIN_ROWS = 32
"""Smaller chunks lose more speed than they reduce the wait."""
BUSY_STEP_SECONDS = 0.05
MAX_UNCHECKED_BYTES = 256 * 1024
"""Texts up to this size are always tokenized. Long runs of blanks may be few tokens."""


class EmbeddingJob:
    """The texts of one request and their embeddings."""

    def __init__(self, texts: Sequence[Sequence[int]], loop: asyncio.AbstractEventLoop) -> None:
        self.texts = texts
        self.results: list[Embedding | None] = [None] * len(texts)
        self.next_index = 0
        self.pending = len(texts)
        self.loop = loop
        self.future: asyncio.Future[list[Embedding]] = loop.create_future()

    def end(self, error: DragomanError | None = None) -> None:
        # RuntimeError: the event loop is closed.
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self._set_future, error)

    def _set_future(self, error: DragomanError | None) -> None:
        if self.future.done():
            return
        if error is None:
            self.future.set_result([result for result in self.results if result is not None])
        else:
            self.future.set_exception(error)


class _ActiveText:
    """A text that has a sequence in the decoder's memory."""

    def __init__(self, job: EmbeddingJob, index: int, sequence: int, width: int) -> None:
        self.job = job
        self.index = index
        self.tokens = job.texts[index]
        self.sequence = sequence
        self.done = 0
        self.pooled: NDArray[np.float64] = np.zeros(width)

    @property
    def missing(self) -> int:
        return len(self.tokens) - self.done

    def add(self, vectors: Vectors, pooling: str) -> None:
        """Pool the vectors of the next tokens."""
        if pooling == "mean":
            self.pooled += vectors.sum(axis=0, dtype=np.float64)
        elif pooling == "last":
            self.pooled[:] = vectors[-1]
        elif self.done == 0:
            self.pooled[:] = vectors[0]
        self.done += len(vectors)


class Embedder:
    """Creates embeddings in a thread of its own.

    `length` is the maximum number of tokens of a text, `rows` of a step. `create_context` is called on first use.
    `is_generating` returns whether the model is also generating text.
    """

    def __init__(
        self,
        model: LlamaModel,
        create_context: Callable[[], Context],
        *,
        length: int,
        sequences: int,
        rows: int,
        compute_thread: ComputeThread,
        is_generating: Callable[[], bool] = lambda: False,
    ) -> None:
        self.model = model
        self.create_context = create_context
        self.length = length
        self.compute_thread = compute_thread
        self.is_generating = is_generating
        self.pooling = model.pooling
        self.pace = StepPace(STEP_SECONDS, minimum=MIN_ROWS, maximum=rows)
        self.busy_pace = StepPace(BUSY_STEP_SECONDS, minimum=MIN_ROWS, maximum=rows)
        self.context: Context | None = None
        self.jobs: deque[EmbeddingJob] = deque()
        self.active: list[_ActiveText] = []
        self.free_sequences = list(range(sequences))
        self.commands: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self.closed = False
        self.stopping = False
        self.thread = threading.Thread(target=self._work, name="dragoman-embed", daemon=True)

    # For any thread.

    def read(self, inputs: Sequence[Input]) -> list[Sequence[int]]:
        """Tokenize and check the inputs."""
        return map_inputs(inputs, self._read_input)

    def _read_input(self, entry: Input) -> Sequence[int]:
        if isinstance(entry, str):
            size = len(entry.encode("utf-8", "replace"))
            if size > max(self.length * self.model.longest_piece, MAX_UNCHECKED_BYTES):
                raise self._too_long(f"more than {self.length}")
            tokens: Sequence[int] = self.model.tokenize_whole(entry)
        else:
            tokens = entry
            check_tokens(self.model, tokens, "input")
        if not tokens:
            raise BadRequest("the input is empty", param="input")
        if len(tokens) > self.length:
            raise self._too_long(str(len(tokens)))
        return tokens

    def _too_long(self, tokens: str) -> ContextTooLong:
        message = f"this model's maximum context length is {self.length} tokens, but the input has {tokens}"
        return ContextTooLong(message, param="input")

    # In the event loop.

    def start(self) -> None:
        self.thread.start()

    def submit(self, texts: Sequence[Sequence[int]]) -> EmbeddingJob:
        job = EmbeddingJob(texts, asyncio.get_running_loop())
        if self.closed:
            job.end(EngineFailed(STOPPED))
        else:
            self.commands.put(partial(self.jobs.append, job))
        return job

    def cancel(self, job: EmbeddingJob) -> None:
        self.commands.put(partial(self._drop, job))

    def close(self) -> None:
        """Accept no more jobs and fail the current ones."""
        self.closed = True
        self.commands.put(partial(setattr, self, "stopping", True))

    def join(self) -> None:
        """Wait for the current step and free the context. May be called from any thread."""
        if self.thread.ident is not None:
            self.thread.join()
        if self.context is not None:
            self.context.close()

    def prepare(self) -> None:
        """Create the context and check that the model runs."""
        self.context = self.create_context()
        self.context.decode_or_fail([0], [0], [0], [True])
        self.context.clear_all()

    # In the thread.

    def _work(self) -> None:
        while not self.stopping:
            try:
                self._handle_commands()
                if self.jobs or self.active:
                    self._run_step()
            except Exception as error:
                log.exception("embeddings could not be created")
                failure = EngineFailed("the engine failed; see the server log")
                self._reset(error if isinstance(error, DragomanError) else failure)
        self._reset(EngineFailed(STOPPED))

    def _handle_commands(self) -> None:
        """Handle all queued commands. Waits for one if there is nothing to compute."""
        block = not (self.jobs or self.active)
        with contextlib.suppress(queue.Empty):
            while not self.stopping:
                self.commands.get(block=block)()
                block = False

    def _run_step(self) -> None:
        is_generating = self.is_generating()
        seconds = self.compute_thread.run(self._step, self.busy_pace if is_generating else self.pace)
        if is_generating:
            time.sleep(min(seconds, STEP_SECONDS))

    def _step(self, pace: StepPace) -> float:
        """Decode once and return how many seconds that took."""
        if self.context is None:
            self.prepare()
        assert self.context is not None
        self._activate_texts(pace.rows)
        started = time.monotonic()
        rows = self._decode(self.context, self._row_counts(pace.rows))
        seconds = time.monotonic() - started
        pace.record(rows, seconds)
        while done := next((text for text in self.active if not text.missing), None):
            self._finish(done)
        return seconds

    def _activate_texts(self, budget: int) -> None:
        """Give free sequences to waiting texts, one of each job in turn."""
        tokens = sum(len(text.tokens) for text in self.active)
        while self.free_sequences and self.jobs:
            job = self.jobs[0]
            tokens += len(job.texts[job.next_index])
            if self.active and tokens > (budget if self.model.is_bidirectional else self.length):
                return
            width = self.context.width if self.context else 0
            self.active.append(_ActiveText(job, job.next_index, self.free_sequences.pop(), width))
            job.next_index += 1
            self.jobs.rotate(-1)
            if job.next_index == len(job.texts):
                self.jobs.remove(job)

    def _row_counts(self, budget: int) -> list[int]:
        """Return the number of rows of each active text in the next step."""
        missing = [text.missing for text in self.active]
        return missing if self.model.is_bidirectional else share(missing, budget)

    def _decode(self, context: Context, counts: Sequence[int]) -> int:
        chunks = [(text, count) for text, count in zip(self.active, counts, strict=True) if count]
        tokens = [token for text, count in chunks for token in text.tokens[text.done : text.done + count]]
        positions = [position for text, count in chunks for position in range(text.done, text.done + count)]
        sequences = [text.sequence for text, count in chunks for _ in range(count)]
        context.decode_or_fail(tokens, positions, sequences, [True] * len(tokens))
        vectors, row = context.vectors(len(tokens)), 0
        for text, count in chunks:
            text.add(vectors[row : row + count], self.pooling)
            row += count
        return row

    def _finish(self, text: _ActiveText) -> None:
        job = text.job
        try:
            job.results[text.index] = Embedding.of(text.pooled, len(text.tokens))
        except ValueError as error:
            self._drop(job)
            job.end(EngineFailed(f"the model failed: {error}"))
            return
        job.pending -= 1
        self._free(text)
        if not job.pending:
            job.end()

    def _free(self, text: _ActiveText) -> None:
        self.active.remove(text)
        self.free_sequences.append(text.sequence)
        if self.context is not None:
            self.context.clear(text.sequence)

    def _drop(self, job: EmbeddingJob) -> None:
        if job in self.jobs:
            self.jobs.remove(job)
        for text in [text for text in self.active if text.job is job]:
            self._free(text)

    def _reset(self, error: DragomanError) -> None:
        for job in {*self.jobs, *(text.job for text in self.active)}:
            self._drop(job)
            job.end(error)
        if self.context is not None:
            self.context.clear_all()
