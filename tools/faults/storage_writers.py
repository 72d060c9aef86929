"""Work that `storage_kills` does in a process that it kills, and how it checks what is there afterwards.

Stores    the storage of one process
Writer    one kind of work: `run` does it in the child, `check` looks at what is there after a kill
"""

import asyncio
import hashlib
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from sqlalchemy import select as select_rows

from dragoman.config.sections import Budget, Storage
from dragoman.config.settings import Settings
from dragoman.core.errors import QuotaExhausted, StorageUnavailable
from dragoman.protocols.usage import day_of
from dragoman.server.telemetry.metrics import RequestRecord
from dragoman.storage.batches import BatchStore
from dragoman.storage.blobs import NEW, ORPHAN_SECONDS, BlobStore, open_blobs
from dragoman.storage.budgets import Owner, periods_at
from dragoman.storage.conversations import ConversationStore
from dragoman.storage.database import Database
from dragoman.storage.files import FileStore, NewFile
from dragoman.storage.ledger import Ledger
from dragoman.storage.ledger_entries import LOST, Entry, sum_usage
from dragoman.storage.ledger_sql import read_use
from dragoman.storage.responses import ResponseStore
from dragoman.storage.tables import files as files_table
from dragoman.storage.tables import ledger as ledger_table
from dragoman.storage.tables import usage

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
    responses: ResponseStore
    conversations: ConversationStore
    batches: BatchStore

    @classmethod
    def open(cls, folder: Path) -> "Stores":
        settings = Settings(storage=Storage(str(folder / "dragoman.db")), budgets=(BUDGET,))
        database, blobs = Database(settings.storage.address), open_blobs(settings.storage)
        keep = settings.storage.keep
        files, responses = FileStore(database, blobs, keep.files), ResponseStore(database, settings)
        conversations = ConversationStore(database, keep.responses, None, settings.limits.body_bytes)
        batches = BatchStore(database, files, keep.batches)
        ledger = Ledger(database, settings, Counter())
        return cls(folder, database, blobs, files, ledger, responses, conversations, batches)

    async def close(self) -> None:
        await self.ledger.stop()
        self.database.close()


@dataclass
class Found:
    """What a folder has acknowledged so far, by writer, and what is wrong."""

    acknowledged: dict[str, dict[str, Any]] = field(default_factory=dict)
    unchecked: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The part of it that the last child acknowledged."""
    problems: Counter[str] = field(default_factory=Counter)
    figures: Counter[str] = field(default_factory=Counter)

    def expect(self, condition: bool, problem: str) -> None:
        if not condition:
            self.problems[problem] += 1


class Writer(ABC):
    tasks = 2
    """How many of them run in a child at the same time."""

    @abstractmethod
    async def run(self, stores: Stores, random: Random, acknowledge: Acknowledge) -> None:
        """Write for ever. `acknowledge` gets an id, and what is known of it."""

    @abstractmethod
    async def check(self, stores: Stores, known: dict[str, Any], found: Found) -> None:
        """Compare the storage with what was acknowledged last of each id."""

    async def finish(self, stores: Stores, known: dict[str, Any], found: Found) -> None:
        """Bring what was begun to its end, after the last kill, and check it."""
        return


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
