"""Compares the predictions of two models, token by token, on the same text.

divergence := mean of KL(original || other) over the text, in nats
agreement  := fraction of positions at which both models have the same most likely token
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from dragoman.engines.llama.binding import Context, LlamaModel
from dragoman.engines.llama.tuning.trial_messages import Quality

MAX_TOKENS = 512
BATCH_TOKENS = 32
"""Tokens per decode. Bounds the memory for logits."""

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

Logits = NDArray[np.float32]
ReportProgress = Callable[[float], object]


def compare(original: LlamaModel, other: LlamaModel, threads: int, progress: ReportProgress) -> Quality:
    tokens = original.tokenize_whole(TEXT)[:MAX_TOKENS]
    contexts = [_context(original, threads), _context(other, threads)]
    divergence, same = 0.0, 0
    try:
        for start in range(0, len(tokens), BATCH_TOKENS):
            batch = tokens[start : start + BATCH_TOKENS]
            expected, actual = (_logits(context, batch, start) for context in contexts)
            divergence += float(_divergences(expected, actual).sum())
            same += int((expected.argmax(axis=1) == actual.argmax(axis=1)).sum())
            progress((start + len(batch)) / len(tokens))
    finally:
        for context in contexts:
            context.close()
    return Quality(len(tokens), divergence / len(tokens), same / len(tokens))


def _context(model: LlamaModel, threads: int) -> Context:
    return Context(model, sequences=1, length=MAX_TOKENS, rows=BATCH_TOKENS, outputs=BATCH_TOKENS, threads=threads)


def _logits(context: Context, tokens: Sequence[int], start: int) -> Logits:
    rows = len(tokens)
    context.decode_or_fail(tokens, range(start, start + rows), [0] * rows, [True] * rows)
    return np.stack([context.logits(row) for row in range(rows)])


def _divergences(expected: Logits, actual: Logits) -> NDArray[np.float64]:
    p, q = _log_softmax(expected), _log_softmax(actual)
    rows: NDArray[np.float64] = (np.exp(p) * (p - q)).sum(axis=1)
    return rows


def _log_softmax(logits: Logits) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    rows: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return rows
