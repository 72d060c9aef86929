"""Scenarios of the storage: a killed server, a killed process that only writes, and a full disk.

`server_killed` runs servers of its own in one folder, one after the other. Clients note what a server acknowledges; the
next one must have it. Another kind of state needs a `Client` and a line in `CLIENTS`.
"""

import asyncio
import hashlib
import sqlite3
import sys
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, closing, contextmanager
from pathlib import Path
from random import Random
from typing import Any

import httpx

from dragoman.config.sections import BudgetLimit, KeyLimits
from dragoman.storage.keys import KeyStore
from tools.faults.judge import Scenario, Setup
from tools.faults.system import fill, small_disk
from tools.faults.trial import ANSWERED, KEY, PROBE, PROBE_TEXT, REQUEST_SECONDS, Trial
from tools.server import Server, run_server

MAX_LIFETIME_SECONDS = 1.0
CLIENTS_PER_KIND = 3
SECONDS_PER_KILL = 2.0
"""The time limit of `storage_killed`, per kill; a kill usually takes a tenth of it."""
BUDGET_TOKENS = 10**9
DISK_BYTES = 32 * 2**20
"""More than SQLite's log of changes needs, which is about 4 MiB."""
MODELS = {
    "fast": {"engine": "scripted", "replies": [{"output": "one two three"}]},
    "paced": {"engine": "scripted", "slots": 8, "tokens_per_second": 20, "replies": [{"output": "word " * 8}]},
}
OPEN = "SELECT count(*) FROM ledger WHERE closed IS NULL AND server NOT IN (SELECT id FROM servers)"
SUMS = """
SELECT CAST(opened / 86400 AS INTEGER), key, principal, model, count(*), sum(prompt), sum(cached), sum(completion),
    sum(reasoning), sum(cost)
FROM ledger WHERE closed IS NOT NULL GROUP BY 1, 2, 3, 4 ORDER BY 1, 2, 3, 4
"""
USAGE = "SELECT * FROM usage ORDER BY 1, 2, 3, 4"
Send = Callable[[httpx.AsyncClient], Awaitable[httpx.Response]]


class Client(ABC):
    """One kind of request."""

    @abstractmethod
    async def run(self, http: httpx.AsyncClient, key: str, random: Random, known: dict[str, Any]) -> None:
        """Send one request, and note in `known` what the server acknowledges."""

    @abstractmethod
    async def check(self, trial: Trial, http: httpx.AsyncClient, folder: Path, known: dict[str, Any]) -> None:
        """Check on the next server that all of `known` is there."""


class Chats(Client):
    async def run(self, http: httpx.AsyncClient, key: str, random: Random, known: dict[str, Any]) -> None:
        body = {"model": random.choice(list(MODELS)), "messages": [{"role": "user", "content": "hi"}], "max_tokens": 50}
        reply = await http.post("/v1/chat/completions", json=body, headers={"authorization": f"Bearer {key}"})
        if reply.status_code == 200:
            known[reply.headers["x-request-id"]] = reply.json()["usage"]["completion_tokens"]

    async def check(self, trial: Trial, http: httpx.AsyncClient, folder: Path, known: dict[str, Any]) -> None:
        await trial.wait(lambda: query(folder, OPEN) == [(0,)], "the next server closes the entries of the killed one")
        found = {row[0]: row[1:] for row in query(folder, "SELECT id, status, completion, prompt FROM ledger")}
        for request_id, tokens in known.items():
            status, completion, _ = found.get(request_id, (None, None, None))
            # Its end may not have been written: then it counts as much as it reserved.
            is_there = (status, completion) in ((200, tokens), (0, 50))
            trial.expect(is_there, "a request that was answered is missing in the ledger")
        trial.expect(query(folder, SUMS) == query(folder, USAGE), "the sums differ from the entries")


