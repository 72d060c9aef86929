"""Measures the ledger: entries per second, and what it costs the front end.

    python -m bench.storage [--quick]

    entries        requests that are opened and closed, until all are in the database
    reservations   the same with a budget that may refuse: each waits for its transaction, 64 at a time

Then three servers take turns: without a ledger, with one in memory, and with one in SQLite. All run on one core, the
load generator on the other one if there are two. Figures are per second of the server's CPU time, in which its thread
that writes is included. Shares are medians of rounds, each of which is compared with the mean of the rounds without a
ledger before and after it.
"""

import argparse
import asyncio
import gc
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from tools.ports import free_port

from bench.frontend import CHUNK, SHORT, Caller, Connection, Stream, cpu_seconds, run, run_connections
from bench.servers import pin_to, run_server
from dragoman.config.sections import MEMORY, Budget
from dragoman.config.settings import Settings
from dragoman.server.telemetry.metrics import RequestRecord
from dragoman.storage.budgets import Owner
from dragoman.storage.database import Database
from dragoman.storage.ledger import Ledger

OWNERS = [Owner(f"{number:012x}", f"user:{number}") for number in range(50)]
PAUSE = 50
"""Requests between two turns of the event loop."""
PARALLEL = 64
CONNECTIONS = 64
STREAMS = 50
OFF = "without"
SERVE_WITHOUT = "serve-without-ledger"
TARGET_ENTRIES, TARGET_LOSS = 5000, 0.03


def measure_entries(address: str, count: int) -> float:
    """Requests per second that are opened, closed and written."""

    async def measure(ledger: Ledger) -> None:
        for number in range(count):
            owner = OWNERS[number % len(OWNERS)]
            record = _record(f"req-{number:024}", owner)
            ledger.open(record.id, owner, ["scripted"], 100, 500)
            ledger.close(record)
            if number % PAUSE == 0:
                await asyncio.sleep(0)
        await ledger.flush()

    return _rate(address, count, measure)


def measure_reservations(address: str, count: int) -> float:
    async def measure(ledger: Ledger) -> None:
        async def client(first: int) -> None:
            for number in range(first, count, PARALLEL):
                owner = OWNERS[number % len(OWNERS)]
                record = _record(f"req-{number:024}", owner)
                reserving = ledger.open(record.id, owner, ["scripted"], 100, 500)
                assert reserving is not None
                await reserving
                ledger.close(record)

        await asyncio.gather(*map(client, range(PARALLEL)))
        await ledger.flush()

    return _rate(address, count, measure, Budget(per="day", tokens=10**12, principal="*"))


def _record(request_id: str, owner: Owner) -> RequestRecord:
    return RequestRecord(
        id=request_id,
        route="POST /v1/chat/completions",
        principal=owner.principal,
        key=owner.key,
        model="scripted",
        status=200,
        prompt_tokens=90,
        completion_tokens=40,
    )


def _rate(address: str, count: int, measure: Callable[[Ledger], Any], *budgets: Budget) -> float:
    async def run_with_database() -> float:
        database = Database(address)
        database.open()
        ledger = Ledger(database, Settings(budgets=budgets), Counter())
        gc.collect()
        begun = time.perf_counter()
        await measure(ledger)
        seconds = time.perf_counter() - begun
        await ledger.stop()
        await asyncio.to_thread(database.close)
        return count / seconds

    return run(run_with_database())


def show_rates(rounds: int, count: int) -> None:
    print(f"ledger, per second   (target: {TARGET_ENTRIES:,} entries in SQLite)")
    for title, measure, total in (
        ("entries", measure_entries, count),
        ("reservations", measure_reservations, count // 10),
    ):
        found: dict[str, list[float]] = {"SQLite": [], "memory": []}
        for _ in range(rounds):
            for name, rates in found.items():
                with tempfile.TemporaryDirectory() as folder:
                    address = MEMORY if name == "memory" else f"{folder}/dragoman.db"
                    rates.append(measure(address, total))
        shown = "".join(f"  {name} {statistics.median(rates):>9,.0f}" for name, rates in found.items())
        print(f"  {title:<14}{shown}", flush=True)


@contextmanager
def run_storage(storage: str | None, text: str) -> Iterator[tuple[int, int]]:
    """Run Dragoman with the scripted engine; yields its port and process id. None: without a ledger."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "dragoman.json"
        path.write_text(
            f'{{"models": {{"scripted": {{"engine": "scripted", "replies": [{{"output": "{text}"}}]}}}},'
            f' "limits": {{"queue": 5000}}, "storage": "{storage or MEMORY}"}}'
        )
        module = ["dragoman", "serve"] if storage is not None else ["bench.storage", SERVE_WITHOUT]
        command = [sys.executable, "-m", *module, "--config", str(path), "--port", str(port), "--workers", "1"]
        with run_server(command, f"http://127.0.0.1:{port}/ready", is_pinned=True) as pid:
            yield port, pid


def serve_without_ledger(arguments: list[str]) -> int:
    """`dragoman serve` with a ledger that does nothing."""
    from dragoman.cli import main

    def ignore(*_: object) -> None:
        return None

    for method in ("open", "close", "find_warning"):
        setattr(Ledger, method, ignore)
    return main(["serve", *arguments])


def show_loss(title: str, create: Callable[[], Connection], count: int, rounds: int, text: str) -> None:
    """Print what part of the front end's throughput is lost with the ledger."""
    with ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
        storages = {OFF: None, "memory": MEMORY, "SQLite": f"{folder}/dragoman.db"}
        servers = {name: stack.enter_context(run_storage(storage, text)) for name, storage in storages.items()}
        speeds = {name: [_speed(create, count, server)] for name, server in servers.items()}
        for _ in range(rounds):
            for name in ("memory", OFF, "SQLite", OFF):
                speeds[name].append(_speed(create, count, servers[name]))
    off = speeds[OFF][1:]
    print(f"\n{title}   (target: below {TARGET_LOSS:.0%} lost)")
    print(f"  {OFF:<10}{statistics.median(off):>10,.0f} per second of CPU time")
    for name, at in (("memory", 0), ("SQLite", 1)):
        own = speeds[name][1:]
        # The neighbours in time: the machine is not equally busy all the time.
        around = [(off[max(0, 2 * number + at - 1)] + off[2 * number + at]) / 2 for number in range(rounds)]
        lost = [1 - speed / other for speed, other in zip(own, around, strict=True)]
        print(f"  {name:<10}{statistics.median(own):>10,.0f}   {statistics.median(lost):>6.1%} lost", flush=True)


def _speed(create: Callable[[], Connection], count: int, server: tuple[int, int]) -> float:
    port, pid = server
    begun = cpu_seconds(pid)
    done = run(run_connections(create, port, count))
    return done / max(cpu_seconds(pid) - begun, 0.01)


def main() -> int:
    if sys.argv[1:2] == [SERVE_WITHOUT]:
        return serve_without_ledger(sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few short rounds")
    quick = parser.parse_args().quick
    show_rates(3 if quick else 7, 10_000 if quick else 40_000)
    if pin := pin_to(1):
        pin()
    rounds, calls, tokens = (4, 40, 100) if quick else (20, 100, 250)
    requests = partial(Caller, calls)
    show_loss(f"requests, {CONNECTIONS} connections, short reply", requests, CONNECTIONS, rounds, SHORT)
    text = "word " * (tokens * CHUNK // 5)
    show_loss(f"frames, {STREAMS} streams of {tokens} tokens", Stream, STREAMS, rounds, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
