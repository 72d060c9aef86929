"""The thread that makes vectors of texts.

    texts as tokens ──seat──> rows of one or more steps ──all rows in──> pooled, length 1
    a job is the texts of one request; it is answered when all of them are done

Rules
1. A step lasts about STEP_SECONDS. While the model also writes for somebody the steps are as short as is sensible, and
   between two of them the other thread has as much time as the first one took.
2. A text goes in by chunks, as steps allow. Of a model that looks ahead it goes in whole, and a step has at least one.
3. The seated texts have room in the decoder's memory; jobs take turns for free seats.
4. No exception ends the thread: what is not understood fails the jobs at hand, empties the memory and goes on.
"""

import asyncio
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from dragoman.core.embeddings import Embedding, Input, each
from dragoman.core.errors import BadRequest, ContextTooLong, DragomanError, EngineFailed
from dragoman.engines.llama.binding import Context, Model, Vectors
from dragoman.engines.llama.compute_thread import STOPPED, Turns
from dragoman.engines.llama.pace import Pace
from dragoman.engines.llama.scheduler import share
from dragoman.engines.prompt_reader import check_tokens

log = logging.getLogger("dragoman.engine")

STEP_SECONDS = 0.25
LEAST_ROWS = 32
"""Smaller chunks cost more speed than they save waiting."""
POLITE_SECONDS = 0.05
"""How long a step lasts while somebody waits for the next word."""
READ_ANYWAY = 256 * 1024
"""Bytes of a text that are always looked at: where there is little but blanks, they may be few tokens."""


class Job:
    """The texts of one request, and their vectors as they come."""

    def __init__(self, texts: Sequence[Sequence[int]], loop: asyncio.AbstractEventLoop) -> None:
        self.texts = texts
        self.made: list[Embedding | None] = [None] * len(texts)
        self.begun = 0
        self.left = len(texts)
        self.loop = loop
        self.future: asyncio.Future[list[Embedding]] = loop.create_future()

    def end(self, error: DragomanError | None = None) -> None:
        try:
            self.loop.call_soon_threadsafe(self._tell, error)
        except RuntimeError:
            # The event loop is gone, and every reader with it.
            pass

    def _tell(self, error: DragomanError | None) -> None:
        if self.future.done():
            return
        if error is None:
            self.future.set_result([made for made in self.made if made is not None])
        else:
            self.future.set_exception(error)


class _Seat:
    """A text on its way through the decoder."""

    def __init__(self, job: Job, index: int, sequence: int, width: int) -> None:
        self.job = job
        self.index = index
        self.tokens = job.texts[index]
        self.sequence = sequence
        self.done = 0
        self.pooled: NDArray[np.float64] = np.zeros(width)

    @property
    def missing(self) -> int:
        return len(self.tokens) - self.done

    def take(self, vectors: Vectors, pooling: str) -> None:
        """The vectors of its next tokens."""
        if pooling == "mean":
            self.pooled += vectors.sum(axis=0, dtype=np.float64)
        elif pooling == "last":
            self.pooled[:] = vectors[-1]
        elif self.done == 0:
            self.pooled[:] = vectors[0]
        self.done += len(vectors)


class Cancel:
    def __init__(self, job: Job) -> None:
        self.job = job


