"""`dragoman batch`: submits files of requests to a running server, shows their progress, and fetches the results."""

import argparse
import json
import shutil
import sys
import tempfile
import time
import urllib.parse
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from datetime import datetime
from pathlib import Path
from typing import IO, Any

import msgspec

from dragoman.cli import admin_client
from dragoman.cli.admin_client import AdminClient
from dragoman.cli.common import Commands, add_command, format_table, print_progress
from dragoman.core.errors import DECODE_ERRORS, ConfigError
from dragoman.protocols.batches import DEFAULT_WINDOW, FINAL_STATES

EXAMPLES = """\
examples:
  dragoman batch submit requests.jsonl --wait          run all requests of the file, and show the progress
  dragoman batch submit requests.jsonl --window 7d     requests without an answer after a week expire
  ./requests.py | dragoman batch submit -              read the requests from the standard input
  dragoman batch status                                list the batches
  dragoman batch status batch_0123456789ab             show one batch
  dragoman batch results batch_0123456789ab -o out.jsonl
  dragoman batch cancel batch_0123456789ab

FILE has one request on each line: {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {...}}.
The commands talk to the server at --url or $DRAGOMAN_URL, or to that of the configuration. If the server requires a
key, give one in --api-key or $DRAGOMAN_API_KEY.
"""
PATH, FILES = "/v1/batches", "/v1/files"
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
POLL_SECONDS = 1.0
MAX_OUTAGE_SECONDS = 120.0
"""How long `--wait` waits for a server that does not answer, such as one that restarts."""
BAR_WIDTH = 30
LIST_LIMIT = 20
STDIN = "-"


class _Line(msgspec.Struct):
    url: str


def add(commands: Commands) -> None:
    description = "Run many requests in the background: a batch in OpenAI's API."
    parser = add_command(commands, "batch", "run files of requests", description, EXAMPLES)
    actions = parser.add_subparsers(dest="action", metavar="ACTION", title="actions", required=True)
    submit = _add_action(actions, "submit", "submit a file of requests", _submit)
    submit.add_argument("file", metavar="FILE", help="requests as JSON lines; - is the standard input")
    submit.add_argument("--endpoint", metavar="PATH", help="the `url` of all requests (that of the first one)")
    submit.add_argument("--window", metavar="TIME", default=DEFAULT_WINDOW, help=f"24h, 7d ({DEFAULT_WINDOW})")
    submit.add_argument("--wait", action="store_true", help="wait for the end; exit code 1 if a request failed")
    status = _add_action(actions, "status", "show a batch, or list all", _show)
    status.add_argument("id", metavar="ID", nargs="?")
    results = _add_action(actions, "results", "print the results of a batch", _fetch)
    results.add_argument("id", metavar="ID")
    results.add_argument("-o", "--output", metavar="FILE", help="write them to this file")
    results.add_argument(
        "--errors", action="store_true", help="the requests that failed, instead of those that succeeded"
    )
    cancel = _add_action(actions, "cancel", "cancel a batch", _cancel)
    cancel.add_argument("id", metavar="ID")


def _add_action(actions: Commands, name: str, summary: str, run: Any) -> argparse.ArgumentParser:
    parser = add_command(actions, name, summary, f"{summary[:1].upper()}{summary[1:]}.", EXAMPLES)
    admin_client.add_flags(parser)
    if name != "results":
        parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)
    return parser


def _submit(arguments: argparse.Namespace) -> int:
    name = "the input" if arguments.file == STDIN else arguments.file
    try:
        with _open_input(arguments.file) as content:
            endpoint = _find_endpoint(content, name, arguments.endpoint)
            server = admin_client.from_arguments(arguments)
            file = server.upload(FILES, {"purpose": "batch"}, _upload_name(arguments.file), content)
    except OSError as error:
        raise ConfigError(f"{name}: {error.strerror or error}") from error
    fields = {"input_file_id": file["id"], "endpoint": endpoint, "completion_window": arguments.window}
    batch = server.post(PATH, fields)
    if not arguments.wait:
        _print(batch, arguments, batch["id"])
        return 0
    if arguments.json:
        print_progress(batch["id"])
    else:
        print(batch["id"], flush=True)
    try:
        batch = _wait(server, batch["id"])
    except KeyboardInterrupt:
        print_progress(f"\nthe batch continues; see dragoman batch status {batch['id']}")
        raise
    if arguments.json:
        print(json.dumps(batch, indent=2))
    else:
        print_progress(_describe(batch))
    return int(batch["status"] != "completed" or batch["request_counts"]["failed"] > 0)


@contextmanager
def _open_input(file: str) -> Generator[IO[bytes]]:
    """Open the file, or a copy of the standard input, which is read twice."""
    if file != STDIN:
        with Path(file).open("rb") as content:
            yield content
        return
    with tempfile.TemporaryFile() as copy:
        shutil.copyfileobj(sys.stdin.buffer, copy)
        copy.seek(0)
        yield copy


