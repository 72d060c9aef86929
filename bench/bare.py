"""The bare loop: rows of different texts through `llama_decode`, the likeliest token of each, and again. What the
engine could reach if nothing else cost time. A process of its own: bench/engine.py.

python -m bench.bare MODEL THREADS TOKENS ROWS...        prints tokens per second for each number of rows
"""

import random
import sys
import time
from pathlib import Path

from dragoman.engines.llama.binding import Context, ContextParams, LlamaModel

PROMPT = 12


def speed(context: Context, rows: int, tokens: int) -> float:
    chance = random.Random(rows)
    context.clear_all()
    sampled = []
    for sequence in range(rows):
        prompt = chance.choices(range(1000, 20000), k=PROMPT)
        decode(context, prompt, list(range(PROMPT)), [sequence] * PROMPT)
        sampled.append(int(context.logits(PROMPT - 1).argmax()))
    begun = time.perf_counter()
    for position in range(PROMPT, PROMPT + tokens):
        decode(context, sampled, [position] * rows, list(range(rows)))
        sampled = [int(context.logits(row).argmax()) for row in range(rows)]
    return rows * tokens / (time.perf_counter() - begun)


def decode(context: Context, tokens: list[int], positions: list[int], sequences: list[int]) -> None:
    if code := context.decode(tokens, positions, sequences, [True] * len(tokens)):
        raise SystemExit(f"llama_decode failed with code {code}")


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
