"""Scenarios of the storage: a killed server, a killed process that only writes, and a full disk.

`server_killed` runs servers of its own in one folder, one after the other. Clients note what a server acknowledges; the
next one must have it. Another kind of state needs a `Client` and a line in `CLIENTS` (storage_clients.py).
"""

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from random import Random

import httpx

from dragoman.config.sections import BudgetLimit, KeyLimits
from dragoman.storage.keys import KeyStore
from tools.faults.judge import Scenario, Setup
from tools.faults.storage_clients import CLIENTS, MODELS, OWNERS, SUMS, USAGE, Known, query
from tools.faults.system import fill, small_disk
from tools.faults.trial import ANSWERED, KEY, PROBE, PROBE_TEXT, REQUEST_SECONDS, Trial
from tools.server import Server, run_server

MAX_LIFETIME_SECONDS = 1.0
SECONDS_PER_KILL = 2.0
"""The time limit of `storage_killed`, per kill; a kill usually takes a tenth of it."""
BUDGET_TOKENS = 10**9
DISK_BYTES = 32 * 2**20
"""More than SQLite's log of changes needs, which is about 4 MiB."""
Keys = dict[str, tuple[str, str]]
"""The key of each owner, and its id."""
Send = Callable[[httpx.AsyncClient], Awaitable[httpx.Response]]


async def server_killed(trial: Trial) -> None:
    """SIGKILL to a server that writes. The next one has all that was acknowledged, and settles what was reserved."""
    folder = trial.folder / "killed"
    folder.mkdir()
    limits = KeyLimits(budgets=(BudgetLimit(per="month", tokens=BUDGET_TOKENS),))
    store = KeyStore(folder / "keys.db")
    created = {owner: store.create(owner, limits=limits) for owner in OWNERS}
    keys = {owner: (key, entry.id) for owner, (key, entry) in created.items()}
    known, total = Known(dict), Known(dict)
    for number in range(trial.times + 1):
        async with _server(folder) as server:
            if number:
                await _check(trial, server, folder, keys, known)
            if number < trial.times:
                # What was checked once is not checked after every further kill.
                known = await _load_and_kill(trial, server, keys, is_last=number == trial.times - 1)
                for name, values in known.items():
                    total[name] |= values
            else:
                await _finish(trial, server, folder, keys, total)
    trial.figures["acknowledged"] = ", ".join(f"{len(total[name])} {name}" for name in CLIENTS)


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


async def _load_and_kill(trial: Trial, server: Server, keys: Keys, *, is_last: bool) -> Known:
    """Return what the server acknowledged. On a busy machine that may be nothing, so the last one may live longer."""
    known = Known(dict)

    async def repeat(name: str, random: Random) -> None:
        async with _http(server, keys[CLIENTS[name].owner][0]) as http:
            while True:
                try:
                    await CLIENTS[name].run(http, random, known[name])
                except httpx.TransportError:
                    # The server is dead.
                    return

    async with asyncio.TaskGroup() as group:
        for name, client in CLIENTS.items():
            for _ in range(client.clients):
                group.create_task(repeat(name, Random(trial.random.getrandbits(64))))
        await asyncio.sleep(trial.random.uniform(0, MAX_LIFETIME_SECONDS))
        if is_last:
            await trial.wait(lambda: any(known.values()), "something is acknowledged before the last kill")
        server.process.kill()
        await asyncio.to_thread(server.process.wait)
    return known


async def _check(trial: Trial, server: Server, folder: Path, keys: Keys, known: Known) -> None:
    for name, client in CLIENTS.items():
        async with _http(server, keys[client.owner][0]) as http:
            await client.check(trial, http, folder, known[name])
    trial.expect(await _reserved(server, keys["anna"][1]) == 0, "a reservation is not settled")
    trial.expect(query(folder, "PRAGMA integrity_check") == [[("ok",)]], "the database is damaged")


async def _finish(trial: Trial, server: Server, folder: Path, keys: Keys, total: Known) -> None:
    for name, client in CLIENTS.items():
        async with _http(server, keys[client.owner][0]) as http:
            await client.finish(trial, http, folder, total[name])

    async def is_settled() -> bool:
        return await _reserved(server) == 0

    await trial.wait(is_settled, "all reservations are settled at the end")


async def _reserved(server: Server, key_id: str | None = None) -> int:
    """Tokens that are reserved of the budget of this key, or of all."""
    async with _http(server, KEY) as http:
        budgets = (await http.get("/admin/usage")).json()["budgets"]
    return sum(budget["reserved"] for budget in budgets if key_id in (None, budget["key"]))


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
        await trial.wait(lambda: _is_summed(disk), "the sums are those of the entries")
    trial.expect(query(disk, "PRAGMA integrity_check") == [[("ok",)]], "the database is damaged")
    left = await asyncio.to_thread(lambda: list(disk.glob("dragoman.db-blobs/new/*")))
    trial.expect(not left, "temporary files are left")


def _is_summed(disk: Path) -> bool:
    sums, counted = query(disk, SUMS, USAGE)
    return sums == counted


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
