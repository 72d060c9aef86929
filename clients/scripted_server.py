"""Runs `dragoman serve` with the scripted models of the clients."""

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.error import URLError
from urllib.request import urlopen

from clients.client import KEY, Client

SLOTS = 8
START_SECONDS = 60
STOP_SECONDS = 40


class Server(NamedTuple):
    url: str
    log: Path
    event_log: Path

    def answers(self) -> list[tuple[int, str]]:
        """Status and error of every request so far, in the order in which they ended."""
        lines = self.event_log.read_text().splitlines() if self.event_log.exists() else []
        events = [event for event in map(json.loads, lines) if event["event"] == "request"]
        own = ("GET /ready", "GET /metrics")
        return [(event["status"], event.get("error", "")) for event in events if event["route"] not in own]

    def is_busy(self, model: str) -> bool:
        with urlopen(f"{self.url}/metrics", timeout=10) as reply:
            lines = reply.read().decode().splitlines()
        return any(
            line.startswith(f'dragoman_slots_busy{{model="{model}"}}') and float(line.split()[1]) for line in lines
        )


def configure(clients: Sequence[Client]) -> dict[str, Any]:
    """A scripted model for each agent, and one for the SDKs."""
    return {
        "api_keys": [KEY],
        "models": {client.model: _scripted(client) for client in clients},
        "aliases": {"claude-*": "for-claude-code", "gpt-*": "for-codex"},
        "telemetry": {"metrics": "open"},
    }


def _scripted(client: Client) -> dict[str, Any]:
    """Only models with slots show that they are busy."""
    options = {"engine": "scripted", "format": "hermes", "context": client.context, "slots": SLOTS}
    return {**options, "replies": list(client.replies)}


@contextmanager
def run_server(folder: Path, configuration: Mapping[str, Any], *flags: str) -> Iterator[Server]:
    """Serve with everything that it writes in `folder`."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    server = Server(f"http://127.0.0.1:{port}", folder / "server.log", folder / "events.jsonl")
    files = {"storage": str(folder / "dragoman.db"), "event_log": str(server.event_log)}
    file = folder / "dragoman.json"
    file.write_text(json.dumps({**configuration, **files}))
    command = [sys.executable, "-m", "dragoman", "serve", "--config", str(file), "--port", str(port), *flags]
    with server.log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        _wait_until_ready(process, server)
        yield server
    finally:
        end(process)


def _wait_until_ready(process: subprocess.Popen[bytes], server: Server) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            urlopen(f"{server.url}/ready", timeout=1).close()
            return
        except (URLError, OSError):
            time.sleep(0.1)
    raise SystemExit(f"the server did not start:\n{server.log.read_text()}")


def end(process: subprocess.Popen[bytes], patience: float = STOP_SECONDS) -> None:
    process.terminate()
    try:
        process.wait(patience)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
