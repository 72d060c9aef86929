"""How fast the llama engine is through the HTTP API, against llama.cpp's own HTTP server.

    python -m bench.engine [--quick] [--rounds N] [--only WORKLOAD ...]

The same model file, slots, context and threads for both, the same requests by the same client. The peer is
`xllamacpp.Server` (bench/llamacpp.py), once as it is and once with n_batch 256; the better one of the two counts, for
each figure. Servers take turns; medians of the rounds are shown. What drafts gain is measured against ourselves
without them.

    shared         16 at once: 1,200 tokens in common, 20 of their own, 32 new
    conversations  8 of 6 turns each, interleaved; each turn's prompt is all that was said before and something new
    one, eight     streams of a short prompt each, 64 new tokens
    arrival        a prompt of 1,200 tokens arrives while another stream decodes
    repeating      a reply of 200 tokens that repeats a text of its prompt, as an edited file does
    original       a reply of 200 tokens drawn by chance, which repeats nothing
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from bench.frontend import free_port
from dragoman import sources

SLOTS, CONTEXT = 16, 2048
THREADS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
OURS, PLAIN, PEER, PEER_256 = "dragoman", "dragoman, no speculation", "llama.cpp", "llama.cpp, n_batch 256"
TOKENS = range(1000, 20000)
"""Ordinary words of SmolLM2's vocabulary."""


class Size(NamedTuple):
    """How much of everything."""

    requests: int = 16
    shared: int = 1200
    new: int = 32
    conversations: int = 8
    turns: int = 6
    stream: int = 64
    reply: int = 200


QUICK = Size(requests=8, shared=400, new=16, conversations=3, turns=3, stream=32, reply=100)


class Answer(NamedTuple):
    """When it was asked for, when its parts came, and what it says."""

    begun: float
    arrivals: Sequence[float]
    text: str

    @property
    def first(self) -> float:
        return self.arrivals[0] - self.begun

    def worst_gap(self, since: float, until: float) -> float:
        """The longest silence of which a part lies between the two times."""
        pairs = zip(self.arrivals, self.arrivals[1:], strict=False)
        return max((after - before for before, after in pairs if after > since and before < until), default=0.0)


class Client:
    def __init__(self, port: int, chance: random.Random) -> None:
        # Both get a new connection for each request: llama.cpp closes those that were idle for a while.
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
        body = {"model": "smollm2", "prompt": prompt, "max_tokens": new, "temperature": temperature, "seed": 7}
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

    async def talk(seed: int) -> None:
        chance = random.Random(seed)
        said = f"A conversation about the {chance.choice(words)}, number {seed}.\n"
        for turn in range(size.turns):
            said += f"\nQuestion {turn}: " + " ".join(chance.choices(words, k=40)) + "?\nAnswer:"
            said += (await client.ask(said, size.new)).text

    begun = time.perf_counter()
    await asyncio.gather(*(talk(client.chance.randrange(10**9)) for _ in range(size.conversations)))
    return {"all done, s": time.perf_counter() - begun}


async def streams(client: Client, size: Size, count: int) -> Figures:
    begun = time.perf_counter()
    await asyncio.gather(*(client.ask(client.tokens(12), size.stream) for _ in range(count)))
    return {"tokens/s": count * size.stream / (time.perf_counter() - begun)}


async def one(client: Client, size: Size) -> Figures:
    return await streams(client, size, 1)


async def eight(client: Client, size: Size) -> Figures:
    return await streams(client, size, 8)


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
    """Told three times and begun once more, it is told on."""
    lines = [f"{client.chance.choice(NAMES)} {line}" for line in STORY]
    told = " ".join(lines)
    answer = await client.ask(f"{told}\n\n" * 3 + lines[0], size.reply)
    return {"tokens/s": _after_the_first(answer, size)}


async def original(client: Client, size: Size) -> Figures:
    opening = f"Once upon a time {client.chance.choice(NAMES)} met {client.chance.choice(NAMES)}, and"
    return {"tokens/s": _after_the_first(await client.ask(opening, size.reply, temperature=1), size)}