class Uploads(Client):
    async def run(self, http: httpx.AsyncClient, key: str, random: Random, known: dict[str, Any]) -> None:
        content = random.randbytes(random.choice((10, 5000, 300_000)))
        files, data = {"file": ("a.bin", content)}, {"purpose": "user_data"}
        reply = await http.post("/v1/files", files=files, data=data, headers={"authorization": f"Bearer {key}"})
        if reply.status_code == 200:
            known[reply.json()["id"]] = hashlib.sha256(content).hexdigest()

    async def check(self, trial: Trial, http: httpx.AsyncClient, folder: Path, known: dict[str, Any]) -> None:
        for file_id, digest in known.items():
            reply = await http.get(f"/v1/files/{file_id}/content")
            is_same = reply.status_code == 200 and hashlib.sha256(reply.content).hexdigest() == digest
            trial.expect(is_same, f"an acknowledged file is a {reply.status_code} after the restart")
        for path in (folder / "dragoman.db-blobs").glob("??/*"):
            is_whole = hashlib.sha256(path.read_bytes()).hexdigest() == path.name
            trial.expect(is_whole, "a file is half written")


Known = defaultdict[str, dict[str, Any]]
"""What was acknowledged, by the name of the client."""
CLIENTS: dict[str, Client] = {"chats": Chats(), "uploads": Uploads()}


def query(folder: Path, statement: str) -> list[Any]:
    with closing(sqlite3.connect(f"file:{folder / 'dragoman.db'}?mode=ro", uri=True)) as connection:
        return connection.execute(statement).fetchall()


async def server_killed(trial: Trial) -> None:
    """SIGKILL to a server that writes. The next one has all that was acknowledged, and settles what was reserved."""
    folder = trial.folder / "killed"
    folder.mkdir()
    limits = KeyLimits(budgets=(BudgetLimit(per="month", tokens=BUDGET_TOKENS),))
    key, _ = KeyStore(folder / "keys.db").create("anna", limits=limits)
    count, known = 0, Known(dict)
    for number in range(trial.times + 1):
        async with _server(folder) as server:
            if number:
                await _check(trial, server, folder, key, known)
            if number < trial.times:
                # What was checked once is not checked after every further kill.
                known = await _load_and_kill(trial, server, key)
                count += sum(map(len, known.values()))
    trial.figures["acknowledged"] = str(count)
    trial.expect(count > 0, "nothing was acknowledged before any kill")


@asynccontextmanager
async def _server(folder: Path) -> AsyncIterator[Server]:
    config = {"models": MODELS, "default": "fast", "api_keys": [KEY], "keys": {"store": "keys.db"}}
    environment = {"DRAGOMAN_HOME": str(folder / "home")}
    with ExitStack() as stack:
        started = run_server(folder, config, "--workers", "1", env=environment)
        server = await asyncio.to_thread(stack.enter_context, started)
        yield server


def _http(server: Server, key: str) -> httpx.AsyncClient:
    headers = {"authorization": f"Bearer {key}"}
    return httpx.AsyncClient(base_url=server.url, trust_env=False, timeout=REQUEST_SECONDS, headers=headers)


async def _load_and_kill(trial: Trial, server: Server, key: str) -> Known:
    known = Known(dict)

    async def repeat(name: str, random: Random) -> None:
        while True:
            try:
                await CLIENTS[name].run(http, key, random, known[name])
            except httpx.TransportError:
                # The server is dead.
                return

    seeds = [trial.random.getrandbits(64) for _ in range(CLIENTS_PER_KIND)]
    async with _http(server, key) as http, asyncio.TaskGroup() as group:
        for name in CLIENTS:
            for seed in seeds:
                group.create_task(repeat(name, Random(seed)))
        await asyncio.sleep(trial.random.uniform(0, MAX_LIFETIME_SECONDS))
        server.process.kill()
        await asyncio.to_thread(server.process.wait)
    return known


