"""Kills a process that writes through the storage, again and again, and checks what is there afterwards.

    python -m tools.faults.storage_kills FOLDER [--times N] [--seed S]

Each time, a child writes until it gets SIGKILL at a random moment, which may be while it opens or creates the database.
The child reports on a pipe what the storage acknowledges. Then the storage is opened again, as by the next start of a
server. Children are forks of this process, so that they start quickly.

Another kind of state needs a `Writer` and a line in `WRITERS`.
"""

import argparse
import asyncio
import logging
import os
import select
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import msgspec
from sqlalchemy import text

from tools.faults.api_writers import BatchWrites, ConversationWrites, ResponseWrites
from tools.faults.storage_writers import Acknowledge, Files, Found, Requests, Stores, Writer

MAX_LIFETIME_SECONDS = 0.15
"""A child is killed at a random moment up to this age, or up to this time after its first acknowledgement."""
START_SECONDS = 10.0
KILLS_PER_FOLDER = 25
"""Then an empty one is used: the creation of the database must survive kills too."""
WRITERS: dict[str, Writer] = {
    "requests": Requests(),
    "files": Files(),
    "responses": ResponseWrites(),
    "conversations": ConversationWrites(),
    "batches": BatchWrites(),
}


def write_until_killed(folder: Path, random: Random, pipe: int) -> None:
    """The work of a child."""

    async def write() -> None:
        stores = Stores.open(folder)

        def acknowledge(name: str) -> Acknowledge:
            # One short write to a pipe is whole or not at all.
            return lambda values: void(os.write(pipe, msgspec.json.encode([name, *values]) + b"\n"))

        async with asyncio.TaskGroup() as group:
            for name, writer in WRITERS.items():
                for _ in range(writer.tasks):
                    group.create_task(writer.run(stores, Random(random.getrandbits(64)), acknowledge(name)))

    asyncio.run(write())


def void(_: object) -> None:
    return None


def kill_child(folder: Path, random: Random) -> Iterator[list[Any]]:
    """Run a child, kill it at a random age, and yield what it acknowledged."""
    reader, writer = os.pipe()
    child_random, age = Random(random.getrandbits(64)), random.uniform(0, MAX_LIFETIME_SECONDS)
    is_late = random.random() < 0.5
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
    said = b""
    with os.fdopen(reader, "rb", buffering=0) as pipe:
        if is_late:
            select.select([pipe], [], [], START_SECONDS)
        deadline = time.monotonic() + age
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


async def check(folder: Path, found: Found, *, is_last: bool) -> None:
    """Open the storage as the next start of a server does. After the last kill of a folder, check everything again."""
    stores = Stores.open(folder)
    try:
        stores.database.open()
        state = await stores.database.read(lambda c: c.execute(text("PRAGMA integrity_check")).scalar_one())
        found.expect(state == "ok", f"the database is damaged: {state}")
        for name, writer in WRITERS.items():
            known = (found.acknowledged if is_last else found.unchecked).get(name, {})
            await writer.check(stores, known, found)
            if is_last:
                await writer.finish(stores, known, found)
    finally:
        await stores.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--times", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    random, found, count = Random(arguments.seed), Found(), Counter[str]()
    for number in range(arguments.times):
        folder = arguments.folder / str(number // KILLS_PER_FOLDER)
        if number % KILLS_PER_FOLDER == 0:
            folder.mkdir(parents=True)
            found.acknowledged.clear()
        for name, thing, value in kill_child(folder, random):
            for values in (found.acknowledged, found.unchecked):
                values.setdefault(name, {})[thing] = value
            count[name] += 1
        is_last = number % KILLS_PER_FOLDER == KILLS_PER_FOLDER - 1 or number == arguments.times - 1
        asyncio.run(check(folder, found, is_last=is_last))
        found.unchecked.clear()
        if found.problems:
            # Report it once, not after every further kill of this folder.
            found.acknowledged.clear()
        for problem in found.problems:
            print(f"problem after kill {number}, seed {arguments.seed}: {problem}")
        found.problems.clear()
    print(f"kills: {arguments.times}")
    print(f"acknowledged: {count.total()} ({', '.join(f'{count[name]} of {name}' for name in WRITERS)})")
    for name, figure in found.figures.items():
        print(f"{name}: {figure}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
