"""Measures the llama engine through the HTTP API, side by side with llama.cpp's own HTTP server.

    python -m bench.engine [--quick] [--rounds N] [--only WORKLOAD ...]

Both have the same model file, slots, context and threads, and get the same requests. The peer is `xllamacpp.Server`
(bench/llamacpp.py) with its defaults and with n_batch 256; the better one counts for each figure. Servers take turns;
medians of the rounds are shown. Drafts are compared with Dragoman without drafts.

    shared            16 requests at once: 1,200 common tokens, 20 of their own, 32 new
    conversations     8 with 6 turns each, interleaved; each prompt has all earlier turns and a new one
    one, eight, many  1, 8 and 32 streams with a short prompt, 64 new tokens; the tokens after the first ones are also
                      compared with the bare loop (bench/bare.py)
    arrival           a prompt of 1,200 tokens arrives while another stream decodes
    repeating         a reply of 200 tokens that repeats a text of its prompt, as an edited file does
    original          a sampled reply of 200 tokens that repeats nothing
    cancel            seconds until a slot is free after its request was cancelled, while decoding or in its prompt

Comparisons with llama.cpp also run with the record of `dragoman tune smollm2`, if there is one. bench/constraints.py
measures the cost of a schema.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import httpx
from tools.ports import free_port

from bench.servers import run_dragoman, run_server
from dragoman.files import sources

SLOTS, CONTEXT = 32, 2048
THREADS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
OURS, TUNED, PLAIN = "dragoman", "dragoman, tuned", "dragoman, no speculation"
ONE_SLOT, BARE = "dragoman, one slot", "bare loop"
PEER, PEER_256 = "llama.cpp", "llama.cpp, n_batch 256"
TOKENS = range(1000, 20000)
"""Ordinary words of SmolLM2's vocabulary."""


class Size(NamedTuple):
    """Numbers of requests and tokens."""

    requests: int = 16
    shared: int = 1200
    new: int = 32
    conversations: int = 8
    turns: int = 6
    stream: int = 64
    reply: int = 200


QUICK = Size(requests=8, shared=400, new=16, conversations=3, turns=3, stream=32, reply=100)


class Answer(NamedTuple):
    """A reply, with the times of its request and of its parts."""

    begun: float
    arrivals: Sequence[float]
    text: str

    @property
    def first(self) -> float:
        return self.arrivals[0] - self.begun

    def worst_gap(self, since: float, until: float) -> float:
        """Return the longest time between two parts that overlaps the given interval."""
        pairs = zip(self.arrivals, self.arrivals[1:], strict=False)
        return max((after - before for before, after in pairs if after > since and before < until), default=0.0)


class Client:
    def __init__(self, port: int, chance: random.Random) -> None:
        # Each request gets a new connection: llama.cpp closes idle ones after a while.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        url = f"http://127.0.0.1:{port}"
        self.http = httpx.AsyncClient(base_url=url, timeout=600, limits=limits, trust_env=False)
        self.chance = chance

    def tokens(self, count: int) -> list[int]:
        return self.chance.choices(TOKENS, k=count)

    async def ask(
        self,
        prompt: str | list[int],
        new: int,
        arrived: Callable[[int], None] | None = None,
        temperature: float = 0,
    ) -> Answer:
        body: dict[str, object] = {"model": "smollm2", "prompt": prompt, "max_tokens": new, "temperature": temperature}
        if temperature:
            # Greedy requests have no seed, because it would disable drafts.
            body["seed"] = 7
        begun, arrivals, texts = time.perf_counter(), [], []
        request = self.http.stream("POST", "/v1/completions", json={**body, "ignore_eos": True, "stream": True})
        async with request as response:
            if response.status_code != 200:
                raise SystemExit(f"{response.status_code}: {(await response.aread()).decode()}")
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                arrivals.append(time.perf_counter())
                texts += [choice["text"] for choice in json.loads(line[6:])["choices"]]
                if arrived is not None:
                    arrived(len(arrivals))
        return Answer(begun, arrivals, "".join(texts))


Figures = Mapping[str, float]


async def shared(client: Client, size: Size) -> Figures:
    common = client.tokens(size.shared)
    begun = time.perf_counter()
    answers = await asyncio.gather(*(client.ask(common + client.tokens(20), size.new) for _ in range(size.requests)))
    done = time.perf_counter() - begun
    return {"all done, s": done, "first token p50, s": statistics.median(answer.first for answer in answers)}