def _after_the_first(answer: Answer, size: Size) -> float:
    """The prompt is none of it."""
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
WORKLOADS: dict[str, Callable[[Client, Size], Awaitable[Figures]]] = {
    "shared": shared,
    "conversations": conversations,
    "one": one,
    "eight": eight,
    "arrival": arrival,
    "repeating": repeating,
    "original": original,
}
RIVALS = {"repeating": (PLAIN,), "original": (PLAIN,)}
"""Whom a workload is compared with, where it is not the peer."""
TARGETS = {
    ("shared", "all done, s"): "at most 0.17",
    ("shared", "first token p50, s"): "at most 0.14",
    ("conversations", "all done, s"): "at most 0.7",
    ("one", "tokens/s"): "at least 1.0",
    ("eight", "tokens/s"): "at least 1.1",
    ("arrival", "worst gap, s"): "at most 0.3 s",
    ("arrival", "prefill beside / alone"): "ours at most 1.2",
    ("repeating", "tokens/s"): "at least 1.5",
    ("original", "tokens/s"): "at least 0.97",
}


@contextmanager
def running(command: Sequence[str], port: int, health: str) -> Iterator[int]:
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 120
        while not _healthy(port, health):
            if child.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the server did not start: {' '.join(command)}")
            time.sleep(0.1)
        yield port
    finally:
        child.terminate()
        try:
            child.wait(10)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def _healthy(port: int, path: str) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}{path}", trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


@contextmanager
def server(name: str) -> Iterator[int]:
    port, model = free_port(), str(sources.fetch("smollm2"))
    if name not in (OURS, PLAIN):
        arguments = [str(port), model, str(SLOTS), str(CONTEXT), str(THREADS), *(["256"] if name == PEER_256 else [])]
        with running([sys.executable, "-m", "bench.llamacpp", *arguments], port, "/health"):
            yield port
        return
    options = {"source": model, "slots": SLOTS, "context": CONTEXT, "threads": THREADS, "speculation": name == OURS}
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "dragoman.json"
        config.write_text(json.dumps({"models": {"smollm2": options}}))
        command = [sys.executable, "-m", "dragoman", "serve", "--config", str(config), "--port", str(port)]
        with running(command, port, "/ready"):
            yield port


async def measure(port: int, workload: str, seed: int, size: Size) -> Figures:
    # No workload may find what another one has left in memory.
    client = Client(port, random.Random(f"{workload} {seed}"))
    try:
        await client.ask(client.tokens(8), 4)
        return await WORKLOADS[workload](client, size)
    finally:
        await client.http.aclose()


Results = dict[tuple[str, str], dict[str, list[float]]]


def run(workloads: Sequence[str], rounds: int, size: Size) -> Results:
    results: Results = {}
    for at in range(rounds):
        for name in (OURS, PLAIN, PEER, PEER_256):
            concerned = [workload for workload in workloads if name == OURS or name in _rivals(workload)]
            if not concerned:
                continue
            with server(name) as port:
                for workload in concerned:
                    for figure, value in asyncio.run(measure(port, workload, at, size)).items():
                        results.setdefault((workload, figure), {}).setdefault(name, []).append(value)
    return results


def _rivals(workload: str) -> Sequence[str]:
    return RIVALS.get(workload, (PEER, PEER_256))


def show(results: Results) -> None:
    print(f"{'':42}{'ours':>9}{'peer':>9}{'ratio':>8}   target of the ratio where nothing else is said")
    for (workload, figure), values in results.items():
        medians = {name: statistics.median(found) for name, found in values.items()}
        better = max if figure == "tokens/s" else min
        best = better(_rivals(workload), key=lambda name: medians[name])
        ours, peer = medians[OURS], medians[best]
        which = "" if best == PEER else f", the peer is {best}"
        target = TARGETS[workload, figure]
        print(f"{workload:16}{figure:26}{ours:9.2f}{peer:9.2f}{ours / peer:8.2f}   {target}{which}")


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
