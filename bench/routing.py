"""Compares prefix-aware routing with round-robin.

    python -m bench.routing [--servers 2] [--groups 8] [--rounds 4] [--words 350] [--pythonpath FOLDER]

Several Dragomans run SmolLM2, each with memory for a few prompts. Groups of requests share long instructions and differ
in a short question. They go once through a Dragoman with `engine: upstream`, and once to the servers in turn, without
the cost of a proxy. The servers are restarted in between. A few requests run at a time. `--pythonpath` starts the
servers from another checkout.
"""

import argparse
import asyncio
import os
import random
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import NamedTuple

from bench.servers import run_dragoman
from dragoman.loadtest.figures import Sample
from dragoman.loadtest.target import Target

MODEL = "smollm2"
SLOTS = 2
NEW_TOKENS = 4
CONCURRENCY = 2
WORDS = ("river", "bread", "clock", "moon", "map", "bee", "light", "chess", "winter", "salt", "sail", "stone")


class Result(NamedTuple):
    """Seconds to the first token of each request and for all requests; the share of prompt tokens from a cache."""

    first: list[float]
    total: float
    cached: float


def build_prompts(groups: int, rounds: int, words: int) -> list[str]:
    """Return the prompts in an order that looks random and is always the same."""
    rng = random.Random(7)
    rules = [f"Rules of house {group}: " + " ".join(rng.choices(WORDS, k=words)) for group in range(groups)]
    return [
        f"{rules[group]} Question {turn}: what is this?"
        for turn in range(rounds)
        for group in rng.sample(range(groups), groups)
    ]


async def send_all(urls: Sequence[str], prompts: Sequence[str]) -> Result:
    targets = [Target(url, None, MODEL, 600) for url in urls]
    for target in targets:
        await target.count_tokens("Hello.")
    running = asyncio.Semaphore(CONCURRENCY)

    async def send(at: int) -> Sample:
        async with running:
            return await targets[at % len(targets)].send(prompts[at], NEW_TOKENS)

    begun = time.perf_counter()
    samples = await asyncio.gather(*(send(at) for at in range(len(prompts))))
    total = time.perf_counter() - begun
    if error := next((sample.error for sample in samples if sample.error), None):
        raise SystemExit(error)
    usages = [sample.usage for sample in samples if sample.usage is not None]
    cached = sum(usage.cached or 0 for usage in usages) / sum(usage.prompt for usage in usages)
    return Result([sample.arrivals[0] for sample in samples if sample.arrivals], total, cached)


def measure(is_routed: bool, options: argparse.Namespace) -> Result:
    model = {"engine": "llama", "source": options.model, "context": 2048, "slots": SLOTS, "threads": 1}
    environ = os.environ | ({"PYTHONPATH": options.pythonpath} if options.pythonpath else {})
    with ExitStack() as stack:
        urls = []
        for _ in range(options.servers):
            port, _ = stack.enter_context(run_dragoman({"models": {MODEL: model}}, environ=environ))
            urls.append(f"http://127.0.0.1:{port}")
        if is_routed:
            pool = {"engine": "upstream", "urls": urls, "protocol": "chat"}
            port, _ = stack.enter_context(run_dragoman({"models": {MODEL: pool}}))
            urls = [f"http://127.0.0.1:{port}"]
        return asyncio.run(send_all(urls, build_prompts(options.groups, options.rounds, options.words)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("servers", 2), ("groups", 8), ("rounds", 4), ("words", 350)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--model", default=MODEL, help="a built-in name or a GGUF file")
    parser.add_argument("--pythonpath", help="the folder with the code of the servers, if not this one")
    options = parser.parse_args()
    print(f"  {'':<16}{'TTFT p50':>10}{'mean':>8}{'requests/s':>12}{'from cache':>12}")
    results = {}
    for name, is_routed in (("round-robin", False), ("prefix-aware", True)):
        result = results[name] = measure(is_routed, options)
        p50, mean, rate = (
            statistics.median(result.first),
            statistics.mean(result.first),
            len(result.first) / result.total,
        )
        print(f"  {name:<16}{p50:>8.2f} s{mean:>6.2f} s{rate:>12.2f}{result.cached:>12.0%}", flush=True)
    faster = results["round-robin"].total / results["prefix-aware"].total
    sooner = statistics.mean(results["round-robin"].first) / statistics.mean(results["prefix-aware"].first)
    print(f"\nthroughput {faster:.1f} times, TTFT {sooner:.1f} times as good   (target: 2, either)")


if __name__ == "__main__":
    main()
