"""Measures what a batch costs interactive requests: phases without and with batch work alternate on one server.

    python -m bench.batch [--quick] [--seconds N] [--phases N] [--slots N] [--seed N]

The model is SmolLM2. In both kinds of phases USERS send interactive requests, each with a prompt of its own, and they
pause in between for about as long as a reply takes. In the phases with batch work, BATCH requests with
`service_tier: "flex"` are always open: each has a long prompt and a long reply, and a new one follows when it ends.
Batch work also runs alone, to compare its speed.

    first token     from the request to its first token
    gap             between two tokens of a reply
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import httpx

from bench.servers import run_dragoman
from dragoman.files import sources

BATCH = 8
"""Open batch requests: more than the slots, as a batch has."""
BATCH_PROMPT, BATCH_REPLY = 400, 100
USERS = 2
PROMPTS = (20, 60, 150)
REPLY = 16
SETTLE_SECONDS = 2.0
ALONE_SECONDS = 15.0
"""Long enough for several batch replies."""
TOKENS = range(1000, 20000)
"""Ordinary words of SmolLM2's vocabulary."""
TARGET = 1.1


@dataclass
class Figures:
    first: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    batch_tokens: int = 0
    seconds: float = 0.0


def has_token(line: str) -> bool:
    """Whether a line of a stream has text."""
    return line.startswith("data: {") and bool(json.loads(line[6:])["choices"][0]["text"])


class Client:
    def __init__(self, port: int, seed: int) -> None:
        limits = httpx.Limits(max_connections=None)
        self.http = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=600, limits=limits, trust_env=False)
        self._chance = random.Random(seed)

    async def ask(self, prompt: int, reply: int, arrivals: list[float], tier: str = "default") -> None:
        body = {"model": "smollm2", "prompt": self._chance.choices(TOKENS, k=prompt), "max_tokens": reply}
        body |= {"temperature": 0, "ignore_eos": True, "stream": True, "service_tier": tier}
        async with self.http.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                raise SystemExit(f"{response.status_code}: {(await response.aread()).decode()}")
            async for line in response.aiter_lines():
                arrivals += [time.perf_counter()] if has_token(line) else []

    async def run_interactive(self, seconds: float, seed: int, figures: Figures) -> None:
        ends = time.perf_counter() + seconds
        users = [random.Random(f"{seed} {user}") for user in range(USERS)]
        await asyncio.gather(*(self._use(chance, ends, figures) for chance in users))

    async def _use(self, chance: random.Random, ends: float, figures: Figures) -> None:
        while (begun := time.perf_counter()) < ends:
            arrivals: list[float] = []
            await self.ask(chance.choice(PROMPTS), REPLY, arrivals)
            figures.first.append(arrivals[0] - begun)
            figures.gaps += [after - before for before, after in pairwise(arrivals)]
            await asyncio.sleep((time.perf_counter() - begun) * chance.uniform(0.5, 1.5))

    @contextlib.asynccontextmanager
    async def batch(self, figures: Figures) -> Any:
        """Keep batch requests open."""
        arrivals: list[float] = []

        async def repeat() -> None:
            while True:
                await self.ask(BATCH_PROMPT, BATCH_REPLY, arrivals, "flex")

        tasks = [asyncio.create_task(repeat()) for _ in range(BATCH)]
        try:
            await asyncio.sleep(SETTLE_SECONDS)
            begun = time.perf_counter()
            yield
            ended = time.perf_counter()
            figures.batch_tokens += sum(begun <= arrival <= ended for arrival in arrivals)
            figures.seconds += ended - begun
            if failed := [task for task in tasks if task.done()]:
                failed[0].result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.sleep(SETTLE_SECONDS / 2)


async def measure(port: int, phases: int, seconds: float, seed: int) -> tuple[Figures, Figures, Figures]:
    client, without, beside, alone = Client(port, seed), Figures(), Figures(), Figures()
    try:
        await client.ask(8, 4, [])
        async with client.batch(alone):
            await asyncio.sleep(ALONE_SECONDS)
        for phase in range(phases):
            await client.run_interactive(seconds, seed + phase, without)
            async with client.batch(beside):
                await client.run_interactive(seconds, seed + phase, beside)
    finally:
        await client.http.aclose()
    return without, beside, alone


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


FIGURES: dict[str, Callable[[Sequence[float]], float]] = {
    "p50": lambda values: percentile(values, 0.5),
    "p99": lambda values: percentile(values, 0.99),
    "mean": statistics.mean,
}


def show(without: Figures, beside: Figures, alone: Figures) -> None:
    print(f"{len(without.first)} and {len(beside.first)} interactive requests")
    print(f"{'':20}{'without':>10}{'with':>10}{'ratio':>8}")
    for name, before, during in (
        ("first token", without.first, beside.first),
        ("gap", without.gaps, beside.gaps),
    ):
        for label, figure in FIGURES.items():
            one, other = figure(before) * 1000, figure(during) * 1000
            target = f"   target at most {TARGET}" if (name, label) == ("first token", "p99") else ""
            print(f"{name + ', ' + label:20}{one:7.0f} ms{other:7.0f} ms{other / one:8.2f}{target}")
    speeds = [figures.batch_tokens / figures.seconds for figures in (alone, beside)]
    print(f"batch work: {speeds[0]:.1f} tokens/s alone, {speeds[1]:.1f} beside interactive requests")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one short phase of each kind")
    parser.add_argument("--seconds", type=float, default=8.0, help="of each phase")
    parser.add_argument("--phases", type=int, default=6, help="of each kind")
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args()
    phases, seconds = (1, 8.0) if chosen.quick else (chosen.phases, chosen.seconds)
    print(f"SmolLM2, {chosen.slots} slots; load of the machine before: {os.getloadavg()[0]:.1f}")
    model = {"source": str(sources.fetch("smollm2")), "slots": chosen.slots, "context": 2048, "layout": "as-is"}
    with run_dragoman({"models": {"smollm2": model}}) as (port, _):
        show(*asyncio.run(measure(port, phases, seconds, chosen.seed)))
    print(f"load of the machine after: {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
