"""How fast files of the same model are here, side by side.

Rules
1. The files take turns, so that what else the machine does hits all of them.
2. The best of several rounds counts: other work only ever makes a round slower.
3. llama.cpp's threads never rest while it computes. So the part of its cores' time that the process has had tells how
   much of them others took.
"""

import time
from collections.abc import Callable, Sequence

from dragoman.core.errors import EngineFailed
from dragoman.engines.llama.binding import Context, Model
from dragoman.engines.llama.tuning.messages import Speed

PROMPT_ROWS = 64
STREAMS = 8
STEPS = 4
LENGTH = PROMPT_ROWS + STEPS
LEAST_ROUNDS, MOST_ROUNDS = 2, 6
SECONDS = 3.0
"""After which no further round begins."""

Progress = Callable[[float], object]


def measure(models: Sequence[Model], threads: int, progress: Progress) -> tuple[list[Speed], float]:
    """How fast each is, and which part of its cores' time the process has had."""
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


def _best(contexts: Sequence[Context], progress: Progress) -> list[Speed]:
    best = [Speed() for _ in contexts]
    begin = time.monotonic()
    for number in range(1, MOST_ROUNDS + 1):
        best = [_better(known, _round(context)) for known, context in zip(best, contexts, strict=True)]
        passed = time.monotonic() - begin
        progress(min(number / LEAST_ROUNDS, max(number / MOST_ROUNDS, passed / SECONDS), 1.0))
        if number >= LEAST_ROUNDS and passed > SECONDS:
            break
    return best


def _context(model: Model, threads: int) -> Context:
    rows = PROMPT_ROWS + STREAMS
    return Context(model, sequences=STREAMS, length=LENGTH, rows=rows, outputs=STREAMS, threads=threads)


def _round(context: Context) -> Speed:
    context.clear_all()
    prompt = _seconds(context, range(PROMPT_ROWS), [0])
    one = sum(_seconds(context, [PROMPT_ROWS + step], [0]) for step in range(STEPS))
    context.clear(0)
    eight = sum(_seconds(context, [step], range(STREAMS)) for step in range(STEPS))
    return Speed(PROMPT_ROWS / prompt, STEPS / one, STREAMS * STEPS / eight)


def _seconds(context: Context, positions: Sequence[int], sequences: Sequence[int]) -> float:
    """What one decode takes that puts tokens at these positions of each of the sequences."""
    rows = [(position, sequence) for sequence in sequences for position in positions]
    begin = time.perf_counter()
    code = context.decode(
        [0] * len(rows),
        [position for position, _ in rows],
        [sequence for _, sequence in rows],
        [position == positions[-1] for position, _ in rows],
    )
    if code:
        raise EngineFailed(f"the model does not run (code {code})")
    # Some backends go on after the call; whoever reads the logits waits for them.
    context.logits(len(rows) - 1)
    return time.perf_counter() - begin


def _better(one: Speed, other: Speed) -> Speed:
    return Speed(max(one.prompt, other.prompt), max(one.one, other.one), max(one.eight, other.eight))
