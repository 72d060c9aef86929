"""How long one key waits for its first token while another key attacks.

    python -m tools.fairness [scripted] [smollm2] [--seconds 30] [--attack NAME ...] [--workers N]

A victim asks short streaming chats at a steady rate, every third one with a tool: first alone, then beside each attack,
then beside all of them at once. The exit code is 1 where the 99th percentile of its time to the first token is more
than twice that of the quiet phase, or where one of its requests is not answered.
"""

import argparse
import asyncio
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from dragoman.storage.keys import KeyStore
from tools.client import Result, ask, chat_body
from tools.fairness.attacks import ATTACKS, MODEL
from tools.server import Server, run_server

RATIO = 2.0
"""The most that the 99th percentile of the victim's first tokens may grow under attack."""
ALL = "all together"
REQUEST_SECONDS = 120.0
IDLE_SECONDS = 1.0
"""A first token that comes within this time says that nothing of an attack is left."""
TOOL = {
    "type": "function",
    "function": {"name": "lookup", "parameters": {"type": "object", "properties": {"word": {"type": "string"}}}},
}


class Engine(NamedTuple):
    model: dict[str, Any]
    pause: float
    """Seconds between two requests of the victim."""


ENGINES = {
    # A first token takes as long as one of a small model on a CPU.
    "scripted": Engine({"engine": "scripted", "prefill_seconds": 0.1, "tokens_per_second": 50, "context": 8192}, 0.1),
    "smollm2": Engine({"source": "smollm2", "context": 2048, "slots": 4, "layout": "as-is"}, 0.5),
}


class Phase(NamedTuple):
    name: str
    first_tokens: list[float]
    """Sorted, in seconds."""
    failures: Counter[str]

    def quantile(self, share: float) -> float:
        return self.first_tokens[min(len(self.first_tokens) - 1, int(len(self.first_tokens) * share))]


async def measure(name: str, server: Server, key: str, seconds: float, pause: float) -> Phase:
    """One request after the other, at a steady rate as long as each is answered before the next is due."""
    until = time.monotonic() + seconds
    results: list[Result] = []
    while (begun := time.monotonic()) < until:
        fields = {"tools": [TOOL]} if len(results) % 3 == 2 else {}
        body = chat_body(MODEL, f"Say hello, number {len(results)}.", max_tokens=4, **fields)
        results.append(await ask(server.port, body, key=key, timeout=REQUEST_SECONDS))
        await asyncio.sleep(max(0.0, begun + pause - time.monotonic()))
    failures = Counter(f"{result.label}: {result.text[:100]}" for result in results if result.first_token is None)
    return Phase(name, sorted(result.first_token or REQUEST_SECONDS for result in results), failures)


@contextmanager
def attacking(server: Server, key: str, names: Sequence[str]) -> Iterator[None]:
    command = [sys.executable, "-m", "tools.fairness.attacks", str(server.port), key, *names]
    with subprocess.Popen(command) as process:
        try:
            yield
            if process.poll() is not None:
                raise RuntimeError(f"the attacker exited with {process.returncode}")
        finally:
            process.kill()


async def wait_until_idle(server: Server, key: str) -> None:
    """Return when an answer comes as fast as from a quiet server again."""
    deadline = time.monotonic() + REQUEST_SECONDS
    while time.monotonic() < deadline:
        phase = await measure("idle", server, key, 1, 0.5)
        if not phase.failures and phase.quantile(1) < IDLE_SECONDS:
            return
    raise RuntimeError(f"the server was not idle again within {REQUEST_SECONDS:g} s after an attack")


def run(engine: Engine, attacks: Sequence[str], seconds: float, workers: int) -> list[str]:
    """Print a line for each phase, and return what is unfair."""
    with tempfile.TemporaryDirectory() as folder:
        store = KeyStore(Path(folder) / "keys.db")
        attacker, victim = store.create("attacker")[0], store.create("victim")[0]
        config = {"models": {MODEL: engine.model}, "keys": {"store": str(store.path)}}
        with run_server(Path(folder), config, "--workers", str(workers)) as server:
            quiet = asyncio.run(_quiet(server, victim, engine, seconds))
            _show(quiet, quiet)
            problems = [f"quiet: {failure} ({count} times)" for failure, count in quiet.failures.items()]
            rounds = {name: [name] for name in attacks} | ({ALL: list(attacks)} if len(attacks) > 1 else {})
            for name, names in rounds.items():
                with attacking(server, attacker, names):
                    phase = asyncio.run(_attacked(name, server, victim, engine, seconds))
                _show(phase, quiet)
                problems += unfair(phase, quiet)
                asyncio.run(wait_until_idle(server, victim))
                if not server.is_alive:
                    return [*problems, f"{name}: the server exited with {server.process.returncode}"]
    return problems


async def _quiet(server: Server, key: str, engine: Engine, seconds: float) -> Phase:
    await measure("warm up", server, key, 3, engine.pause)
    return await measure("quiet", server, key, seconds, engine.pause)


async def _attacked(name: str, server: Server, key: str, engine: Engine, seconds: float) -> Phase:
    # The attacker needs a moment to start.
    await asyncio.sleep(2)
    return await measure(name, server, key, seconds, engine.pause)


def _show(phase: Phase, quiet: Phase) -> None:
    p50, p99 = phase.quantile(0.5), phase.quantile(0.99)
    ratio = p99 / quiet.quantile(0.99)
    failed = f", {sum(phase.failures.values())} failed" if phase.failures else ""
    print(
        f"  {phase.name:20} first token, ms: p50 {p50 * 1000:8.1f}  p99 {p99 * 1000:8.1f}  x{ratio:.2f}"
        f"  ({len(phase.first_tokens)} requests{failed})",
        flush=True,
    )


def unfair(phase: Phase, quiet: Phase) -> list[str]:
    problems = [f"{phase.name}: {failure} ({count} times)" for failure, count in phase.failures.items()]
    ratio = phase.quantile(0.99) / quiet.quantile(0.99)
    if ratio > RATIO:
        problems.append(f"{phase.name}: the victim waits {ratio:.1f} times as long; {RATIO:g} times are allowed")
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engines", nargs="*", metavar="ENGINE", help=f"of {', '.join(ENGINES)}; both without a name")
    parser.add_argument("--seconds", type=float, default=30, help="of each phase")
    parser.add_argument("--attack", action="append", choices=list(ATTACKS), help="only these; may be repeated")
    parser.add_argument("--workers", type=int, default=1, help="front ends of the server")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.engines if name not in ENGINES]:
        parser.error(f"no such engine: {', '.join(unknown)}; there are {', '.join(ENGINES)}")
    problems = []
    for name in arguments.engines or ENGINES:
        print(f"\n{name}, workers {arguments.workers}", flush=True)
        found = run(ENGINES[name], arguments.attack or list(ATTACKS), arguments.seconds, arguments.workers)
        problems += [f"{name}: {problem}" for problem in found]
    print("\n".join(["", *problems]) if problems else "\npassed")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
