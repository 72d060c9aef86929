"""Measures the cost of a schema: tokens per second of the llama engine with and without one.

    python -m bench.constraints [--quick]

SmolLM2 runs in this process, with one stream and with eight. Each round decodes the same number of tokens from the same
prompt, once without and once with a schema that no reply of this length completes. The figure is the median of the
ratios of the rounds. Prompt and first token do not count.
"""

import argparse
import asyncio
import statistics
import time
from collections.abc import Sequence

from dragoman.core.events import Event, Finished
from dragoman.core.request import GenerationRequest, JsonSchema, Message, Sampling, Text
from dragoman.engines.llama.engine import LlamaEngine
from dragoman.engines.llama.options import LlamaOptions
from dragoman.files import sources

STREAMS = (1, 8)
TARGET = 0.9
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "email": {"type": "string", "pattern": "^[a-z.]{1,20}@[a-z]{1,12}\\.(com|org)$"},
        "role": {"enum": ["author", "editor", "reader"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 4},
    },
    "required": ["name", "age", "email", "role", "tags"],
    "additionalProperties": False,
}
SCHEMA = JsonSchema({"type": "array", "items": PERSON, "minItems": 500})
PROMPT = "List the people of a small town as JSON, with name, age, email, role and tags."


def build_request(constrained: bool, tokens: int, seed: int) -> GenerationRequest:
    return GenerationRequest(
        messages=(Message("user", (Text(PROMPT),)),),
        constraint=SCHEMA if constrained else None,
        sampling=Sampling(temperature=0.8, seed=seed),
        max_tokens=tokens,
        ignore_eos=True,
    )


async def decode(engine: LlamaEngine, request: GenerationRequest) -> tuple[float, float, int]:
    """Return the times of the first and the last token, and the number of tokens after the first."""
    begun, count = 0.0, -1

    def on_events(events: Sequence[Event]) -> None:
        nonlocal begun, count
        begun = begun or time.perf_counter()
        last = events[-1]
        if isinstance(last, Finished) and last.usage is not None:
            count = last.usage.completion - 1

    await engine.deliver(request, on_events)
    return begun, time.perf_counter(), count


async def speed(engine: LlamaEngine, constrained: bool, streams: int, tokens: int) -> float:
    """Return the tokens per second of all streams together."""
    found = await asyncio.gather(*(decode(engine, build_request(constrained, tokens, seed)) for seed in range(streams)))
    return rate(found)


def rate(found: Sequence[tuple[float, float, int]]) -> float:
    """Return the tokens per second of streams, as returned by `decode`, while any of them was decoding."""
    seconds = max(end for _, end, _ in found) - min(begun for begun, _, _ in found)
    return sum(count for _, _, count in found) / seconds


async def measure(engine: LlamaEngine, streams: int, rounds: int, tokens: int) -> list[tuple[float, float]]:
    pairs = []
    for at in range(rounds):
        order = (False, True) if at % 2 else (True, False)
        speeds = {constrained: await speed(engine, constrained, streams, tokens) for constrained in order}
        pairs.append((speeds[False], speeds[True]))
    return pairs


def show(streams: int, pairs: Sequence[tuple[float, float]]) -> None:
    free, kept = (statistics.median(column) for column in zip(*pairs, strict=True))
    ratio = statistics.median(with_schema / without for without, with_schema in pairs)
    verdict = "ok" if ratio >= TARGET else f"below {TARGET}"
    print(
        f"{streams} streams: {free:7.1f} tok/s without, {kept:7.1f} tok/s with a schema, ratio {ratio:.3f} ({verdict})"
    )


async def run(rounds: int, tokens: int) -> None:
    options = LlamaOptions(path=str(sources.fetch("smollm2")), slots=max(STREAMS), context=512, layout="as-is")
    engine = LlamaEngine("smollm2", options)
    await engine.start()
    try:
        await speed(engine, True, 1, 32)
        for streams in STREAMS:
            show(streams, await measure(engine, streams, rounds, tokens))
    finally:
        await engine.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds of fewer tokens")
    quick: bool = parser.parse_args().quick
    asyncio.run(run(3 if quick else 7, 64 if quick else 200))


if __name__ == "__main__":
    main()