async def conversations(client: Client, size: Size) -> Figures:
    words = ["river", "stone", "lantern", "engine", "garden", "letter", "market", "window", "silver", "bridge"]

    async def converse(seed: int) -> None:
        chance = random.Random(seed)
        text = f"A conversation about the {chance.choice(words)}, number {seed}.\n"
        for turn in range(size.turns):
            text += f"\nQuestion {turn}: " + " ".join(chance.choices(words, k=40)) + "?\nAnswer:"
            text += (await client.ask(text, size.new)).text

    begun = time.perf_counter()
    await asyncio.gather(*(converse(client.chance.randrange(10**9)) for _ in range(size.conversations)))
    return {"all done, s": time.perf_counter() - begun}


async def streams(client: Client, size: Size, count: int) -> Figures:
    begun = time.perf_counter()
    answers = await asyncio.gather(*(client.ask(client.tokens(12), size.stream) for _ in range(count)))
    done = time.perf_counter()
    first = max(answer.arrivals[0] for answer in answers)
    later = sum(arrival > first for answer in answers for arrival in answer.arrivals)
    return {TOKENS_A_SECOND: count * size.stream / (done - begun), DECODED: later / (done - first)}


async def cancel(client: Client, size: Size) -> Figures:
    """With one slot, the next request in the queue gets its first token as soon as the slot is free."""
    alone = (await client.ask(client.tokens(12), 1)).first
    found = {}
    for what, prompt, wait in (("decoding", 12, 0.5), ("prefilling", size.shared, 0.3)):
        leaving = asyncio.create_task(client.ask(client.tokens(prompt), 1000))
        await asyncio.sleep(wait)
        queued = asyncio.create_task(client.ask(client.tokens(12), 1000))
        following = asyncio.create_task(client.ask(client.tokens(12), 1))
        await asyncio.sleep(0.1)
        queued.cancel()
        leaving.cancel()
        left = time.perf_counter()
        found[f"{what}: free after, s"] = (await following).arrivals[0] - left - alone
    return found


async def arrival(client: Client, size: Size) -> Figures:
    alone = (await client.ask(client.tokens(size.shared), 1)).first
    decoding = asyncio.Event()
    stream = asyncio.create_task(
        client.ask(client.tokens(12), 8 * size.stream, lambda count: decoding.set() if count == 8 else None)
    )
    await decoding.wait()
    arrived = await client.ask(client.tokens(size.shared), 1)
    gap = (await stream).worst_gap(arrived.begun, arrived.begun + arrived.first)
    return {"worst gap, s": gap, "prefill beside / alone": arrived.first / alone}


async def repeating(client: Client, size: Size) -> Figures:
    """The prompt has the story three times and its beginning once more, so the model continues it."""
    lines = [f"{client.chance.choice(NAMES)} {line}" for line in STORY]
    story = " ".join(lines)
    answer = await client.ask(f"{story}\n\n" * 3 + lines[0], size.reply)
    return {TOKENS_A_SECOND: _after_the_first(answer, size)}


async def original(client: Client, size: Size) -> Figures:
    opening = f"Once upon a time {client.chance.choice(NAMES)} met {client.chance.choice(NAMES)}, and"
    return {TOKENS_A_SECOND: _after_the_first(await client.ask(opening, size.reply, temperature=1), size)}


def _after_the_first(answer: Answer, size: Size) -> float:
    """Return tokens per second without the prompt and the first token."""
    return (size.reply - 1) / (answer.arrivals[-1] - answer.arrivals[0])


NAMES = ["Anna", "Boris", "Clara", "David", "Emma", "Felix", "Greta", "Hugo"]
STORY = [
    "was the first to see the smoke above the harbour that morning.",
    "ran down the hill with two buckets and a coil of rope.",
    "said that the ferry had left at six with nobody aboard.",
    "did not believe a word of it and went to ask the baker.",
    "found the key under the third stone behind the chapel.",
    "counted eleven boats where there should have been twelve.",
    "wrote all of it into the green book, page after page.",
]
STREAMS = {"one": 1, "eight": 8, "many": 32}
WORKLOADS: dict[str, Callable[[Client, Size], Awaitable[Figures]]] = {
    "shared": shared,
    "conversations": conversations,
    **{name: partial(streams, count=count) for name, count in STREAMS.items()},
    "arrival": arrival,
    "repeating": repeating,
    "original": original,
    "cancel": cancel,
}
TOKENS_A_SECOND, DECODED = "tokens/s", "decoded tokens/s"
DRAFTING = ("repeating", "original")
TARGETS = {
    ("shared", "all done, s"): "at most 0.17",
    ("shared", "first token p50, s"): "at most 0.14",
    ("conversations", "all done, s"): "at most 0.7",
    ("one", TOKENS_A_SECOND): "at least 1.0",
    ("eight", TOKENS_A_SECOND): "at least 1.1",
    ("many", TOKENS_A_SECOND): "at least 1.1",
    ("arrival", "worst gap, s"): "at most 0.3 s",
    ("arrival", "prefill beside / alone"): "ours at most 1.2",
    ("repeating", TOKENS_A_SECOND): "at least 1.5",
    ("original", TOKENS_A_SECOND): "at least 0.97",
    ("cancel", "decoding: free after, s"): "ours at most 0.2 s",
    ("cancel", "prefilling: free after, s"): "ours at most 0.2 s",
}


