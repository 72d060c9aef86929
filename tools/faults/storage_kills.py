"""Kills a process that writes through the storage, again and again, and checks what is there afterwards.

    python -m tools.faults.storage_kills FOLDER [--times N] [--seed S]

Each time, a child writes until it gets SIGKILL at a random moment, which may be while it opens or creates the database.
The child reports on a pipe what the storage acknowledges. Then the storage is opened again, as by the next start of a
server. Children are forks of this process, so that they start quickly.

    Writer    one kind of work: `run` does it in the child, `check` looks at what is there

Another kind of state needs a `Writer` and a line in `WRITERS`.
"""

import argparse
import asyncio
import hashlib
import logging
import os
import select
import signal
import sys
import time
import traceback
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import msgspec
from sqlalchemy import select as select_rows
from sqlalchemy import text

from dragoman.config.sections import Budget, Storage
from dragoman.config.settings import Settings
from dragoman.core.errors import QuotaExhausted, StorageUnavailable
from dragoman.protocols.usage import day_of
from dragoman.server.telemetry.metrics import RequestRecord
from dragoman.storage.blobs import NEW, ORPHAN_SECONDS, BlobStore, open_blobs
from dragoman.storage.budgets import Owner, periods_at
from dragoman.storage.database import Database
from dragoman.storage.files import FileStore, NewFile
from dragoman.storage.ledger import Ledger
from dragoman.storage.ledger_entries import LOST, Entry, sum_usage
from dragoman.storage.ledger_sql import read_use
from dragoman.storage.tables import files as files_table
from dragoman.storage.tables import ledger as ledger_table
from dragoman.storage.tables import usage

MAX_LIFETIME_SECONDS = 0.15
"""A child is killed at a random moment up to this age."""
KILLS_PER_FOLDER = 25
"""Then an empty one is used: the creation of the database must survive kills too."""
FAR = 10 * ORPHAN_SECONDS
BUDGET = Budget(per="week", tokens=20_000, principal="user:limited")
LIMITED, FREE = Owner("k1", "user:limited"), Owner("", "anonymous")
RESERVED = 100
Acknowledge = Callable[[list[Any]], None]


@dataclass
class Stores:
    """The storage of one process."""

    folder: Path
    database: Database
    blobs: BlobStore
    files: FileStore
    ledger: Ledger

    @classmethod
    def open(cls, folder: Path) -> "Stores":
        settings = Settings(storage=Storage(str(folder / "dragoman.db")), budgets=(BUDGET,))
        database, blobs = Database(settings.storage.address), open_blobs(settings.storage)
        files = FileStore(database, blobs, settings.storage.keep.files)
        return cls(folder, database, blobs, files, Ledger(database, settings, Counter()))

    async def close(self) -> None:
        await self.ledger.stop()
        self.database.close()


@dataclass
class Found:
    """What a folder has acknowledged so far, by writer, and what is wrong."""

    acknowledged: dict[str, dict[str, Any]] = field(default_factory=dict)
    problems: Counter[str] = field(default_factory=Counter)

    def expect(self, condition: bool, problem: str) -> None:
        if not condition:
            self.problems[problem] += 1


class Writer(ABC):
    @abstractmethod
    async def run(self, stores: Stores, random: Random, acknowledge: Acknowledge) -> None:
        """Write for ever. `acknowledge` gets an id, and what is known of it."""

    @abstractmethod
    async def check(self, stores: Stores, known: dict[str, Any], found: Found) -> None:
        """Compare the storage with what was acknowledged last of each id."""


