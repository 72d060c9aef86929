"""How long one key waits for its first token while another key attacks.

    python -m tools.fairness [scripted] [smollm2] [--seconds 30] [--rounds 3] [--attack NAME ...] [--floor]

A victim asks short streaming chats at a steady rate, every third one with a tool: alone and beside an attack in turns,
for each attack and for all of them at once. The exit code is 1 where the 99th percentile of its time to the first token
beside the attack is more than twice that without it, or where one of its requests is not answered.

The attacker computes on the same machine. With `--floor` each round has another part, in which the attack goes to a
server that reads and refuses everything: what the victim waits longer then is not the work of Dragoman.
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
QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
REQUEST_SECONDS = 120.0
START_SECONDS = 2.0
WARM_UP_SECONDS = 3.0
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
    "smollm2": Engine({"source": "smollm2", "context": 2048, "slots": 4, "layout": "as-is"}, 0.3),
}


class Phase(NamedTuple):
    first_tokens: list[float]
    """Sorted, in seconds."""
    failures: Counter[str]

    def quantile(self, share: float) -> float:
        return self.first_tokens[min(len(self.first_tokens) - 1, int(len(self.first_tokens) * share))]

    def ratio(self, quiet: "Phase", share: float) -> float:
        return self.quantile(share) / quiet.quantile(share)


def join(phases: Sequence[Phase]) -> Phase:
    first_tokens = sorted(seconds for phase in phases for seconds in phase.first_tokens)
    return Phase(first_tokens, sum((phase.failures for phase in phases), Counter[str]()))


class Comparison(NamedTuple):
    name: str
    quiet: Phase
    attacked: Phase
    floor: Phase | None = None


async def measure(server: Server, key: str, seconds: float, pause: float) -> Phase:
    """One request after the other, at a steady rate as long as each is answered before the next is due."""
    until = time.monotonic() + seconds
    results: list[Result] = []
    while (begun := time.monotonic()) < until:
        fields = {"tools": [TOOL]} if len(results) % 3 == 2 else {}
        body = chat_body(MODEL, f"Say hello, number {len(results)}.", max_tokens=4, **fields)
        results.append(await ask(server.port, body, key=key, timeout=REQUEST_SECONDS))
        await asyncio.sleep(max(0.0, begun + pause - time.monotonic()))
    failures = Counter(f"{result.label}: {result.text[:100]}" for result in results if result.first_token is None)
    return Phase(sorted(result.first_token or REQUEST_SECONDS for result in results), failures)


@contextmanager
def attacking(port: int, key: str, names: Sequence[str]) -> Iterator[None]:
    """Run the attacks against the server at this port, or against one of their own if it is 0."""
    command = [sys.executable, "-m", "tools.fairness.attacks", str(port), key, *names]
    with subprocess.Popen(command) as process:
        try:
            # The attacker needs a moment to start.
            time.sleep(START_SECONDS)
            yield
            if process.poll() is not None:
                raise RuntimeError(f"the attacker exited with {process.returncode}")
        finally:
            process.kill()


async def wait_until_idle(server: Server, key: str) -> None:
    """Return when an answer comes as fast as from a quiet server again."""
    deadline = time.monotonic() + REQUEST_SECONDS
    while time.monotonic() < deadline:
        phase = await measure(server, key, 1, 0.5)
        if not phase.failures and phase.quantile(1) < IDLE_SECONDS:
            return
    raise RuntimeError(f"the server was not idle again within {REQUEST_SECONDS:g} s after an attack")


class Measurement(NamedTuple):
    """What is measured, and for how long. `seconds` are the sum of all rounds."""

    engine: Engine
    seconds: float = 30
    rounds: int = 3
    has_floor: bool = False
    workers: int = 1


def run(measurement: Measurement, attacks: Sequence[str]) -> list[str]:
    """Print lines for each attack, and return what is unfair."""
    with tempfile.TemporaryDirectory() as folder:
        store = KeyStore(Path(folder) / "keys.db")
        attacker, victim = store.create("attacker")[0], store.create("victim")[0]
        config = {"models": {MODEL: measurement.engine.model}, "keys": {"store": str(store.path)}}
        problems: list[str] = []
        with run_server(Path(folder), config, "--workers", str(measurement.workers)) as server:
            asyncio.run(measure(server, victim, WARM_UP_SECONDS, measurement.engine.pause))
            rounds = {name: [name] for name in attacks} | ({ALL: list(attacks)} if len(attacks) > 1 else {})
            for name, names in rounds.items():
                comparison = compare(measurement, server, (attacker, victim), name, names)
                _show(comparison)
                problems += unfair(comparison)
                if not server.is_alive:
                    return [*problems, f"{name}: the server exited with {server.process.returncode}"]
    return problems


def compare(
    measurement: Measurement, server: Server, keys: tuple[str, str], name: str, names: Sequence[str]
) -> Comparison:
    """Measure alone, beside the attacker alone if there is a floor, and beside the attack, in turns."""
    attacker, victim = keys
    seconds, pause = measurement.seconds / measurement.rounds, measurement.engine.pause
    quiet, floor, attacked = [], [], []
    for _ in range(measurement.rounds):
        quiet.append(asyncio.run(measure(server, victim, seconds, pause)))
        if measurement.has_floor:
            with attacking(0, attacker, names):
                floor.append(asyncio.run(measure(server, victim, seconds, pause)))
        with attacking(server.port, attacker, names):
            attacked.append(asyncio.run(measure(server, victim, seconds, pause)))
        if server.is_alive:
            asyncio.run(wait_until_idle(server, victim))
    return Comparison(name, join(quiet), join(attacked), join(floor) if floor else None)


def _show(comparison: Comparison) -> None:
    name, quiet, attacked, floor = comparison
    failed = f", {sum(attacked.failures.values())} failed" if attacked.failures else ""
    print(f"  {name:20}{_times(quiet)}  alone ({len(quiet.first_tokens)} requests)", flush=True)
    if floor is not None:
        print(f"  {'':20}{_times(floor)}  beside the attacker alone {_ratios(floor, quiet)}", flush=True)
    requests = f"({len(attacked.first_tokens)} requests{failed})"
    print(f"  {'':20}{_times(attacked)}  under attack {_ratios(attacked, quiet)} {requests}", flush=True)


def _times(phase: Phase) -> str:
    return "".join(f"  {label} {phase.quantile(share) * 1000:7.1f} ms" for label, share in QUANTILES.items())


def _ratios(phase: Phase, quiet: Phase) -> str:
    return " ".join(f"x{phase.ratio(quiet, share):.2f}" for share in QUANTILES.values())


def unfair(comparison: Comparison) -> list[str]:
    name, quiet, attacked, _ = comparison
    phases = {f"{name}, before": quiet, name: attacked}
    problems = [
        f"{label}: {failure} ({count} times)"
        for label, phase in phases.items()
        for failure, count in phase.failures.items()
    ]
    ratio = attacked.ratio(quiet, 0.99)
    if ratio > RATIO:
        problems.append(f"{name}: the victim waits {ratio:.1f} times as long; {RATIO:g} times are allowed")
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engines", nargs="*", metavar="ENGINE", help=f"of {', '.join(ENGINES)}; both without a name")
    parser.add_argument("--seconds", type=float, default=30, help="for each attack, and as long without it")
    parser.add_argument("--rounds", type=int, default=3, help="in which these seconds are divided")
    parser.add_argument("--floor", action="store_true", help="also measure beside an attacker of another server")
    parser.add_argument("--attack", action="append", choices=list(ATTACKS), help="only these; may be repeated")
    parser.add_argument("--workers", type=int, default=1, help="front ends of the server")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.engines if name not in ENGINES]:
        parser.error(f"no such engine: {', '.join(unknown)}; there are {', '.join(ENGINES)}")
    problems = []
    for name in arguments.engines or ENGINES:
        print(f"\n{name}, workers {arguments.workers}", flush=True)
        measurement = Measurement(
            ENGINES[name], arguments.seconds, arguments.rounds, arguments.floor, arguments.workers
        )
        found = run(measurement, arguments.attack or list(ATTACKS))
        problems += [f"{name}: {problem}" for problem in found]
    print("\n".join(["", *problems]) if problems else "\npassed")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
