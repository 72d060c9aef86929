"""What is checked between batches: the server's processes, memory, log and slots."""

import json
import statistics
import time
from collections.abc import Sequence
from http.client import HTTPConnection, HTTPException

from tools.fuzz.oracle import Judgement
from tools.fuzz.servers import KEYS
from tools.server import Server

MIB = 2**20
SPARE_MEMORY = 48 * MIB
SPARE_SHARE = 0.2
"""How much the memory may grow: the last quarter of the samples compared with the second."""
MOST_MEMORY = 600 * MIB
"""How much it may grow at any moment."""
FREE_SECONDS = 60.0
GET_SECONDS = 30.0
LOG_LINES = 40


def memory_growth(samples: Sequence[int]) -> str | None:
    """What is wrong with these samples of memory, in bytes."""
    quarter = len(samples) // 4
    if not quarter:
        return None
    before = statistics.median(samples[quarter : 2 * quarter])
    after = statistics.median(samples[-quarter:])
    if after <= before * (1 + SPARE_SHARE) + SPARE_MEMORY:
        return None
    return f"memory grew from {before / MIB:.0f} to {after / MIB:.0f} MiB"


def log_problem(line: str) -> tuple[Judgement, str | None] | None:
    """What is wrong with a line of the log, and the id of its request where it has one."""
    try:
        entry = json.loads(line)
    except ValueError:
        entry = None
    if not isinstance(entry, dict):
        is_wrong = "Traceback" in line or line.startswith(("ERROR", "CRITICAL", "thread '", "fatal", "GGML_ASSERT"))
        return (Judgement("log", line[:500]), None) if is_wrong else None
    if entry.get("level") in ("error", "critical") or "exception" in entry:
        *places, last = str(entry.get("exception", "")).strip().splitlines() or [""]
        place = next((line.strip() for line in reversed(places) if line.lstrip().startswith("File ")), "")
        text = f"{last} {place} {entry.get('message', '')}".strip()
        return Judgement("traceback" if last else "log", text), entry.get("request_id")
    return None


class Monitor:
    def __init__(self, server: Server) -> None:
        self._server = server
        self._offset = 0
        self._partial = b""
        self._pids = self._engine_pids()
        self.memory: list[int] = []

    def _engine_pids(self) -> list[int]:
        return sorted([*self._server.front_ends(), *self._server.workers()])

    def check(self) -> list[tuple[Judgement, str | None]]:
        """Problems, each with the id of the request that it belongs to, where that is known."""
        found = self._log_problems()
        if not self._server.is_alive:
            return [*found, (Judgement("died", f"the server exited with {self._server.process.returncode}"), None)]
        pids = self._engine_pids()
        if pids != self._pids:
            found.append((Judgement("restarted", "a worker or a front end is another process than before"), None))
            self._pids = pids
        self.memory.append(self._server.usage().memory)
        if self.memory[-1] > self.memory[0] + MOST_MEMORY:
            found.append((Judgement("memory", f"{self.memory[-1] // MIB} MiB after {self.memory[0] // MIB}"), None))
            self.memory.clear()
        return found

    def _log_problems(self) -> list[tuple[Judgement, str | None]]:
        with self._server.log.open("rb") as file:
            file.seek(self._offset)
            data = self._partial + file.read()
            self._offset = file.tell()
        *lines, self._partial = data.split(b"\n")
        found = [log_problem(line.decode("utf-8", "replace")) for line in lines]
        return [problem for problem in found if problem is not None]

    def log_tail(self) -> str:
        lines = self._server.log.read_bytes()[-20_000:].decode("utf-8", "replace").splitlines()
        return "\n".join(lines[-LOG_LINES:])

    def check_ready(self) -> list[Judgement]:
        try:
            status, body = self._get("/ready")
        except (OSError, HTTPException) as error:
            return [Judgement("not ready", repr(error))]
        return [] if status == 200 else [Judgement("not ready", f"{status} {body[:200]!r}")]

    def _get(self, path: str) -> tuple[int, bytes]:
        connection = HTTPConnection("127.0.0.1", self._server.port, timeout=GET_SECONDS)
        try:
            connection.request("GET", path, headers={"authorization": f"Bearer {KEYS[0]}"})
            reply = connection.getresponse()
            return reply.status, reply.read()
        finally:
            connection.close()

    def check_end(self) -> list[Judgement]:
        """All slots are free again, and the memory is flat."""
        found = []
        if growth := memory_growth(self.memory):
            found.append(Judgement("memory", growth))
        deadline = time.monotonic() + FREE_SECONDS
        while busy := self._busy():
            if time.monotonic() > deadline:
                found.append(Judgement("slots", f"still taken: {busy}"))
                break
            time.sleep(0.1)
        return found

    def _busy(self) -> dict[str, str]:
        _, body = self._get("/stats")
        models = json.loads(body)["models"].items()
        return {
            name: f"{model['running']} running, {model['waiting']} waiting"
            for name, model in models
            if model["running"] or model["waiting"]
        }
