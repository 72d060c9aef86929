"""The bare loop: decodes rows of different texts with llama.cpp and picks the most likely tokens, without an engine.

Run by bench/engine.py as `python -m bench.bare MODEL THREADS TOKENS ROWS...`. Prints the tokens per second for each
number of rows.
"""

import random
import sys
import time
from pathlib import Path

from dragoman.engines.llama.binding import Context, ContextParams, LlamaModel

PROMPT = 12


def speed(context: Context, rows: int, tokens: int) -> float:
    rng = random.Random(rows)
    context.clear_all()
    sampled = []
    for sequence in range(rows):
        prompt = rng.choices(range(1000, 20000), k=PROMPT)
        context.decode_or_fail(prompt, range(PROMPT), [sequence] * PROMPT, [True] * PROMPT)
        sampled.append(int(context.logits(PROMPT - 1).argmax()))
    begun = time.perf_counter()
    for position in range(PROMPT, PROMPT + tokens):
        context.decode_or_fail(sampled, [position] * rows, range(rows), [True] * rows)
        sampled = [int(context.logits(row).argmax()) for row in range(rows)]
    return rows * tokens / (time.perf_counter() - begun)


def main() -> None:
    path, threads, tokens, *rows = sys.argv[1:]
    counts = [int(count) for count in rows]
    model = LlamaModel(Path(path))
    most = max(*counts, PROMPT)
    params = ContextParams(sequences=max(counts), length=512, rows=most, outputs=most, threads=int(threads))
    context = Context(model, params)
    speed(context, 1, 8)
    print(*(speed(context, count, int(tokens)) for count in counts))
    context.close()
    model.close()


if __name__ == "__main__":
    main()
