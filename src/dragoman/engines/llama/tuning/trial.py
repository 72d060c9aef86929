"""Measures one candidate: a file of a model, with a number of threads.

    python -m dragoman.engines.llama.tuning.trial ORIGINAL FILE THREADS         prints a `Measurement` as JSON

divergence := mean of KL(original || file) over the text, in nats

Rules
1. A trial is a process of its own because llama.cpp may crash, and to measure the memory of one candidate.
2. The best of several rounds counts, because other load only makes a round slower.
"""

import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from dragoman.core.errors import DragomanError
from dragoman.engines.llama.binding import Context, LlamaModel
from dragoman.engines.llama.tuning.record import Measurement

PROMPT_ROWS = 64
STREAMS = 8
STEPS = 4
MIN_ROUNDS, MAX_ROUNDS = 2, 6
MAX_SECONDS = 3.0
"""No round begins after this time."""
MAX_TOKENS = 512
BATCH_TOKENS = 32
"""Tokens per decode of the text. Bounds the memory for logits."""

TEXT = """\
The ferry left at ten past six, while the harbour was still grey. On deck a woman with a green suitcase asked
the mate how long the crossing would take. "Four hours if the wind stays where it is," he said, "and five if
it turns. You will want a coat." She had none, so he lent her his, which smelled of rope and tobacco, and they
stood by the rail until the lighthouse was a small white tooth behind them.

A mixture of two gases at the same temperature has a pressure that is the sum of the pressures which each of
them would have alone. John Dalton found this in 1801. It follows from the fact that the molecules of an ideal
gas do not notice each other: every kind of molecule hits the walls as often as if the others were not there.
At 20 degrees Celsius, air with a relative humidity of 50 % contains about 8.6 grams of water per cubic metre;
the same air at 30 degrees could hold 30.4 grams.

def median(values):
    ordered = sorted(values)
    middle = len(ordered) // 2
    if len(ordered) % 2 == 1:
        return ordered[middle]
    return (ordered[middle - 1] + ordered[middle]) / 2

Question: A baker sells 36 rolls in the first hour and half as many in each hour after that. How many rolls
has she sold after three hours? Answer: In the first hour she sells 36, in the second 18 and in the third 9.
Together these are 36 + 18 + 9 = 63 rolls.

To make the soup, cut two onions and three carrots into small pieces and fry them in butter until they are
soft. Add a litre of stock, a bay leaf and 200 grams of red lentils. Let everything simmer for twenty minutes,
then take out the bay leaf and season with salt, pepper and a little lemon juice. Serve it with bread.

{"name": "Ada", "born": 1815, "languages": ["English", "French"], "married": true, "children": 3}
"""


def measure(original: Path, file: Path, threads: int) -> Measurement:
    model = LlamaModel(file)
    prompt, one, eight = _measure_speed(model, threads)
    kilobyte = 1 if sys.platform == "darwin" else 1024
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * kilobyte
    if file == original:
        return Measurement(prompt, one, eight, memory)
    return Measurement(prompt, one, eight, memory, _measure_divergence(LlamaModel(original), model, threads))


def _measure_speed(model: LlamaModel, threads: int) -> list[float]:
    """Return the tokens per second of a prompt, of one stream and of eight streams."""
    rows, length = PROMPT_ROWS + STREAMS, PROMPT_ROWS + STEPS
    context = Context(model, sequences=STREAMS, length=length, rows=rows, outputs=STREAMS, threads=threads)
    # The first round loads the weights into memory.
    _run_round(context)
    rounds: list[tuple[float, float, float]] = []
    end = time.monotonic() + MAX_SECONDS
    while len(rounds) < MIN_ROUNDS or (len(rounds) < MAX_ROUNDS and time.monotonic() < end):
        rounds.append(_run_round(context))
    return [max(speeds) for speeds in zip(*rounds, strict=True)]


def _run_round(context: Context) -> tuple[float, float, float]:
    context.clear_all()
    prompt = _time_decode(context, range(PROMPT_ROWS), [0])
    one = sum(_time_decode(context, [PROMPT_ROWS + step], [0]) for step in range(STEPS))
    context.clear(0)
    eight = sum(_time_decode(context, [step], range(STREAMS)) for step in range(STEPS))
    return PROMPT_ROWS / prompt, STEPS / one, STREAMS * STEPS / eight


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


def _measure_divergence(original: LlamaModel, other: LlamaModel, threads: int) -> float:
    tokens = original.tokenize_whole(TEXT)[:MAX_TOKENS]
    size, rows = MAX_TOKENS, BATCH_TOKENS
    contexts = [
        Context(model, sequences=1, length=size, rows=rows, outputs=rows, threads=threads)
        for model in (original, other)
    ]
    divergence = 0.0
    for start in range(0, len(tokens), BATCH_TOKENS):
        batch = tokens[start : start + BATCH_TOKENS]
        p, q = (_decode_log_probabilities(context, batch, start) for context in contexts)
        divergence += float((np.exp(p) * (p - q)).sum())
    return divergence / len(tokens)


def _decode_log_probabilities(context: Context, tokens: Sequence[int], start: int) -> NDArray[np.float64]:
    rows = len(tokens)
    context.decode_or_fail(tokens, range(start, start + rows), [0] * rows, [True] * rows)
    logits = np.stack([context.logits(row) for row in range(rows)]).astype(np.float64)
    shifted = logits - logits.max(axis=1, keepdims=True)
    found: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return found


if __name__ == "__main__":
    try:
        result = measure(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
    except DragomanError as error:
        sys.exit(str(error))
    sys.stdout.write(msgspec.json.encode(result).decode())
