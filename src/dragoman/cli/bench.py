"""`dragoman bench`: measures any server of the OpenAI chat completions API.

The exit code is 1 if requests failed. The figures cover the successful ones.
"""

import argparse
import asyncio
import os
import random
from pathlib import Path

import msgspec

from dragoman.cli.common import Commands, add_command, print_progress
from dragoman.core.errors import ConfigError
from dragoman.core.urls import parse_address
from dragoman.loadtest import report
from dragoman.loadtest.figures import LoadPlan, LoadResult
from dragoman.loadtest.plot import draw_svg

MAX_CONCURRENCY = 10_000
"""Each concurrent request needs its own connection."""
EXAMPLES = """\
examples:
  dragoman bench                                         the server on http://127.0.0.1:8000
  dragoman bench --concurrency 1,4,16 --prompt 1000 --shared 0.9 --plot bench.svg
  dragoman bench --url http://127.0.0.1:11434 --model llama3.2 --json bench.json

The key may also be in $OPENAI_API_KEY. TTFT is the time to the first token, GAP the time between two pieces of a
stream. Each run uses new prompts, unless --seed repeats those of another run.
"""


def add(commands: Commands) -> None:
    description = "Measure a running server of the OpenAI API with streamed chat completions at rising concurrency."
    parser = add_command(commands, "bench", "measure a server", description, EXAMPLES)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the server's address (http://127.0.0.1:8000)")
    parser.add_argument("--model", metavar="NAME", help="the model (the first that the server lists)")
    parser.add_argument("--api-key", metavar="KEY", help="a key for that server")
    parser.add_argument("--concurrency", metavar="N,N", default="1,4,16", help="concurrent requests per level (1,4,16)")
    parser.add_argument("--requests", metavar="N", type=int, help="requests per level (4 times the concurrency)")
    parser.add_argument("--prompt", metavar="N", type=int, default=256, help="tokens per prompt (256)")
    parser.add_argument("--output", metavar="N", type=int, default=64, help="tokens per reply (64)")
    parser.add_argument(
        "--shared",
        metavar="SHARE",
        type=float,
        default=0.0,
        help="share of the prompt that all prompts have in common, from 0 to 1 (0)",
    )
    parser.add_argument("--seed", metavar="N", type=int, help="use the prompts of another run with this seed")
    parser.add_argument(
        "--timeout", metavar="SECONDS", type=float, default=300.0, help="fail a request after this much silence (300)"
    )
    parser.add_argument("--plot", metavar="FILE", help="write a plot to FILE.svg")
    parser.add_argument("--json", metavar="FILE", help="write all figures, with those of each request")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    plan = _build_plan(arguments)
    try:
        parse_address(arguments.url)
    except ConfigError as error:
        raise ConfigError(f"--url {error}") from error
    _check_files(arguments.plot, arguments.json)
    result, interrupted = _measure(arguments, plan)
    if result.levels:
        print(report.format_result(result), flush=True)
        if arguments.plot is not None:
            svg = draw_svg(report.format_title(result), report.format_load(result), result.figures)
            _write(arguments.plot, svg)
        if arguments.json is not None:
            _write(arguments.json, msgspec.json.format(msgspec.json.encode(result)).decode() + "\n")
    if interrupted:
        if not result.levels:
            print_progress("stopped before anything was measured")
        return 130
    return 1 if any(level.errors for level in result.figures) else 0


def _measure(arguments: argparse.Namespace, plan: LoadPlan) -> tuple[LoadResult, bool]:
    """Return the result, and whether Ctrl-C ended the run."""
    # Imported late to keep the start of other commands fast.
    import uvloop

    from dragoman.loadtest.sweep import Sweep
    from dragoman.loadtest.target import Target

    key = arguments.api_key or os.environ.get("OPENAI_API_KEY")
    target = Target(arguments.url, key, arguments.model, arguments.timeout)
    sweep = Sweep(target, plan, print_progress)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(sweep.run())
    except KeyboardInterrupt:
        return sweep.result(), True
    return sweep.result(), False


def _build_plan(arguments: argparse.Namespace) -> LoadPlan:
    try:
        concurrency = tuple(int(level) for level in arguments.concurrency.split(","))
    except ValueError:
        concurrency = ()
    if not concurrency or min(concurrency) < 1:
        raise ConfigError(f"--concurrency {arguments.concurrency}: expected numbers such as 1,4,16")
    if max(concurrency) > MAX_CONCURRENCY:
        raise ConfigError(f"--concurrency {arguments.concurrency}: at most {MAX_CONCURRENCY:,} requests at once")
    for flag, number in (("--prompt", arguments.prompt), ("--output", arguments.output)):
        if number < 1:
            raise ConfigError(f"{flag} {number}: expected at least 1")
    if not 0 <= arguments.shared <= 1:
        raise ConfigError(f"--shared {arguments.shared}: expected a share from 0 to 1")
    if not arguments.timeout > 0:
        raise ConfigError(f"--timeout {arguments.timeout}: expected more than 0 seconds")
    if arguments.requests is not None and arguments.requests < max(concurrency):
        raise ConfigError(f"--requests {arguments.requests}: too few for {max(concurrency)} at once")
    seed = random.randrange(10**6) if arguments.seed is None else arguments.seed
    return LoadPlan(concurrency, arguments.prompt, arguments.output, arguments.shared, arguments.requests, seed)


def _check_files(plot: str | None, figures: str | None) -> None:
    """Check the output files before the run, which may take minutes."""
    if plot is not None and Path(plot).suffix.lower() != ".svg":
        raise ConfigError(f"--plot {plot}: the plot is an SVG; give a name that ends in .svg")
    if plot is not None and figures is not None and Path(plot).resolve() == Path(figures).resolve():
        raise ConfigError(f"--plot and --json are the same file, {plot}; give two names")
    for flag, name in (("--plot", plot), ("--json", figures)):
        if name is None:
            continue
        if Path(name).is_dir():
            raise ConfigError(f"{flag} {name}: is a directory; give the name of a file")
        if not Path(name).absolute().parent.is_dir():
            raise ConfigError(f"{flag} {name}: directory {Path(name).parent} not found")


def _write(name: str, text: str) -> None:
    try:
        Path(name).write_text(text)
    except OSError as error:
        raise ConfigError(f"cannot write {name}: {error.strerror}") from error
