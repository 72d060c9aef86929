"""`dragoman bench`: how fast a server answers, seen from outside. Any that speaks OpenAI's chat completions.

The exit code is 1 when requests failed: the figures are then those of the others.
"""

import argparse
import asyncio
import os
import random
import sys
from pathlib import Path

import msgspec

from dragoman.core.errors import ConfigError
from dragoman.core.urls import site
from dragoman.loadtest import report
from dragoman.loadtest.figures import Plan, Result
from dragoman.loadtest.plot import svg

MOST_AT_ONCE = 10_000
"""Each has a connection of its own; more are a slip of the finger."""
EXAMPLES = """\
examples:
  dragoman bench                                         the server on http://127.0.0.1:8000
  dragoman bench --concurrency 1,4,16 --prompt 1000 --shared 0.9 --plot bench.svg
  dragoman bench --url http://127.0.0.1:11434 --model llama3.2 --json bench.json

The key may also be in $OPENAI_API_KEY. TTFT is the time to the first token, a gap the time from one piece of a stream
to the next. The prompts of every run are new ones, unless --seed asks for the same again.
"""


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "bench",
        help="measure a server",
        description="Measure a running server of the OpenAI API: streamed chat completions, more and more at once.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the server's address (http://127.0.0.1:8000)")
    parser.add_argument("--model", metavar="NAME", help="the model to ask (the first that the server lists)")
    parser.add_argument("--api-key", metavar="KEY", help="a key for that server")
    parser.add_argument("--concurrency", metavar="N,N", default="1,4,16", help="requests at once, by level (1,4,16)")
    parser.add_argument("--requests", metavar="N", type=int, help="requests of each level (4 for each at once)")
    parser.add_argument("--prompt", metavar="N", type=int, default=256, help="tokens of a prompt (256)")
    parser.add_argument("--output", metavar="N", type=int, default=64, help="tokens of a reply (64)")
    parser.add_argument(
        "--shared",
        metavar="SHARE",
        type=float,
        default=0.0,
        help="how much of the prompt all have in common (0 to 1; 0)",
    )
    parser.add_argument("--seed", metavar="N", type=int, help="the same prompts as in another run with this number")
    parser.add_argument(
        "--timeout", metavar="SECONDS", type=float, default=300.0, help="the longest silence of the server (300)"
    )
    parser.add_argument("--plot", metavar="FILE", help="write a picture of the figures, as FILE.svg")
    parser.add_argument("--json", metavar="FILE", help="write all figures, with those of each request")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    plan = _plan(arguments)
    _check_url(arguments.url)
    _check_files(arguments.plot, arguments.json)
    result, interrupted = _measured(arguments, plan)
    if result.levels:
        print(report.text(result), flush=True)
        if arguments.plot is not None:
            _write(arguments.plot, svg(report.title(result), report.load(result), result.figures))
        if arguments.json is not None:
            _write(arguments.json, msgspec.json.format(msgspec.json.encode(result)).decode() + "\n")
    if interrupted:
        if not result.levels:
            print("stopped before anything was measured", file=sys.stderr, flush=True)
        return 130
    return 1 if any(level.errors for level in result.figures) else 0


def _measured(arguments: argparse.Namespace, plan: Plan) -> tuple[Result, bool]:
    """What was measured, and whether a Ctrl-C ended it."""
    # Imported only here: the other commands and mistakes in flags need no client.
    import uvloop

    from dragoman.loadtest.sweep import Sweep
    from dragoman.loadtest.target import Target

    key = arguments.api_key or os.environ.get("OPENAI_API_KEY")
    target = Target(arguments.url, key, arguments.model, arguments.timeout)
    sweep = Sweep(target, plan, lambda words: print(words, file=sys.stderr, flush=True))
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(sweep.run())
    except KeyboardInterrupt:
        return sweep.result(), True
    return sweep.result(), False


def _plan(arguments: argparse.Namespace) -> Plan:
    try:
        concurrency = tuple(int(level) for level in arguments.concurrency.split(","))
    except ValueError:
        concurrency = ()
    if not concurrency or min(concurrency) < 1:
        raise ConfigError(f"--concurrency {arguments.concurrency}: expected numbers such as 1,4,16")
    if max(concurrency) > MOST_AT_ONCE:
        raise ConfigError(f"--concurrency {arguments.concurrency}: at most {MOST_AT_ONCE:,} requests at once")
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
    return Plan(concurrency, arguments.prompt, arguments.output, arguments.shared, arguments.requests, seed)


def _check_url(url: str) -> None:
    try:
        site(url)
    except ConfigError as error:
        raise ConfigError(f"--url {error}") from error


def _check_files(plot: str | None, figures: str | None) -> None:
    """Before the minutes that it takes to have something to write."""
    if plot is not None and Path(plot).suffix.lower() != ".svg":
        raise ConfigError(f"--plot {plot}: the picture is an SVG; give a name that ends in .svg")
    if plot is not None and figures is not None and Path(plot).resolve() == Path(figures).resolve():
        raise ConfigError(f"--plot and --json are the same file, {plot}; give two names")
    for flag, name in (("--plot", plot), ("--json", figures)):
        if name is None:
            continue
        if Path(name).is_dir():
            raise ConfigError(f"{flag} {name}: there is a folder of this name; give that of a file")
        if not Path(name).absolute().parent.is_dir():
            raise ConfigError(f"{flag} {name}: there is no folder {Path(name).parent}")


def _write(name: str, text: str) -> None:
    try:
        Path(name).write_text(text)
    except OSError as error:
        raise ConfigError(f"cannot write {name}: {error.strerror}") from error
