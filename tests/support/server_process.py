"""Runs a real server in its own process."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import httpx
import pytest
from tools.ports import free_port

from dragoman.files import sources
from dragoman.server.auth.admin_token import ADMIN_TOKEN_HEADER, find_admin_token


@dataclass
class Running:
    port: int
    process: subprocess.Popen[bytes]
    log: Path
    event_log: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def operator(self) -> dict[str, str]:
        """The header that the operator's routes need if the server has no keys."""
        token = find_admin_token("127.0.0.1", self.port)
        return {} if token is None else {ADMIN_TOKEN_HEADER: token}

    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.event_log.read_text().splitlines()]

    def children(self) -> list[int]:
        return children_of(self.process.pid)

    def fronts(self) -> list[int]:
        """The processes that accept connections."""
        return fronts_of(self.process.pid)

    def workers(self) -> list[int]:
        """The processes that run engines."""
        return sorted(pid for pid in self.children() if b"ipc.worker_main" in command_of(pid))

    def stop(self, timeout: float = 100) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout)


def children_of(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        # A thread may just have ended.
        with suppress(FileNotFoundError):
            found += map(int, (task / "children").read_text().split())
    return found


def fronts_of(pid: int) -> list[int]:
    return sorted(child for child in children_of(pid) if b"frontends.process" in command_of(child))


def command_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def has_ended(pid: int) -> bool:
    """Whether a process has ended; a zombie counts as ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


class Serving(Protocol):
    """The fixture `serving`: starts servers in the arrangement of the test."""

    def __call__(self, folder: Path, config: Mapping[str, Any], *flags: str) -> AbstractContextManager[Running]: ...


@contextmanager
def serving(folder: Path, config: Mapping[str, Any], *flags: str, workers: int = 1) -> Iterator[Running]:
    """`dragoman serve` with this configuration, ready for use until the end of the block."""
    with serving_at(folder, config, _plain, *flags, workers=workers) as (running, _):
        yield running


def server_fixture(config: Mapping[str, Any], *flags: str) -> Any:
    """A fixture of the tests of a module: one server with this configuration, in the arrangement of the test."""

    @pytest.fixture(scope="module")
    def server(tmp_path_factory: pytest.TempPathFactory, serving: Serving) -> Iterator[Running]:
        with serving(tmp_path_factory.mktemp("server"), config, *flags) as running:
            yield running

    return server


def _plain(port: int) -> httpx.Client:
    return httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False)


@contextmanager
def serving_at(
    folder: Path, config: Mapping[str, Any], connect: Callable[[int], httpx.Client], *flags: str, workers: int = 1
) -> Iterator[tuple[Running, httpx.Client]]:
    """The same with a special client, for servers that a plain one cannot reach."""
    port = free_port()
    file = folder / "dragoman.json"
    # Models that the developer has pulled are not part of a test.
    file.write_text(json.dumps({"models_dir": []} | dict(config)))
    log, event_log = folder / "server.log", folder / "events.jsonl"
    command = [sys.executable, "-m", "dragoman", "serve", "--config", str(file), "--port", str(port)]
    command += ["--workers", str(workers), "--event-log", str(event_log), *flags]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env=os.environ | {"PYTHONWARNINGS": "default"}
        )
    running = Running(port, process, log, event_log)
    try:
        with connect(port) as client:
            _wait_until_ready(running, client)
            yield running, client
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
            # A killed server leaves its token file.
            (sources.home_directory() / "run" / f"127.0.0.1_{port}.token").unlink(missing_ok=True)


def _wait_until_ready(running: Running, client: httpx.Client) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if running.process.poll() is not None:
            raise AssertionError(f"the server ended:\n{running.log.read_text()}")
        try:
            # With several front ends, one may answer before all listen. This line comes when all do.
            if client.get("/ready").status_code == 200 and "serving " in running.log.read_text():
                return
        except httpx.TransportError:
            pass
        time.sleep(0.05)
    raise AssertionError(f"the server did not become ready:\n{running.log.read_text()}")
