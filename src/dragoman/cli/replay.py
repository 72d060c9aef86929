"""`dragoman replay`: sends the requests of a recording again and compares the replies, or makes a script of them.

The exit code is 1 if a reply differs that should be the same, or if a request failed.
"""

import argparse
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import islice
from typing import TYPE_CHECKING

import msgspec

from dragoman.cli import admin_client
from dragoman.cli.common import Commands, add_command, print_progress
from dragoman.core.errors import ConfigError

if TYPE_CHECKING:
    from dragoman.recordings.recorded_exchange import RecordedExchange

MAX_CONCURRENCY = 1000
EXAMPLES = """\
examples:
  dragoman serve --record recording.jsonl              record requests and replies, prompts included
  dragoman replay recording.jsonl                      send them again to the server of the configuration
  dragoman replay recording.jsonl --model other        compare another model
  dragoman replay recording.jsonl --only 3,7-9 --url http://10.0.0.2:8000
  dragoman replay recording.jsonl --to-script script.yaml
                                                       make a script of it, for `dragoman serve --config script.yaml`

Replies are compared exactly if the request has a temperature of 0, a top_k of 1 or a seed, or with --exact. Others show
how similar they are. Exit code 1: a reply differs that should be the same, or a request failed.
"""
FILE_MODE = 0o600


def add(commands: Commands) -> None:
    description = "Send recorded requests again, and compare the replies with the recorded ones."
    parser = add_command(commands, "replay", "send recorded requests again", description, EXAMPLES)
    parser.add_argument("recording", metavar="FILE", help="a file that `dragoman serve --record` has written")
    parser.add_argument("--model", metavar="NAME", help="ask this model instead")
    parser.add_argument("--only", metavar="N,N", help="only these lines of the file, such as 3,7-9")
    parser.add_argument("--limit", metavar="N", type=int, help="only the first N of them")
    parser.add_argument("--concurrency", metavar="N", type=int, default=1, help="requests at a time (1)")
    parser.add_argument("--exact", action="store_true", help="sampled replies must be the same too")
    parser.add_argument("--json", action="store_true", help="print JSON")
    script_help = "make a configuration of the scripted engine instead, in OUT or on the standard output"
    parser.add_argument("--to-script", metavar="OUT", nargs="?", const="-", help=script_help)
    admin_client.add_flags(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    if not 1 <= arguments.concurrency <= MAX_CONCURRENCY:
        raise ConfigError(f"--concurrency {arguments.concurrency}: expected 1 to {MAX_CONCURRENCY}")
    if arguments.limit is not None and arguments.limit < 1:
        raise ConfigError(f"--limit {arguments.limit}: expected at least 1")
    # Imported late to keep the start of other commands fast.
    from dragoman.recordings.recorded_exchange import read_recording

    is_wanted = _line_filter(arguments.only)
    wanted = (numbered for numbered in read_recording(arguments.recording) if is_wanted(numbered[0]))
    exchanges = islice(wanted, arguments.limit)
    if arguments.to_script is not None:
        return _write_script(arguments.recording, (exchange for _, exchange in exchanges), arguments.to_script)
    return _replay(arguments, exchanges)


def _line_filter(text: str | None) -> Callable[[int], bool]:
    if text is None:
        return lambda number: True
    ranges: list[range] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        if not (first.strip().isdecimal() and (last or first).strip().isdecimal()):
            raise ConfigError(f"--only {text}: expected numbers of lines such as 3,7-9")
        ranges.append(range(int(first), int(last or first) + 1))
    return lambda number: any(number in lines for lines in ranges)


def _write_script(recording: str, exchanges: "Iterator[RecordedExchange]", out: str) -> int:
    from dragoman.recordings.scripts import ScriptBuilder, dump_config

    builder, count = ScriptBuilder(), 0
    for exchange in exchanges:
        builder.add(exchange)
        count += 1
    left_out = builder.skipped.total()
    for reason, times in builder.skipped.most_common():
        print_progress(f"left out {times}: {reason}")
    if left_out == count:
        raise ConfigError(f"{recording} has no reply for a script")
    text = f"# {count - left_out} of {count} exchanges of {recording}\n{dump_config(builder.config())}"
    if out == "-":
        print(text, end="")
        return 0
    try:
        descriptor = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, FILE_MODE)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ConfigError(f"cannot write {out}: {error.strerror}") from error
    print_progress(f"wrote {out}; serve it with `dragoman serve --config {out}`")
    return 0


def _replay(arguments: argparse.Namespace, exchanges: "Iterator[tuple[int, RecordedExchange]]") -> int:
    from dragoman.recordings import report
    from dragoman.recordings.replay import Replayer

    results = []
    with closing(admin_client.from_arguments(arguments)) as client:
        replayer = Replayer(client.stream, arguments.model, arguments.exact, arguments.concurrency)
        for replayed in replayer.run(exchanges):
            results.append(replayed)
            if not arguments.json:
                print(report.format_result(replayed), flush=True)
    if not results:
        raise ConfigError(f"{arguments.recording} has no exchanges to send")
    verdicts = Counter(found.comparison.verdict for found in results if found.comparison is not None)
    if arguments.json:
        summary: dict[str, int] = {str(name): count for name, count in verdicts.items()}
        summary["skipped"] = len(results) - verdicts.total()
        encoded = msgspec.json.encode({"exchanges": results, "summary": summary})
        print(msgspec.json.format(encoded, indent=2).decode())
    else:
        print(f"\n{report.format_summary(results)}")
    return 1 if verdicts["differs"] or verdicts["failed"] else 0
