"""The command line: `python -m tools.fuzz`."""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from dragoman.files import sources
from tools.fuzz.isolation import LocalRun
from tools.fuzz.runner import HttpRun, Summary
from tools.fuzz.servers import PROFILES
from tools.fuzz.state import Book
from tools.fuzz.targets import HTTP_TARGETS, LOCAL_SHARES, SHARES, TARGETS, config

REQUESTS = {"scripted": 1_000_000, "smollm2": 50_000}
MIB = 2**20


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m tools.fuzz", description=__doc__, allow_abbrev=False)
    made.add_argument(
        "targets", nargs="*", metavar="TARGET", help=f"what to fuzz: {', '.join(TARGETS)}; all by default"
    )
    made.add_argument("--engine", choices=list(REQUESTS), help="the engine behind the server; both by default")
    made.add_argument("--requests", type=int, metavar="N", help="how many; 1,000,000 on scripted and 50,000 on smollm2")
    made.add_argument("--seed", help="text that the cases are made from; the commit by default")
    made.add_argument("--only", metavar="N", help="repeat one case, or several: N or FIRST-LAST")
    made.add_argument("--resume", action="store_true", help="go on where the last run stopped")
    made.add_argument("--workers", type=int, default=1, help="front-end processes of the server")
    made.add_argument("--folder", type=Path, help="where progress and findings are kept; .fuzz by default")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    args = parser().parse_args(arguments)
    unknown = set(args.targets) - set(TARGETS)
    if unknown:
        print(f"unknown target {', '.join(sorted(unknown))}; there are: {', '.join(TARGETS)}", file=sys.stderr)
        return 2
    places = () if args.folder is None else (args.folder,)
    book = Book(args.seed, *places, resume=args.resume)
    print(f"seed {book.state.seed}", flush=True)
    summaries = [
        run_target(book, engine, target, numbers, args.workers)
        for engine in ([args.engine] if args.engine else list(REQUESTS))
        for target, share in SHARES[engine].items()
        if not args.targets or target in args.targets
        if (numbers := chosen(book, engine, target, share * (args.requests or REQUESTS[engine]), args.only))
    ]
    print(table(summaries))
    for signature, finding in book.findings.items():
        print(f"\n{finding.kind}, {book.counts[signature]} times: {finding.text[:400]}\n    {finding.command}")
    if not (args.only or args.targets):
        book.finish()
    return 1 if book.state.findings else 0


def chosen(book: Book, engine: str, target: str, count: float, only: str | None) -> Sequence[int]:
    """The numbers of the cases to run."""
    if only is not None:
        first, _, last = only.partition("-")
        return range(int(first), int(last or first) + 1)
    return range(book.next_number(engine, target), int(count))


def run_target(book: Book, engine: str, target: str, numbers: Sequence[int], workers: int) -> Summary:
    if engine == "scripted" and target in LOCAL_SHARES:
        summary = LocalRun(target, book.state.seed, book).run(numbers)
    else:
        summary = run_http(book, engine, target, numbers, workers)
    print(line(summary), flush=True)
    return summary


def run_http(book: Book, engine: str, target: str, numbers: Sequence[int], workers: int) -> Summary:
    seed, kind, profile = book.state.seed, HTTP_TARGETS[target], PROFILES[engine]
    model = sources.fetch("smollm2") if engine == "smollm2" else None
    with tempfile.TemporaryDirectory(prefix="dragoman-fuzz-") as folder, config(target, model) as settings:
        run = HttpRun(
            target,
            engine,
            seed,
            book,
            Path(folder),
            make=lambda number: kind.case(engine, seed, number),
            config=settings,
            connections=kind.connections,
            seconds=profile.seconds,
            workers=workers,
        )
        return run.run(numbers)


def line(summary: Summary) -> str:
    outcomes = ", ".join(f"{name}: {count}" for name, count in sorted(summary.outcomes.items()))
    first, last = summary.memory
    return (
        f"{summary.engine + '/' + summary.target:20} {summary.cases:9,} cases {summary.rate:7,.0f}/s "
        f"{summary.findings:4} findings  {first / MIB:5.0f} -> {last / MIB:.0f} MiB  {outcomes}"
    )


def table(summaries: Sequence[Summary]) -> str:
    return "\n".join(["", *map(line, summaries)])


if __name__ == "__main__":
    sys.exit(main())