class Embedder:
    """`length` is the most tokens of a text, `rows` the most that a step takes. The decoder is made when it is first
    needed; `is_writing` tells whether the model is being waited for elsewhere."""

    def __init__(
        self,
        model: Model,
        make: Callable[[], Context],
        *,
        length: int,
        sequences: int,
        rows: int,
        turns: Turns,
        is_writing: Callable[[], bool] = lambda: False,
    ) -> None:
        self.model = model
        self.make = make
        self.length = length
        self.turns = turns
        self.is_writing = is_writing
        self.pooling = model.pooling
        self.calm = Pace(STEP_SECONDS, least=LEAST_ROWS, most=rows)
        self.polite = Pace(POLITE_SECONDS, least=LEAST_ROWS, most=rows)
        self.context: Context | None = None
        self.jobs: deque[Job] = deque()
        self.seats: list[_Seat] = []
        self.free = list(range(sequences))
        self.commands: queue.SimpleQueue[Job | Cancel | None] = queue.SimpleQueue()
        self.closed = False
        self.stopping = False
        self.thread = threading.Thread(target=self._work, name="dragoman-embed", daemon=True)

    # For any thread.

    def read(self, inputs: Sequence[Input]) -> list[Sequence[int]]:
        """The inputs as tokens, checked."""
        return each(inputs, self._tokens)

    def _tokens(self, entry: Input) -> Sequence[int]:
        if isinstance(entry, str):
            size = len(entry.encode("utf-8", "replace"))
            if size > max(self.length * self.model.longest_piece, READ_ANYWAY):
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
        words = f"this model's maximum context length is {self.length} tokens, but the input has {tokens}"
        return ContextTooLong(words, param="input")

    # In the event loop.

    def start(self) -> None:
        self.thread.start()

    def submit(self, texts: Sequence[Sequence[int]]) -> Job:
        job = Job(texts, asyncio.get_running_loop())
        if self.closed:
            job.end(EngineFailed(STOPPED))
        else:
            self.commands.put(job)
        return job

    def cancel(self, job: Job) -> None:
        self.commands.put(Cancel(job))

    def close(self) -> None:
        """Take no more jobs, and fail those at hand."""
        self.closed = True
        self.commands.put(None)

    def join(self) -> None:
        """Wait for the step at hand and free the decoder; for any thread."""
        if self.thread.ident is not None:
            self.thread.join()
        if self.context is not None:
            self.context.close()

    def prepare(self) -> None:
        """Make the decoder now, and see whether it runs."""
        self.context = self.make()
        code = self.context.decode([0], [0], [0], [True])
        if code:
            raise EngineFailed(f"the model could not be run (code {code})")
        self.context.clear_all()

    # In the thread.

    def _work(self) -> None:
        while not self.stopping:
            try:
                self._take_commands()
                if self.jobs or self.seats:
                    self._take_turn()
            except Exception as error:
                log.exception("vectors could not be made")
                failure = EngineFailed("the engine failed; the server's log says more")
                self._start_over(error if isinstance(error, DragomanError) else failure)
        self._start_over(EngineFailed(STOPPED))

    def _take_commands(self) -> None:
        """Everything that has come; waits where there is nothing else to do."""
        block = not (self.jobs or self.seats)
        while True:
            try:
                command = self.commands.get(block=block)
            except queue.Empty:
                return
            block = False
            if command is None:
                self.stopping = True
                return
            if isinstance(command, Cancel):
                self._drop(command.job)
            else:
                self.jobs.append(command)

    def _take_turn(self) -> None:
        polite = self.is_writing()
        seconds = self.turns.run(self._step, self.polite if polite else self.calm)
        if polite:
            time.sleep(min(seconds, STEP_SECONDS))

    def _step(self, pace: Pace) -> float:
        """One decode; the seconds that it took."""
        if self.context is None:
            self.prepare()
        assert self.context is not None
        self._fill(pace.chunk)
        begun = time.monotonic()
        rows = self._decode(self.context, self._counts(pace.chunk))
        seconds = time.monotonic() - begun
        pace.took(rows, seconds)
        while done := next((seat for seat in self.seats if not seat.missing), None):
            self._finish(done)
        return seconds

    def _fill(self, budget: int) -> None:
        """Seat texts, of each job in turn."""
        taken = sum(len(seat.tokens) for seat in self.seats)
        while self.free and self.jobs:
            job = self.jobs[0]
            taken += len(job.texts[job.begun])
            if self.seats and taken > (budget if self.model.looks_ahead else self.length):
                return
            self.seats.append(_Seat(job, job.begun, self.free.pop(), self.context.width if self.context else 0))
            job.begun += 1
            self.jobs.rotate(-1)
            if job.begun == len(job.texts):
                self.jobs.remove(job)

    def _counts(self, budget: int) -> list[int]:
        """How many rows of the next step each seat has."""
        missing = [seat.missing for seat in self.seats]
        return missing if self.model.looks_ahead else share(missing, budget)

    def _decode(self, context: Context, counts: Sequence[int]) -> int:
        chunks = [(seat, count) for seat, count in zip(self.seats, counts, strict=True) if count]
        tokens = [token for seat, count in chunks for token in seat.tokens[seat.done : seat.done + count]]
        positions = [at for seat, count in chunks for at in range(seat.done, seat.done + count)]
        sequences = [seat.sequence for seat, count in chunks for _ in range(count)]
        code = context.decode(tokens, positions, sequences, [True] * len(tokens))
        if code:
            raise EngineFailed(f"the model could not be run (code {code})")
        vectors, row = context.vectors(len(tokens)), 0
        for seat, count in chunks:
            seat.take(vectors[row : row + count], self.pooling)
            row += count
        return row

    def _finish(self, seat: _Seat) -> None:
        job = seat.job
        try:
            job.made[seat.index] = Embedding.of(seat.pooled, len(seat.tokens))
        except ValueError as error:
            self._drop(job)
            job.end(EngineFailed(f"the model failed: {error}"))
            return
        job.left -= 1
        self._free(seat)
        if not job.left:
            job.end()

    def _free(self, seat: _Seat) -> None:
        self.seats.remove(seat)
        self.free.append(seat.sequence)
        if self.context is not None:
            self.context.clear(seat.sequence)

    def _drop(self, job: Job) -> None:
        if job in self.jobs:
            self.jobs.remove(job)
        for seat in [seat for seat in self.seats if seat.job is job]:
            self._free(seat)

    def _start_over(self, error: DragomanError) -> None:
        for job in {*self.jobs, *(seat.job for seat in self.seats)}:
            self._drop(job)
            job.end(error)
        if self.context is not None:
            self.context.clear_all()
