"""Measures the speed of several files of one model.

Rules
1. The models take turns, so other load on the machine affects all of them.
2. The best of several rounds counts, because other load only makes a round slower.
3. llama.cpp's threads spin while it computes, so the CPU time of this process shows how much other processes took.
"""

import time
from collections.abc import Callable, Sequence

from dragoman.engines.llama.binding import Context, LlamaModel
from dragoman.engines.llama.tuning.trial_messages import Speed

PROMPT_ROWS = 64
STREAMS = 8
STEPS = 4
LENGTH = PROMPT_ROWS + STEPS
MIN_ROUNDS, MAX_ROUNDS = 2, 6
MAX_SECONDS = 3.0
"""No round begins after this time."""

ReportProgress = Callable[[float], object]


def measure(models: Sequence[LlamaModel], threads: int, progress: ReportProgress) -> tuple[list[Speed], float]:
    """Return each model's speed, and the fraction of its cores' time that the process got."""
    contexts = [_context(model, threads) for model in models]
    try:
        for context in contexts:
            _round(context)
        begin, used = time.perf_counter(), time.process_time()
        best = _best(contexts, progress)
        return best, (time.process_time() - used) / (time.perf_counter() - begin) / threads
    finally:
        for context in contexts:
            context.close()


def _best(contexts: Sequence[Context], progress: ReportProgress) -> list[Speed]:
    best = [Speed() for _ in contexts]
    begin = time.monotonic()
    for number in range(1, MAX_ROUNDS + 1):
        best = [_best_of(speed, _round(context)) for speed, context in zip(best, contexts, strict=True)]
        elapsed = time.monotonic() - begin
        progress(min(number / MIN_ROUNDS, max(number / MAX_ROUNDS, elapsed / MAX_SECONDS), 1.0))
        if number >= MIN_ROUNDS and elapsed > MAX_SECONDS:
            break
    return best


def _context(model: LlamaModel, threads: int) -> Context:
    rows = PROMPT_ROWS + STREAMS
    return Context(model, sequences=STREAMS, length=LENGTH, rows=rows, outputs=STREAMS, threads=threads)


def _round(context: Context) -> Speed:
    context.clear_all()
    prompt = _time_decode(context, range(PROMPT_ROWS), [0])
    one = sum(_time_decode(context, [PROMPT_ROWS + step], [0]) for step in range(STEPS))
    context.clear(0)
    eight = sum(_time_decode(context, [step], range(STREAMS)) for step in range(STEPS))
    return Speed(PROMPT_ROWS / prompt, STEPS / one, STREAMS * STEPS / eight)


def _time_decode(context: Context, positions: Sequence[int], sequences: Sequence[int]) -> float:
    """Return the seconds for one decode with a token at each of the positions in each of the sequences."""
    rows = [(position, sequence) for sequence in sequences for position in positions]
    begin = time.perf_counter()
    context.decode_or_fail(
        [0] * len(rows),
        [position for position, _ in rows],
        [sequence for _, sequence in rows],
        [position == positions[-1] for position, _ in rows],
    )

    # Some backends compute asynchronously. Reading the logits waits for them.
    context.logits(len(rows) - 1)
    return time.perf_counter() - begin


def _best_of(one: Speed, other: Speed) -> Speed:
    return Speed(max(one.prompt, other.prompt), max(one.one, other.one), max(one.eight, other.eight))
