"""A machine that misbehaves: a full disk, no more file descriptors, a clock that jumps."""

import asyncio
import errno
import json
import os
import resource
import signal
import struct
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.bad_server import BadServer, head

from dragoman.config.sections import KeyLimits
from dragoman.core.errors import ConfigError
from dragoman.storage.keys import KeyStore
from tools.client import Ending
from tools.faults.clients import Connection
from tools.faults.judge import Scenario, Setup
from tools.faults.processes import PACED, TEXT
from tools.faults.trial import ANSWERED, ANSWERED_OR_ERROR, PROBE, PROBE_TEXT, Skipped, Trial
from tools.server import kill, usage_of

DISK_BYTES = 4 * 2**20
GGUF_PATH = "/model.gguf"
DAY = 86400.0
SPARE_FILES = 30
CLOCK = '''"""Adds what the first 8 bytes of a file say to the time of day."""

import mmap
import os
import struct
import time

_file = open(os.environ["FAULTS_CLOCK"], "rb")
_map = mmap.mmap(_file.fileno(), 8, access=mmap.ACCESS_READ)
_time, _time_ns = time.time, time.time_ns


def _jump():
    return struct.unpack_from("d", _map)[0]


time.time = lambda: _time() + _jump()
time.time_ns = lambda: _time_ns() + int(_jump() * 1e9)
'''


@contextmanager
def small_disk(folder: Path, size: int = DISK_BYTES) -> Iterator[Setup]:
    """A file system of a few megabytes, and a model to download that is larger than that."""
    disk = folder / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(disk)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Skipped(f"a small file system cannot be mounted: {done.stderr.strip()}")
    try:
        with BadServer() as server:
            body = b"GGUF" + b"\0" * (2 * DISK_BYTES)
            server.play([head(content_length=str(len(body))) + body], path=GGUF_PATH)
            yield Setup(
                {"download": {"source": f"{server.url}{GGUF_PATH}"}},
                {"event_log": str(disk / "events.jsonl")},
                {"DRAGOMAN_HOME": str(disk / "home")},
                disk,
            )
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=False)


def fill(disk: Path) -> Path:
    """A file that takes all the space that is left."""
    file = disk / "fill"
    with file.open("wb", buffering=0) as output:
        for size in (65536, 1):
            try:
                while output.write(b"x" * size):
                    pass
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
    return file


async def disk_full(trial: Trial) -> None:
    """No space for the event log, the key store and a download. Requests go on; nothing that is there is damaged."""
    disk: Path = trial.resource
    store, events = KeyStore(disk / "home" / "keys.db"), disk / "events.jsonl"
    first, _ = store.create("first")
    for _ in range(trial.times):
        filling = fill(disk)
        async with trial.load(PROBE, 2, ANSWERED, PROBE_TEXT):
            await _with_full_disk(trial, store, first)
        filling.unlink()
        await _with_room_again(trial, store, events, first)
    for number, line in enumerate(events.read_bytes().splitlines(), 1):
        trial.expect(_is_json(line), f"line {number} of the event log is not JSON: {line[:100]!r}")


async def _with_full_disk(trial: Trial, store: KeyStore, first: str) -> None:
    try:
        store.create("second")
        trial.problems["a key was created on a full disk"] += 1
    except ConfigError as error:
        trial.figures["a key on a full disk"] = str(error).rpartition(": ")[2]
    trial.note("known key", await trial.ask(PROBE, first), ANSWERED, PROBE_TEXT)
    result = await trial.ask("download")
    trial.note("download", result, frozenset({"error"}))
    trial.expect(result.status == 503, f"a download to a full disk is a {result.status}: {result.text}")


async def _with_room_again(trial: Trial, store: KeyStore, events: Path, first: str) -> None:
    second, _ = store.create("second")
    for name, key in (("first key", first), ("new key", second)):
        trial.note(name, await trial.ask(PROBE, key), ANSWERED, PROBE_TEXT)
    trial.expect(await trial.post("/admin/reload") == 200, "the configuration could not be reloaded")
    size = _size(events)
    trial.note(PROBE, await trial.ask(PROBE), ANSWERED, PROBE_TEXT)
    await trial.wait(lambda: _size(events) > size, "the event log goes on after a reload")


def _size(file: Path) -> int:
    return file.stat().st_size


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


CROWDED: frozenset[Ending] = ANSWERED_OR_ERROR | {"cut"}
"""The system accepts a connection for which the server has no file descriptor: it can only be closed."""