@contextmanager
def server(name: str) -> Iterator[int]:
    """Run a server and yield its port."""
    model = str(sources.fetch("smollm2"))
    if name in (PEER, PEER_256):
        port = free_port()
        arguments = [str(port), model, str(SLOTS), str(CONTEXT), str(THREADS), *(["256"] if name == PEER_256 else [])]
        command = [sys.executable, "-m", "bench.llamacpp", *arguments]
        with run_server(command, f"http://127.0.0.1:{port}/health"):
            yield port
        return
    options = {"source": model, "slots": 1 if name == ONE_SLOT else SLOTS, "context": CONTEXT, "threads": THREADS}
    if name != TUNED:
        options["layout"] = "as-is"
    options["speculation"] = name != PLAIN
    with run_dragoman({"models": {"smollm2": options}}) as (port, _):
        yield port


async def measure(port: int, workload: str, seed: int, size: Size) -> Figures:
    # Each workload has prompts of its own, so that it finds no prefixes of another one in memory.
    client = Client(port, random.Random(f"{workload} {seed}"))
    try:
        await client.ask(client.tokens(8), 4)
        return await WORKLOADS[workload](client, size)
    finally:
        await client.http.aclose()


Results = dict[tuple[str, str], dict[str, list[float]]]


def run(workloads: Sequence[str], rounds: int, size: Size) -> Results:
    results: Results = {}

    def note(workload: str, name: str, figures: Figures) -> None:
        for figure, value in figures.items():
            results.setdefault((workload, figure), {}).setdefault(name, []).append(value)

    for at in range(rounds):
        for name in (OURS, TUNED, PLAIN, PEER, PEER_256, ONE_SLOT):
            if not (chosen := [workload for workload in workloads if name in measured_by(workload)]):
                continue
            with server(name) as port:
                for workload in chosen:
                    note(workload, name, asyncio.run(measure(port, workload, at, size)))
        for workload, speed in bare([workload for workload in workloads if workload in STREAMS], size).items():
            note(workload, BARE, {DECODED: speed})
    return results


def measured_by(workload: str) -> Sequence[str]:
    if workload == "cancel":
        return (ONE_SLOT,)
    if workload in DRAFTING:
        return (OURS, PLAIN)
    return (OURS, TUNED, PEER, PEER_256)


def bare(workloads: Sequence[str], size: Size) -> Mapping[str, float]:
    if not workloads:
        return {}
    counts = [str(STREAMS[workload]) for workload in workloads]
    command = [sys.executable, "-m", "bench.bare", str(sources.fetch("smollm2")), str(THREADS), str(size.stream)]
    output = subprocess.run([*command, *counts], check=True, capture_output=True, text=True).stdout
    return dict(zip(workloads, map(float, output.split()), strict=True))


def show(results: Results) -> None:
    print(f"{'':46}{'ours':>9}{'other':>9}{'ratio':>8}   target, of the ratio unless stated")
    for (workload, figure), values in results.items():
        medians = {name: statistics.median(found) for name, found in values.items()}
        for ours, others, target in comparisons(workload, figure):
            better = max if figure in (TOKENS_A_SECOND, DECODED) else min
            best = better(others, key=medians.__getitem__) if others else None
            against = f"{medians[best]:9.2f}{medians[ours] / medians[best]:8.2f}" if best else " " * 17
            names = " / ".join(name for name in (ours, best) if name)
            print(f"{workload:16}{figure:30}{medians[ours]:9.2f}{against}   {target} ({names})")


def comparisons(workload: str, figure: str) -> Sequence[tuple[str, Sequence[str], str]]:
    """Return the server, those it is compared with, and the target of the ratio."""
    if workload == "cancel":
        return [(ONE_SLOT, (), TARGETS[workload, figure])]
    if workload in DRAFTING:
        return [(OURS, (PLAIN,), TARGETS[workload, figure])]
    if figure == DECODED:
        return [(OURS, (BARE,), "at least 0.93")]
    target, peers = TARGETS[workload, figure], (PEER, PEER_256)
    return [(OURS, peers, target), (TUNED, peers, "at least 1.4" if workload in ("eight", "many") else target)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round of less of everything")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=WORKLOADS, default=list(WORKLOADS), metavar="WORKLOAD")
    chosen: Any = parser.parse_args()
    print(f"SmolLM2 on {THREADS} threads; load of the machine before: {os.getloadavg()[0]:.1f}")
    show(run(chosen.only, 1 if chosen.quick else chosen.rounds, QUICK if chosen.quick else Size()))
    print(f"load of the machine after: {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