class Requests(Writer):
    """Requests of an owner with a budget, and of one without."""

    async def run(self, stores: Stores, random: Random, acknowledge: Acknowledge) -> None:
        ledger = stores.ledger
        while True:
            request_id, owner = f"req-{random.getrandbits(64):x}", random.choice((LIMITED, FREE))
            opening = ledger.open(request_id, owner, ["m"], RESERVED // 2, RESERVED // 2)
            if opening is not None:
                try:
                    await opening
                except QuotaExhausted:
                    await asyncio.sleep(0.01)
                    continue
                acknowledge([request_id, None])
            await asyncio.sleep(random.choice((0, 0, 0.002)))
            prompt = random.randrange(RESERVED)
            ledger.close(RequestRecord(request_id, "POST /", model="m", status=200, prompt_tokens=prompt))
            if random.random() < 0.3:
                await ledger.flush()
                acknowledge([request_id, prompt])

    async def check(self, stores: Stores, known: dict[str, Any], found: Found) -> None:
        await stores.ledger.close_lost()
        rows = await stores.database.read(lambda c: c.execute(select_rows(ledger_table)).all())
        entries = {row.id: Entry(*row) for row in rows}
        found.expect(len(entries) == len(rows), "a request has several entries")
        found.expect(all(entry.closed is not None for entry in entries.values()), "an entry is still open")
        for request_id, prompt in known.items():
            entry = entries.get(request_id)
            if entry is None:
                found.problems["an acknowledged entry is missing"] += 1
            elif prompt is not None:
                found.expect((entry.status, entry.prompt) == (200, prompt), "an acknowledged entry has other counts")
            elif entry.status == LOST:
                found.expect(entry.prompt + entry.completion == RESERVED, "a lost entry does not count as reserved")
        sums = {tuple(row[:4]): list(row[4:]) for row in await stores.database.read(_usage_rows)}
        found.expect(sums == sum_usage(entries.values()), "the sums differ from the entries")
        [period] = periods_at(stores.ledger.budgets.budgets_of(LIMITED), day_of(time.time()))
        use = await stores.database.read(lambda c: read_use(c, period))
        found.expect(use.reserved == 0, "a reservation is not settled")
        found.expect(use.spent <= period.budget.limit, "a budget is overspent")


def _usage_rows(connection: Any) -> Any:
    return connection.execute(select_rows(usage)).all()


class Files(Writer):
    async def run(self, stores: Stores, random: Random, acknowledge: Acknowledge) -> None:
        kept: list[str] = []
        while True:
            # Few contents, so that files share them.
            seed = random.randrange(20)
            content = hashlib.sha256(b"%d" % seed).digest() * (1 + seed * 300)
            blob = await asyncio.to_thread(stores.blobs.add, content)
            try:
                file = await stores.files.add(NewFile("user:a", "a.txt", "user_data", blob))
            except StorageUnavailable:
                # The last other file with this content was deleted meanwhile.
                continue
            acknowledge([file.id, file.digest])
            kept.append(file.id)
            if random.random() < 0.4:
                deleted = kept.pop(random.randrange(len(kept)))
                # From now on it may be there or not.
                acknowledge([deleted, None])
                await stores.files.delete("user:a", deleted)
                acknowledge([deleted, False])

    async def check(self, stores: Stores, known: dict[str, Any], found: Found) -> None:
        await stores.files.remove_expired()
        used = await stores.database.read(lambda c: set(c.execute(select_rows(files_table.c.digest)).scalars()))
        await asyncio.to_thread(stores.blobs.sweep, used, time.time() + FAR)
        for file_id, digest in known.items():
            file = await stores.files.find("user:a", file_id)
            if digest is False:
                found.expect(file is None, "a deleted file is there again")
            elif digest is not None:
                found.expect(file is not None and file.digest == digest, "an acknowledged file is missing")
        left = {path.name for path in stores.blobs.directory.glob("*/*") if path.parent.name != NEW}
        found.expect(left == used, "contents without a file, or files without a content")
        for name in left:
            content = stores.blobs.path(name).read_bytes()
            found.expect(hashlib.sha256(content).hexdigest() == name, "a content is damaged")
        found.expect(not list(stores.blobs.directory.glob(f"{NEW}/*")), "temporary files are left")


WRITERS: dict[str, Writer] = {"requests": Requests(), "files": Files()}


def write_until_killed(folder: Path, random: Random, pipe: int) -> None:
    """The work of a child."""

    async def write() -> None:
        stores = Stores.open(folder)

        def acknowledge(name: str) -> Acknowledge:
            # One short write to a pipe is whole or not at all.
            return lambda values: void(os.write(pipe, msgspec.json.encode([name, *values]) + b"\n"))

        async with asyncio.TaskGroup() as group:
            for name, writer in WRITERS.items():
                for _ in range(2):
                    group.create_task(writer.run(stores, Random(random.getrandbits(64)), acknowledge(name)))

    asyncio.run(write())


def void(_: object) -> None:
    return None


def kill_child(folder: Path, random: Random) -> Iterator[list[Any]]:
    """Run a child, kill it at a random age, and yield what it acknowledged."""
    reader, writer = os.pipe()
    child_random, age = Random(random.getrandbits(64)), random.uniform(0, MAX_LIFETIME_SECONDS)
    pid = os.fork()
    if pid == 0:
        try:
            os.close(reader)
            write_until_killed(folder, child_random, writer)
        except BaseException:  # noqa: BLE001 (the parent sees that the child ended)
            traceback.print_exc()
        finally:
            os._exit(1)
    os.close(writer)
    deadline, said = time.monotonic() + age, b""
    with os.fdopen(reader, "rb", buffering=0) as pipe:
        while (left := deadline - time.monotonic()) > 0:
            if select.select([pipe], [], [], left)[0]:
                part = pipe.read(65536)
                if not part:
                    break
                said += part
        os.kill(pid, signal.SIGKILL)
        said += pipe.readall()
    _, status = os.waitpid(pid, 0)
    if os.waitstatus_to_exitcode(status) != -signal.SIGKILL:
        raise RuntimeError("the child ended by itself")
    yield from (msgspec.json.decode(line) for line in said.splitlines())


async def check(folder: Path, found: Found) -> None:
    """Open the storage as the next start of a server does."""
    stores = Stores.open(folder)
    try:
        stores.database.open()
        state = await stores.database.read(lambda c: c.execute(text("PRAGMA integrity_check")).scalar_one())
        found.expect(state == "ok", f"the database is damaged: {state}")
        for name, writer in WRITERS.items():
            await writer.check(stores, found.acknowledged.get(name, {}), found)
    finally:
        await stores.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--times", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    random, found, count = Random(arguments.seed), Found(), 0
    for number in range(arguments.times):
        folder = arguments.folder / str(number // KILLS_PER_FOLDER)
        if number % KILLS_PER_FOLDER == 0:
            folder.mkdir(parents=True)
            found.acknowledged.clear()
        for name, thing, value in kill_child(folder, random):
            found.acknowledged.setdefault(name, {})[thing] = value
            count += 1
        asyncio.run(check(folder, found))
        if found.problems:
            # Report it once, not after every further kill of this folder.
            found.acknowledged.clear()
        for problem in found.problems:
            print(f"problem after kill {number}, seed {arguments.seed}: {problem}")
        found.problems.clear()
    print(f"kills: {arguments.times}")
    print(f"acknowledged: {count}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