async def files_exhausted(trial: Trial) -> None:
    """Many connections and no file descriptors for them. It does not spin, and accepts again afterwards."""
    server = trial.server
    own = usage_of(server.process.pid)
    assert own is not None
    before = resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (own.files + SPARE_FILES, before[1]))
    trial.may_drop = True
    try:
        for _ in range(trial.times):
            await _crowd(trial)
            kill(trial.random.choice(server.workers()), signal.SIGKILL)
            trial.note("paced", await trial.ask("paced"), ANSWERED_OR_ERROR, TEXT)
            trial.note(PROBE, await trial.ask(PROBE), ANSWERED, PROBE_TEXT)
            await trial.wait(lambda: bool(server.workers()), "the worker is started again")
    finally:
        trial.may_drop = False
        resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, before)


async def _crowd(trial: Trial) -> None:
    """Three times as many connections as there are descriptors; most of them are silent, some ask."""
    idle = [Connection(trial.server.port) for _ in range(3 * SPARE_FILES)]
    await asyncio.gather(*(connection.connect() for connection in idle))
    asking = [asyncio.create_task(trial.ask(PROBE)) for _ in range(SPARE_FILES)]
    cpu, begun = trial.server.cpu_seconds(), time.monotonic()
    await asyncio.sleep(2)
    share = (trial.server.cpu_seconds() - cpu) / (time.monotonic() - begun)
    trial.figures["CPU with no file descriptors"] = f"{share:.0%} of a core"
    trial.expect(share < 0.5, f"a server without file descriptors uses {share:.0%} of a core")
    for connection in idle:
        connection.close()
    for result in await asyncio.gather(*asking):
        trial.note("in the crowd", result, CROWDED, PROBE_TEXT)


@contextmanager
def adjustable_clock(folder: Path) -> Iterator[Setup]:
    """A `sitecustomize` that shifts `time.time()` in all processes of the server at once."""
    modules, offset = folder / "clock", folder / "offset"
    modules.mkdir()
    (modules / "sitecustomize.py").write_text(CLOCK)
    set_clock(offset, 0)
    path = os.pathsep.join(filter(None, [str(modules), os.environ.get("PYTHONPATH")]))
    yield Setup(environment={"PYTHONPATH": path, "FAULTS_CLOCK": str(offset)}, resource=offset)


def set_clock(offset: Path, seconds: float) -> None:
    """In place: the processes have the file in memory."""
    with offset.open("r+b" if offset.exists() else "wb") as file:
        file.write(struct.pack("d", seconds))


async def clock_jumps(trial: Trial) -> None:
    """The time of day jumps by a day, back and forth. No timer and no limit of a key may notice."""
    offset: Path = trial.resource
    uptime = (await trial.get("/stats"))["uptime_seconds"]
    begun = time.monotonic()
    async with trial.load("paced", 4, ANSWERED, TEXT), trial.load("single", 4, ANSWERED, TEXT):
        for number in range(trial.times):
            if number % 20 == 0:
                await _check_limits(trial, offset)
            set_clock(offset, trial.random.choice((-DAY, 0.0, DAY)))
            await asyncio.sleep(trial.random.uniform(0.0, 0.2))
            seen = (await trial.get("/stats"))["uptime_seconds"] - uptime
            drift = abs(seen - (time.monotonic() - begun))
            trial.expect(drift < 30, f"uptime_seconds jumps by {drift:.0f} s")
    set_clock(offset, 0)


async def _check_limits(trial: Trial, offset: Path) -> None:
    """A key that has used up its requests of this minute has none in the minute after a jump either."""
    set_clock(offset, 0)
    key, _ = KeyStore(trial.folder / "home" / "keys.db").create("limited", limits=KeyLimits(requests_per_minute=3))
    begun = time.monotonic()
    for _ in range(3):
        trial.note("limited key", await trial.ask(PROBE, key), ANSWERED, PROBE_TEXT)
    for jump in (DAY, -DAY):
        set_clock(offset, jump)
        result = await trial.ask(PROBE, key)
        if time.monotonic() - begun < 50:
            trial.note("limited key, after a jump", result, frozenset({"error"}))
            trial.expect(result.status == 429, f"a limit of a minute after a jump: {result.label}")


SINGLE = {"engine": "scripted", "slots": 1, "tokens_per_second": 200, "replies": [{"output": TEXT}]}
SCENARIOS = {
    "disk_full": Scenario(disk_full, 20, 1, setup=small_disk),
    "files_exhausted": Scenario(files_exhausted, 50, 1, {"paced": PACED}),
    "clock_jumps": Scenario(clock_jumps, 200, 6, {"paced": PACED, "single": SINGLE}, setup=adjustable_clock),
}
