"""Steady load for as long as you like, and whether the server stays what it was.

    python -m tools.soak [streams] [mixed] [--minutes 60] [--workers 1|2] [--seed 1]

    streams   1,000 streams at 20 tokens per second each, from the scripted engine
    mixed     the requests of mix.py on SmolLM2

Without names both run, and without --workers each runs with one process and with two front ends, for as many minutes
each. The exit code is 1 unless

1. no request fails or is answered wrongly;
2. the 99th percentile of the lateness of a token is below 50 ms (streams);
3. memory, open files and threads of all processes of the server are flat;
4. SIGTERM ends the server with exit code 0 and leaves no process.

It needs the /proc of Linux.
"""

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

import uvloop

from tools.server import run_server
from tools.soak import mixed, streams
from tools.soak.growth import MEMORY_SHARE


def run_streams(folder: Path, arguments: argparse.Namespace, workers: int) -> list[str]:
    with run_server(folder, streams.config(), "--workers", str(workers)) as server:
        run = streams.Streams(server, arguments.seed)
        uvloop.run(run.run(arguments.minutes * 60, arguments.streams))
        return run.report(arguments.lateness_ms / 1000, arguments.memory_share)


def run_mixed(folder: Path, arguments: argparse.Namespace, workers: int) -> list[str]:
    with run_server(folder, mixed.config(), "--workers", str(workers)) as server:
        run = mixed.Mixed(server, arguments.seed)
        asyncio.run(run.run(arguments.minutes * 60, arguments.clients))
        return run.report(arguments.memory_share)


KINDS = {"streams": run_streams, "mixed": run_mixed}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help="streams or mixed; both where none is named")
    parser.add_argument("--minutes", type=float, default=60, help="of each run")
    parser.add_argument("--workers", type=int, action="append", help="front ends of the server; may be repeated")
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--clients", type=int, default=mixed.CLIENTS, help="of the mixed load")
    parser.add_argument("--lateness-ms", type=float, default=streams.LATENESS_P99 * 1000)
    parser.add_argument("--memory-share", type=float, default=MEMORY_SHARE, help="by which memory may grow")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.kinds if name not in KINDS]:
        parser.error(f"no such kind: {', '.join(unknown)}; there are {', '.join(KINDS)}")
    problems: list[str] = []
    for name in arguments.kinds or KINDS:
        for workers in arguments.workers or (1, 2):
            print(f"\n{name}, workers {workers}, {arguments.minutes:g} minutes", flush=True)
            with tempfile.TemporaryDirectory() as folder:
                found = KINDS[name](Path(folder), arguments, workers)
            problems += [f"{name}, workers {workers}: {problem}" for problem in found]
            print("\n".join(found) if found else "passed", flush=True)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
