"""Whether a server stays what it was: mixed load for as long as one likes.

    python -m bench.soak [--minutes 60] [--clients 6] [--seed 1]

`dragoman serve` with SmolLM2 in a process of its own; clients that ask everything in bench/mix.py, in an order by
chance, one request after the other; some leave in the middle. It holds, or the exit code is 1:

1. No request is lost, and none is answered wrongly.
2. Of memory, open files and threads, of the server and its workers together, the median of the last third is that of
   the second, but for a little. The first third is for what is made once.
3. After SIGTERM the server ends with 0, and none of its processes is left.

Memory is what the processes have of their own, without the pages of the model's file. It needs the /proc of Linux.
"""

import argparse
import asyncio
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import NamedTuple

import httpx

from bench.frontend import free_port
from bench.mix import MIX, MODEL, Kind, Outcome, outcome

CONFIG = {
    "models": {MODEL: {"source": MODEL, "context": 1024, "slots": 4}},
    # Few responses are kept, so that they soon make room for each other.
    "limits": {"kept_responses": 20, "queue": 64},
}
OUTCOMES = ("answered", "refused", "busy", "left", "wrong", "lost")
PATIENCE_SECONDS = 120
STOP_SECONDS = 40
MEMORY_SHARE = 0.03
FEW = 4
"""Files or threads by which the medians may differ."""


class Sample(NamedTuple):
    memory: int
    """Bytes."""
    files: int
    threads: int


class Server(NamedTuple):
    process: "subprocess.Popen[bytes]"
    port: int
    log: Path


@contextmanager
def serving(folder: Path) -> Iterator[Server]:
    config, log, port = folder / "dragoman.json", folder / "server.log", free_port()
    config.write_text(json.dumps(CONFIG))
    command = [sys.executable, "-m", "dragoman", "serve", "--config", str(config), "--port", str(port)]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        yield Server(process, port, log)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def family(pid: int) -> list[int]:
    """The process and all that come from it, those that are there."""
    try:
        tasks = list(Path(f"/proc/{pid}/task").glob("*/children"))
        children = [int(child) for task in tasks for child in task.read_text().split()]
    except OSError:
        return []
    return [pid, *(member for child in children for member in family(child))]


def sampled(pid: int) -> Sample:
    samples = [found for member in family(pid) if (found := _sample(member)) is not None]
    return Sample(*(sum(column) for column in zip(*samples, strict=True)))


def _sample(pid: int) -> Sample | None:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        fields = {name: value for name, _, value in (line.partition(":") for line in lines)}
        files = sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
        return Sample(int(fields["RssAnon"].split()[0]) * 1024, files, int(fields["Threads"]))
    except (OSError, KeyError):
        # It ended while it was looked at.
        return None


class Soak:
    def __init__(self, server: Server, seed: int) -> None:
        self.server = server
        self.seed = seed
        self.counts: Counter[tuple[str, str]] = Counter()
        self.words: Counter[tuple[str, str]] = Counter()
        """What went wrong, or was told, and how often."""
        self.samples: list[Sample] = []
        self.members: set[int] = set()

    async def run(self, seconds: float, clients: int) -> None:
        limits = httpx.Limits(max_connections=None)
        url = f"http://127.0.0.1:{self.server.port}"
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_SECONDS, limits=limits, trust_env=False) as http:
            await self._ready(http)
            for kind in MIX:
                await self._one(http, kind, Random(self.seed))
            watch = asyncio.create_task(self._watch(max(0.25, seconds / 1000)))
            until = time.monotonic() + seconds
            async with asyncio.TaskGroup() as group:
                for number in range(clients):
                    group.create_task(self._client(http, Random(f"{self.seed} {number}"), until))
            watch.cancel()

    async def _ready(self, http: httpx.AsyncClient) -> None:
        until = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < until and self.server.process.poll() is None:
            try:
                if (await http.get("/ready")).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.1)
        raise SystemExit(f"the server did not start:\n{self.server.log.read_text()}")

    async def _watch(self, pause: float) -> None:
        while True:
            self.members.update(family(self.server.process.pid))
            self.samples.append(sampled(self.server.process.pid))
            await asyncio.sleep(pause)

    async def _client(self, http: httpx.AsyncClient, random: Random, until: float) -> None:
        while time.monotonic() < until:
            await self._one(http, random.choice(MIX), random)

    async def _one(self, http: httpx.AsyncClient, kind: Kind, random: Random) -> None:
        found = await asked(http, kind, random)
        self.counts[kind.name, found.name] += 1
        if found.name in ("busy", "wrong", "lost"):
            self.words[found.name, f"{kind.name}: {found.words}"] += 1

    def stopped(self) -> list[str]:
        """What is wrong with the end."""
        process = self.server.process
        process.send_signal(signal.SIGTERM)
        try:
            code = process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            return [f"the server still runs {STOP_SECONDS} seconds after SIGTERM"]
        left = [member for member in self.members if Path(f"/proc/{member}").exists()]
        problems = [f"the server ended with {code}"] if code else []
        return problems + ([f"processes are left: {left}"] if left else [])


