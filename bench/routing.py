"""What it is worth to ask the server that has the beginning of a prompt: prefix-aware routing against round-robin.

    python -m bench.routing [--servers 2] [--groups 8] [--rounds 4] [--words 350] [--pythonpath FOLDER]

Several Dragomans run SmolLM2, each with memory for a few prompts. Groups of requests share their instructions, which
are long, and differ in a short question. Once they go through a Dragoman with `engine: upstream`, once straight to the
servers in turn, which spares them the way through a proxy. The servers are started anew for each; a few requests
are under way at a time. `--pythonpath` starts the servers from another checkout.
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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from tools.ports import free_port

from bench.frontend import served_until_ready

MODEL = "smollm2"
SLOTS = 2
NEW_TOKENS = 4
AT_ONCE = 2
WORDS = ("river", "bread", "clock", "moon", "map", "bee", "light", "chess", "winter", "salt", "sail", "stone")


class Taken(NamedTuple):
    """Seconds of each request to its first token, and of all; prompt tokens, and how many of them a cache had."""

    first: list[float]
    whole: float
    prompt: int
    cached: int


@contextmanager
def server(config: Mapping[str, object], pythonpath: str | None) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A server that has been started and may not be ready."""
    port = free_port()
    environ = os.environ | ({"PYTHONPATH": pythonpath} if pythonpath else {})
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "dragoman.json"
        path.write_text(json.dumps(config))
        command = [sys.executable, "-m", "dragoman", "serve", "--config", str(path), "--port", str(port)]
        child = subprocess.Popen(command, stderr=subprocess.DEVNULL, env=environ)
        try:
            yield child, port
        finally:
            child.terminate()
            child.wait(30)


def ready(servers: Sequence[tuple[subprocess.Popen[bytes], int]]) -> list[str]:
    for child, port in servers:
        served_until_ready(child, port, 120)
    return [f"http://127.0.0.1:{port}" for _, port in servers]


def prompts(groups: int, rounds: int, words: int) -> list[list[dict[str, str]]]:
    """All requests in an order that looks like chance and is always the same."""
    chance = random.Random(7)
    rules = [f"Rules of house {group}: " + " ".join(chance.choices(WORDS, k=words)) for group in range(groups)]
    return [
        [{"role": "system", "content": rules[group]}, {"role": "user", "content": f"Question {turn}: what is this?"}]
        for turn in range(rounds)
        for group in chance.sample(range(groups), groups)
    ]


async def asked(client: httpx.AsyncClient, url: str, messages: list[dict[str, str]]) -> tuple[float, int, int]:
    body = {"model": MODEL, "messages": messages, "max_tokens": NEW_TOKENS, "temperature": 0, "stream": True}
    begun, first = time.perf_counter(), 0.0
    usage: dict[str, Any] = {}
    options = {"stream_options": {"include_usage": True}}
    async with client.stream("POST", f"{url}/v1/chat/completions", json=body | options) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line.removeprefix("data: "))
                first = first or (time.perf_counter() - begun if chunk["choices"] else 0.0)
                usage = chunk.get("usage") or usage
    return first, usage["prompt_tokens"], (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)


async def load(urls: Sequence[str], requests: Sequence[list[dict[str, str]]]) -> Taken:
    waiting = asyncio.Semaphore(AT_ONCE)
    async with httpx.AsyncClient(timeout=600, trust_env=False) as client:

        async def one(at: int) -> tuple[float, int, int]:
            async with waiting:
                return await asked(client, urls[at % len(urls)], requests[at])

        begun = time.perf_counter()
        taken = await asyncio.gather(*(one(at) for at in range(len(requests))))
    whole = time.perf_counter() - begun
    first, prompt, cached = zip(*taken, strict=True)
    return Taken(list(first), whole, sum(prompt), sum(cached))


def measured(routed: bool, options: argparse.Namespace) -> Taken:
    model = {"engine": "llama", "source": options.model, "context": 2048, "slots": SLOTS, "threads": 1}
    with ExitStack() as stack:
        config = {"models": {MODEL: model}}
        urls = ready([stack.enter_context(server(config, options.pythonpath)) for _ in range(options.servers)])
        if routed:
            pool = {"engine": "upstream", "urls": urls, "protocol": "chat"}
            urls = ready([stack.enter_context(server({"models": {MODEL: pool}}, None))])
        return asyncio.run(load(urls, prompts(options.groups, options.rounds, options.words)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("servers", 2), ("groups", 8), ("rounds", 4), ("words", 350)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--model", default=MODEL, help="a built-in name or a GGUF file")
    parser.add_argument("--pythonpath", help="where the servers' own code is, if not here")
    options = parser.parse_args()
    print(f"  {'':<16}{'TTFT p50':>10}{'mean':>8}{'requests/s':>12}{'from cache':>12}")
    results = {}
    for name, routed in (("round-robin", False), ("prefix-aware", True)):
        taken = results[name] = measured(routed, options)
        p50, mean = statistics.median(taken.first), statistics.mean(taken.first)
        rate, share = len(taken.first) / taken.whole, taken.cached / taken.prompt
        print(f"  {name:<16}{p50:>8.2f} s{mean:>6.2f} s{rate:>12.2f}{share:>12.0%}", flush=True)
    faster = results["round-robin"].whole / results["prefix-aware"].whole
    sooner = statistics.mean(results["round-robin"].first) / statistics.mean(results["prefix-aware"].first)
    print(f"\nthroughput {faster:.1f} times, TTFT {sooner:.1f} times as good   (target: 2, either)")


if __name__ == "__main__":
    main()
