"""Runs one client in a home and a folder of its own, and checks the result.

A client has passed if it exited with 0, its tool has written the file, the answer was printed, and the server refused
no request but those that the client is known to try first.
"""

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from clients import packages
from clients.client import ANSWER, PROOF, URL, Client, Outcome
from clients.scripted_server import Server

SECONDS = 120
GIVEN_UP = 499
UPGRADED = 101
SHOWN = 2000


class Run(NamedTuple):
    status: int | None
    """None if the time was over."""
    output: str
    errors: str


class Home:
    """A home and a folder of its own for one client."""

    def __init__(self, folder: Path, client: Client, url: str) -> None:
        self.client = client
        self.url = url
        # Away from the checkout: an agent reads what it finds in the folders above its own.
        self.home, self.work = folder / "home", folder / "work"
        self.home.mkdir()
        self.work.mkdir()
        for place, source in client.files.items():
            target = self.home / place
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(self._addressed((packages.HERE / "settings" / source).read_text()))

    def start(self, command: Sequence[str]) -> subprocess.Popen[str]:
        variables = {name: self._addressed(value) for name, value in self.client.environment.items()}
        path = packages.search_path(self.client.package)
        return subprocess.Popen(
            [packages.program(self._addressed(part)) for part in command],
            cwd=self.work,
            env={"PATH": path, "HOME": str(self.home), "TERM": "dumb", "LANG": "C.UTF-8", **variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, command: Sequence[str], limit: float = SECONDS) -> Run:
        return finish(self.start(command), limit)

    def _addressed(self, text: str) -> str:
        return text.replace(URL, self.url)


def finish(process: subprocess.Popen[str], limit: float = SECONDS) -> Run:
    """Wait for a client, at most `limit` seconds, and end what it has left behind."""
    status: int | None = None
    try:
        output, errors = process.communicate(timeout=limit)
        status = process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, errors = process.communicate()
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # It has left nothing behind.
    return Run(status, output, errors)


def run_client(client: Client, server: Server) -> Outcome:
    before, begun = len(server.answers()), time.monotonic()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        home = Home(Path(folder), client, server.url)
        run = home.run(client.command)
        proof = home.work / "proof.txt"
        written = proof.read_text() if proof.exists() else None
    seconds = time.monotonic() - begun
    answers = server.answers()[before:]
    problem = find_problem(run, written, client, answers)
    if problem:
        show_failure(client.name, problem, run, server, answers)
    return Outcome(client, packages.version(client.package), len(answers), seconds, problem)


def find_problem(run: Run, written: str | None, client: Client, answers: Sequence[tuple[int, str]]) -> str:
    if problem := find_bad_end(run):
        return problem
    if written is None or written.strip() != PROOF:
        return "the tool did not run" if written is None else f"the tool wrote {written!r}"
    if run.output.count(ANSWER) < client.answers:
        return "the answer was not printed"
    return find_refusals(client, answers)


def find_bad_end(run: Run) -> str:
    if run.status is None:
        return f"not done after {SECONDS} s"
    return f"ended with status {run.status}" if run.status else ""


def find_refusals(client: Client, answers: Sequence[tuple[int, str]]) -> str:
    if client.uses_websocket != any(status == UPGRADED for status, _ in answers):
        return "no WebSocket was used" if client.uses_websocket else "a WebSocket was used"
    expected = {GIVEN_UP, *client.refused}
    refused = {f"{status} {error}" for status, error in answers if error and status not in expected}
    return f"requests were answered {', '.join(sorted(refused))}" if refused else ""


def show_failure(name: str, problem: str, run: Run, server: Server, answers: Sequence[tuple[int, str]]) -> None:
    parts: Mapping[str, str] = {
        "output": run.output,
        "errors": run.errors,
        "answered": str(answers),
        "server": server.log.read_text(),
    }
    shown = "\n".join(f"--- {title}\n{text[-SHOWN:]}" for title, text in parts.items())
    print(f"{name}: {problem}\n{shown}\n---", flush=True)