async def asked(http: httpx.AsyncClient, kind: Kind, random: Random) -> Outcome:
    body = kind.body(random)
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = http.build_request("POST", kind.path, content=content, headers={"content-type": "application/json"})
    try:
        if kind.leaves:
            return await _left(http, request, random)
        response = await http.send(request)
    except httpx.HTTPError as error:
        return Outcome("lost", repr(error))
    return outcome(kind, body, response.status_code, response.content)


async def _left(http: httpx.AsyncClient, request: httpx.Request, random: Random) -> Outcome:
    """Before the headers, or after a few pieces."""
    try:
        async with asyncio.timeout(random.choice([0.05, 0.3, 1, 3])):
            response = await http.send(request, stream=True)
            try:
                pieces = response.aiter_raw()
                for _ in range(random.randint(0, 10)):
                    await anext(pieces, b"")
            finally:
                await response.aclose()
    except TimeoutError:
        pass
    return Outcome("left")


def growth(name: str, values: Sequence[int], allowed: float) -> tuple[float, float, str | None]:
    """The medians of the second and the last third, and what is wrong with them."""
    third = len(values) // 3
    before, after = statistics.median(values[third : 2 * third]), statistics.median(values[2 * third :])
    problem = f"{name} grew: {before:,.0f}, then {after:,.0f}" if after > before + allowed else None
    return before, after, problem


def verdict(soak: Soak) -> list[str]:
    bad = [f"{name}, {times} times: {words}" for (name, words), times in soak.words.most_common() if name != "busy"]
    columns = list(zip(*soak.samples, strict=True))
    print(f"\n{'of all processes':20}{'second third':>14}{'last third':>14}")
    for name, values in zip(Sample._fields, columns, strict=True):
        memory = name == "memory"
        unit = 2**20 if memory else 1
        allowed = statistics.median(values) * MEMORY_SHARE if memory else FEW
        before, after, problem = growth(name, values, allowed)
        print(f"{name + (', MiB' if memory else ''):20}{before / unit:14,.1f}{after / unit:14,.1f}")
        bad += [problem] if problem else []
    return bad


def show(counts: Counter[tuple[str, str]]) -> None:
    print(f"{'':20}" + "".join(f"{name:>10}" for name in OUTCOMES))
    for kind in MIX:
        print(f"{kind.name:20}" + "".join(f"{counts[kind.name, name]:10}" for name in OUTCOMES))
    totals = [sum(times for (_, name), times in counts.items() if name == wanted) for wanted in OUTCOMES]
    print(f"{'all':20}" + "".join(f"{total:10}" for total in totals))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder)) as server:
        soak = Soak(server, arguments.seed)
        asyncio.run(soak.run(arguments.minutes * 60, arguments.clients))
        problems = soak.stopped()
        show(soak.counts)
        problems += verdict(soak)
    for (name, words), times in soak.words.most_common():
        if name == "busy":
            print(f"busy, {times} times: {words}")
    print("\n".join(problems) if problems else "it holds")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