def _upload_name(file: str) -> str:
    return "stdin.jsonl" if file == STDIN else Path(file).name


def _find_endpoint(content: IO[bytes], name: str, given: str | None) -> str:
    """Return the given endpoint, or the `url` of the first line. The input is at its beginning again then."""
    first = next((line for line in content if line.strip()), b"").removeprefix(BYTE_ORDER_MARK)
    content.seek(0)
    if not first:
        raise ConfigError(f"{name}: the file is empty; expected one request on each line")
    if given is not None:
        return given
    try:
        return msgspec.json.decode(first, type=_Line).url
    except msgspec.ValidationError as error:
        raise ConfigError(f"{name}: the first line has no `url`; give --endpoint") from error
    except DECODE_ERRORS as error:
        raise ConfigError(f"{name}: the first line is not valid JSON; expected one request on each line") from error


def _wait(server: AdminClient, batch_id: str) -> Any:
    """Show the progress until the batch has ended."""
    answered = time.monotonic()
    while True:
        try:
            batch = server.get(f"{PATH}/{batch_id}")
            answered = time.monotonic()
        except ConfigError:
            if time.monotonic() - answered > MAX_OUTAGE_SECONDS:
                raise
        else:
            if sys.stderr.isatty():
                print(f"\r{_progress(batch)}\x1b[K", end="", file=sys.stderr, flush=True)
            if batch["status"] in FINAL_STATES:
                if sys.stderr.isatty():
                    print(file=sys.stderr)
                return batch
        time.sleep(POLL_SECONDS)


def _progress(batch: Any) -> str:
    counts = batch["request_counts"]
    total, done = counts["total"], counts["completed"] + counts["failed"]
    filled = BAR_WIDTH * done // total if total else 0
    failed = f", {counts['failed']} failed" if counts["failed"] else ""
    return f"[{'#' * filled}{'.' * (BAR_WIDTH - filled)}] {done}/{total} {batch['status']}{failed}"


def _show(arguments: argparse.Namespace) -> int:
    server = admin_client.from_arguments(arguments)
    if arguments.id is not None:
        batch = server.get(_path(arguments.id))
        _print(batch, arguments, _describe(batch))
        return 0
    batches = server.get(f"{PATH}?limit={LIST_LIMIT}")["data"]
    rows = [["BATCH", "CREATED", "STATUS", "LINES", "COMPLETED", "FAILED"]]
    for batch in batches:
        counts = batch["request_counts"]
        created = datetime.fromtimestamp(batch["created_at"]).astimezone().strftime("%Y-%m-%d %H:%M")
        numbers = [str(counts[name]) for name in ("total", "completed", "failed")]
        rows.append([batch["id"], created, batch["status"], *numbers])
    _print(batches, arguments, format_table(rows) if batches else "no batches")
    return 0


def _describe(batch: Any) -> str:
    counts, usage = batch["request_counts"], batch["usage"]
    tokens = f"{usage['input_tokens']} in ({usage['input_tokens_details']['cached_tokens']} cached)"
    rows = [
        ["batch", batch["id"]],
        ["status", batch["status"]],
        ["lines", f"{counts['total']}: {counts['completed']} completed, {counts['failed']} failed"],
        ["tokens", f"{tokens}, {usage['output_tokens']} out"],
    ]
    rows += [["error", error["message"]] for error in (batch["errors"] or {"data": []})["data"]]
    if batch["output_file_id"]:
        rows.append(["results", f"dragoman batch results {batch['id']}"])
    if batch["error_file_id"]:
        rows.append(["failed lines", f"dragoman batch results {batch['id']} --errors"])
    return format_table(rows)


def _fetch(arguments: argparse.Namespace) -> int:
    server = admin_client.from_arguments(arguments)
    batch = server.get(_path(arguments.id))
    if batch["status"] not in FINAL_STATES:
        raise ConfigError(f"{batch['id']} has no results yet; it is {batch['status']}")
    file = batch["error_file_id" if arguments.errors else "output_file_id"]
    with ExitStack() as stack:
        out: IO[bytes] = sys.stdout.buffer
        if arguments.output is not None:
            try:
                out = stack.enter_context(Path(arguments.output).open("wb"))
            except OSError as error:
                raise ConfigError(f"{arguments.output}: {error.strerror or error}") from error
        if file is not None:
            server.download(f"{FILES}/{file}/content", out)
        out.flush()
    failed = batch["request_counts"]["failed"]
    if failed and not arguments.errors:
        print_progress(f"{failed} lines failed; see them with --errors")
    return 0


def _cancel(arguments: argparse.Namespace) -> int:
    batch = admin_client.from_arguments(arguments).post(f"{_path(arguments.id)}/cancel", {})
    _print(batch, arguments, f"{batch['id']}: {batch['status']}")
    return 0


def _path(batch_id: str) -> str:
    return f"{PATH}/{urllib.parse.quote(batch_id, safe='')}"


def _print(value: Any, arguments: argparse.Namespace, text: str) -> None:
    print(json.dumps(value, indent=2) if arguments.json else text)
