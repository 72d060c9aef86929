"""A `dragoman serve` in a process of its own, and what its processes use.

Fuzzing, fault injection and soak tests start their servers here. It needs the /proc of Linux.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from tools.ports import free_port

START_SECONDS = 120.0
STOP_SECONDS = 100.0
FRONT_END_MODULE = b"dragoman.server.frontends.process"
WORKER_MODULE = b"dragoman.ipc.worker_main"


class Usage(NamedTuple):
    """What a process, or several together, use."""

    memory: int
    """Bytes of anonymous memory. The pages of a model's file do not count."""
    files: int
    threads: int


@dataclass
class Server:
    process: subprocess.Popen[bytes]
    port: int
    log: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def processes(self) -> list[int]:
        """The server and all its descendants."""
        return process_tree(self.process.pid)

    def front_ends(self) -> list[int]:
        return sorted(pid for pid in self.processes() if FRONT_END_MODULE in command_of(pid))

    def workers(self) -> list[int]:
        """The processes in which engines run."""
        return sorted(pid for pid in self.processes() if WORKER_MODULE in command_of(pid))

    def usage(self) -> Usage:
        """The sum for all its processes."""
        found = [usage for pid in self.processes() if (usage := usage_of(pid)) is not None]
        return Usage(*(sum(column) for column in zip(*found, strict=True))) if found else Usage(0, 0, 0)

    def cpu_seconds(self) -> float:
        """CPU time that its present processes have used so far, together."""
        return sum(cpu_seconds_of(pid) for pid in self.processes())

    def wait_until_ready(self, connect: Callable[[int], httpx.Client], logged: str) -> None:
        """Raise RuntimeError, with the log, if the server exits or does not become ready."""
        deadline = time.monotonic() + START_SECONDS
        with connect(self.port) as client:
            while time.monotonic() < deadline and self.is_alive:
                try:
                    if client.get("/ready").status_code == 200 and logged in self.log.read_text(errors="replace"):
                        return
                except httpx.TransportError:
                    pass
                time.sleep(0.05)
        state = "did not become ready" if self.is_alive else f"exited with {self.process.returncode}"
        raise RuntimeError(f"the server {state}:\n{self.log.read_text(errors='replace')}")

    def stop(self, seconds: float = STOP_SECONDS) -> int:
        """Send SIGTERM and return the exit code. Raise subprocess.TimeoutExpired if it does not exit in time."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(seconds)


def plain_client(port: int) -> httpx.Client:
    return httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=5)


@contextmanager
def run_server(
    folder: Path,
    config: Mapping[str, Any],
    *flags: str,
    env: Mapping[str, str] | None = None,
    connect: Callable[[int], httpx.Client] = plain_client,
    logged: str = "",
) -> Iterator[Server]:
    """A server with this configuration, ready, until the end of the block.

    It is ready when `/ready` says so and its log contains `logged`.
    """
    port = free_port()
    file, log = folder / "dragoman.json", folder / "server.log"
    # Models that the developer has pulled are not used.
    file.write_text(json.dumps({"models_dir": []} | dict(config)))
    command = [sys.executable, "-m", "dragoman", "serve", "--config", str(file), "--port", str(port), *flags]
    storage = config.get("storage", {})
    if "--storage" not in flags and not (isinstance(storage, str) or "address" in storage):
        command += ["--storage", str(folder / "dragoman.db")]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=os.environ | dict(env or {}))
    server = Server(process, port, log)
    try:
        server.wait_until_ready(connect, logged)
        yield server
    finally:
        remaining = server.processes()
        if server.is_alive:
            process.kill()
            process.wait()
        for pid in remaining:
            kill(pid, signal.SIGKILL)


def kill(pid: int, signal_number: signal.Signals) -> bool:
    """Send a signal; False if the process has ended."""
    try:
        os.kill(pid, signal_number)
    except ProcessLookupError:
        return False
    return True


def command_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def is_server_process(pid: int) -> bool:
    """Whether a process that was a part of a server still runs. A zombie has no command line."""
    return b"dragoman" in command_of(pid)


def process_tree(pid: int) -> list[int]:
    """The process and its descendants, as far as they still run."""
    try:
        tasks = list(Path(f"/proc/{pid}/task").glob("*/children"))
        children = [int(child) for task in tasks for child in task.read_text().split()]
    except OSError:
        return []
    return [pid, *(descendant for child in children for descendant in process_tree(child))]


def usage_of(pid: int) -> Usage | None:
    """None for a process that has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        fields = {name: value for name, _, value in (line.partition(":") for line in lines)}
        files = sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
        return Usage(int(fields["RssAnon"].split()[0]) * 1024, files, int(fields["Threads"]))
    except (OSError, KeyError):
        return None


def cpu_seconds_of(pid: int) -> float:
    """User and system time; 0 for a process that has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