async def _check(trial: Trial, server: Server, folder: Path, key: str, known: Known) -> None:
    async with _http(server, key) as http:
        for name, client in CLIENTS.items():
            await client.check(trial, http, folder, known[name])
        report = (await http.get("/admin/usage", headers={"authorization": f"Bearer {KEY}"})).json()
        trial.expect(report["budgets"][0]["reserved"] == 0, "a reservation is not settled")
    trial.expect(query(folder, "PRAGMA integrity_check") == [("ok",)], "the database is damaged")


async def storage_killed(trial: Trial) -> None:
    """SIGKILL to a process that only writes through the storage: many more kills in the same time."""
    folder = trial.folder / "writes"
    arguments = [str(folder), "--times", str(trial.times), "--seed", str(trial.random.getrandbits(32))]
    command = [sys.executable, "-m", "tools.faults.storage_kills", *arguments]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        output, _ = await asyncio.wait_for(
            process.communicate(), (60 + SECONDS_PER_KILL * trial.times) * trial.patience
        )
    finally:
        if process.returncode is None:
            process.kill()
    lines = output.decode().splitlines()
    trial.problems.update(line for line in lines if line.startswith("problem"))
    trial.expect(process.returncode == 0, f"the process that kills ended with {process.returncode}")
    for line in lines:
        name, _, figure = line.partition(": ")
        if not line.startswith("problem"):
            trial.figures[name] = figure


@contextmanager
def small_storage(folder: Path) -> Iterator[Setup]:
    with small_disk(folder, DISK_BYTES) as setup:
        disk: Path = setup.resource
        yield Setup({}, {"storage": str(disk / "dragoman.db"), "keys": {"store": "keys.db"}}, resource=disk)


async def storage_full(trial: Trial) -> None:
    """No space for the database and for files. Owners with a budget and uploads get 503; other requests are served."""
    disk: Path = trial.resource
    limits = KeyLimits(budgets=(BudgetLimit(per="month", tokens=BUDGET_TOKENS),))
    key, _ = KeyStore(trial.folder / "keys.db").create("anna", limits=limits)
    async with _http(trial.server, key) as http:
        for number in range(trial.times):
            filling = fill(disk)
            async with trial.load(PROBE, 2, ANSWERED, PROBE_TEXT):
                for send in (_ask, _upload):
                    await trial.wait(lambda: _is_refused(http, send), "503 storage_unavailable on a full disk")  # noqa: B023
            filling.unlink()
            for send in (_ask, _upload):
                await trial.wait(lambda: _is_answered(http, send), "answered when there is room again")  # noqa: B023
            trial.figures["refused"] = f"{number + 1} times"
        await trial.wait(lambda: query(disk, SUMS) == query(disk, USAGE), "the sums are those of the entries")
    trial.expect(query(disk, "PRAGMA integrity_check") == [("ok",)], "the database is damaged")
    left = await asyncio.to_thread(lambda: list(disk.glob("dragoman.db-blobs/new/*")))
    trial.expect(not left, "temporary files are left")


async def _ask(http: httpx.AsyncClient) -> httpx.Response:
    body = {"model": PROBE, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 100}
    return await http.post("/v1/chat/completions", json=body)


async def _upload(http: httpx.AsyncClient) -> httpx.Response:
    files = {"file": ("a.txt", Random().randbytes(20_000))}
    return await http.post("/v1/files", files=files, data={"purpose": "user_data"})


async def _is_refused(http: httpx.AsyncClient, send: Send) -> bool:
    reply = await send(http)
    return reply.status_code == 503 and reply.json()["error"]["code"] == "storage_unavailable"


async def _is_answered(http: httpx.AsyncClient, send: Send) -> bool:
    return (await send(http)).status_code == 200


SCENARIOS = {
    "server_killed": Scenario(server_killed, 250, 3),
    "storage_killed": Scenario(storage_killed, 1000, 200),
    "storage_full": Scenario(storage_full, 20, 1, setup=small_storage),
}
