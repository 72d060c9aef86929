"""Creates embeddings, in the compute thread.

    tokens of a text ──sequence──> rows of one or more steps ──all rows decoded──> pooled and normalized vector

A job holds the texts of one request. It completes when all of them are done.

Rules
1. A step takes about STEP_SECONDS. While the model also generates text, steps take BUSY_STEP_SECONDS, and the embedder
   pauses after each step for as long as the step took.
2. A text is decoded in chunks: half of the rows of a step go to the oldest text, the rest to the shortest ones. For a
   bidirectional model a text is decoded whole, and a step has at least one text.
3. Each active text has a sequence of the decoder's memory. Jobs take turns for free sequences.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial

import numpy as np
from numpy.typing import NDArray

from dragoman.core.embeddings import Embedding, Input, map_inputs
from dragoman.core.errors import DragomanError, EngineFailed
from dragoman.engines.llama.binding import Context, ContextParams, LlamaModel, Vectors
from dragoman.engines.llama.compute_thread import ComputeThread, StepPace
from dragoman.engines.llama.prefill_shares import shortest_first
from dragoman.engines.prompt_reader import read_embedding_input

STEP_SECONDS = 0.25
MIN_ROWS = 32
"""Smaller chunks lose more speed than they reduce the wait."""
BUSY_STEP_SECONDS = 0.05


class EmbeddingJob:
    """The texts of one request. The future gets their embeddings."""

    def __init__(self, texts: Sequence[Sequence[int]]) -> None:
        self.texts = texts
        self.next_index = 0
        self.results: dict[int, Embedding] = {}
        self.future: Future[list[Embedding]] = Future()


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
    """Creates embeddings of texts of up to `length` tokens, with a context that is created on first use."""

    def __init__(
        self,
        model: LlamaModel,
        params: ContextParams,
        length: int,
        compute_thread: ComputeThread,
        is_generating: Callable[[], bool] = lambda: False,
    ) -> None:
        """`is_generating` returns whether the model is also generating text."""
        self.model = model
        self.params = params
        self.length = length
        self.compute_thread = compute_thread
        self.is_generating = is_generating
        self.pace = StepPace(STEP_SECONDS, minimum=MIN_ROWS, maximum=params.rows)
        self.busy_pace = StepPace(BUSY_STEP_SECONDS, minimum=MIN_ROWS, maximum=params.rows)
        self.paused_until = 0.0
        self.context: Context | None = None
        self.jobs: deque[EmbeddingJob] = deque()
        self.active: list[_ActiveText] = []
        self.free_sequences = list(range(params.sequences))

    # Called in any thread

    def read(self, inputs: Sequence[Input]) -> list[Sequence[int]]:
        """Tokenize and check the inputs."""
        return map_inputs(inputs, lambda entry: read_embedding_input(self.model, entry, self.length))

    # Called in the event loop

    def submit(self, texts: Sequence[Sequence[int]]) -> EmbeddingJob:
        self.compute_thread.require_open()
        job = EmbeddingJob(texts)
        self.compute_thread.call(self, partial(self.jobs.append, job))
        return job

    def cancel(self, job: EmbeddingJob) -> None:
        self.compute_thread.call(self, partial(self._drop, job))

    # Called in the compute thread

    def prepare(self) -> Context:
        self.context = Context(self.model, self.params)
        self.context.warm_up()
        return self.context

    @property
    def has_work(self) -> bool:
        if not self.jobs and not self.active:
            return False
        return time.monotonic() >= self.paused_until or not self.is_generating()

    def step(self) -> None:
        context = self.context or self.prepare()
        is_generating = self.is_generating()
        pace = self.busy_pace if is_generating else self.pace
        self._activate_texts(pace.rows, context.width)
        begun = time.monotonic()
        rows = self._decode(context, pace.rows)
        ended = time.monotonic()
        pace.record(rows, ended - begun)
        if is_generating:
            self.paused_until = ended + min(ended - begun, STEP_SECONDS)
        while done := next((text for text in self.active if not text.missing), None):
            self._finish(done)

    def reset(self, error: DragomanError) -> None:
        for job in {*self.jobs, *(text.job for text in self.active)}:
            self._fail(job, error)
        if self.context is not None:
            self.context.clear_all()

    def close(self) -> None:
        if self.context is not None:
            self.context.close()

    def _activate_texts(self, budget: int, width: int) -> None:
        """Give free sequences to waiting texts, one of each job in turn."""
        limit = budget if self.model.is_bidirectional else self.length
        tokens = sum(len(text.tokens) for text in self.active)
        while self.free_sequences and self.jobs:
            job = self.jobs[0]
            tokens += len(job.texts[job.next_index])
            if self.active and tokens > limit:
                return
            self.active.append(_ActiveText(job, job.next_index, self.free_sequences.pop(), width))
            job.next_index += 1
            self.jobs.rotate(-1)
            if job.next_index == len(job.texts):
                self.jobs.remove(job)

    def _decode(self, context: Context, budget: int) -> int:
        """Decode rows of the active texts and return their number."""
        missing = [text.missing for text in self.active]
        counts = missing if self.model.is_bidirectional else shortest_first(missing, budget)
        chunks = [(text, count) for text, count in zip(self.active, counts, strict=True) if count]
        tokens = [token for text, count in chunks for token in text.tokens[text.done : text.done + count]]
        positions = [position for text, count in chunks for position in range(text.done, text.done + count)]
        sequences = [text.sequence for text, count in chunks for _ in range(count)]
        context.decode_or_fail(tokens, positions, sequences, [True] * len(tokens))
        vectors, row = context.vectors(len(tokens)), 0
        for text, count in chunks:
            text.add(vectors[row : row + count], self.model.pooling)
            row += count
        return row

    def _finish(self, text: _ActiveText) -> None:
        job = text.job
        self._free(text)
        try:
            job.results[text.index] = Embedding.of(text.pooled, len(text.tokens))
        except ValueError as error:
            self._fail(job, EngineFailed(f"the model failed: {error}"))
            return
        if len(job.results) == len(job.texts) and job.future.set_running_or_notify_cancel():
            job.future.set_result([job.results[at] for at in range(len(job.texts))])

    def _free(self, text: _ActiveText) -> None:
        self.active.remove(text)
        self.free_sequences.append(text.sequence)
        if self.context is not None:
            self.context.clear(text.sequence)

    def _fail(self, job: EmbeddingJob, error: DragomanError) -> None:
        self._drop(job)
        if job.future.set_running_or_notify_cancel():
            job.future.set_exception(error)

    def _drop(self, job: EmbeddingJob) -> None:
        if job in self.jobs:
            self.jobs.remove(job)
        for text in [text for text in self.active if text.job is job]:
            self._free(text)
