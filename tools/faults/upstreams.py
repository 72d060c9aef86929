"""Servers behind `engine: upstream` that stall, lie, send garbage, or send without end."""

import asyncio
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, repeat
from pathlib import Path
from random import Random

from tests.support.bad_server import GZIP_HEAD, HEL, ROWS, STREAM_HEAD, ZIPPED_HEAD, BadServer, Step, chunk, head

from tools.client import CHAT
from tools.faults.judge import Scenario, Setup
from tools.faults.trial import ANSWERED, ANSWERED_OR_ERROR, PROBE, PROBE_TEXT, Trial

OPTIONS = {"protocol": "chat", "silence_seconds": 2.0, "health_seconds": 0}
REPLY_SECONDS = 15.0
"""How long a request to a bad server may take."""
MEGABYTE = 1_000_000
GIGABYTE = 1000
"""Of pieces of a megabyte."""


class Endless:
    """A script of a beginning and then one piece again and again, as often as it is played."""

    def __init__(self, *beginning: bytes, piece: bytes, times: int = GIGABYTE) -> None:
        self._beginning = beginning
        self._piece = piece
        self._times = times

    def __iter__(self) -> Iterator[Step]:
        return chain(self._beginning, repeat(self._piece, self._times))


def _gzip_without_end() -> Endless:
    """Spaces, a thousand times larger unpacked than packed. After a full flush a piece may be repeated."""
    packer = zlib.compressobj(wbits=31)
    first = packer.compress(b" ") + packer.flush(zlib.Z_FULL_FLUSH)
    piece = packer.compress(b" " * 10 * MEGABYTE) + packer.flush(zlib.Z_FULL_FLUSH)
    return Endless(ZIPPED_HEAD, chunk(first), piece=chunk(piece))


ENDLESS: Mapping[str, Iterable[Step]] = {
    "gigabyte without a line feed": Endless(STREAM_HEAD, piece=chunk(b"x" * MEGABYTE)),
    "gigabyte of data without a line feed": Endless(STREAM_HEAD, chunk(b"data: "), piece=chunk(b"x" * MEGABYTE)),
    "gigabyte of comments": Endless(STREAM_HEAD, piece=chunk(b": x\n" * (MEGABYTE // 4))),
    "gigabyte of a JSON body": Endless(head(content_type="application/json"), b'{"a":"', piece=b"x" * MEGABYTE),
    "gigabyte of spaces": Endless(head(content_type="application/json"), piece=b" " * MEGABYTE),
    "gigabyte of an error": Endless(head("500 Oops", content_type="text/plain"), piece=b"x" * MEGABYTE),
    "headers without end": Endless(b"HTTP/1.1 200 OK\r\n", piece=b"x-header: " + b"y" * 1000 + b"\r\n", times=10**6),
    "a header without end": Endless(b"HTTP/1.1 200 OK\r\nx-header: ", piece=b"y" * MEGABYTE),
    "gzip without end": _gzip_without_end(),
    "length that is a lie": [head(content_length="1000000000", content_type="text/event-stream") + HEL, "close"],
    "negative length": [head(content_length="-1") + b"{}", "close"],
    "two lengths": [b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\n{}", "close"],
    "stall in gzip": [GZIP_HEAD, "hang"],
}
SCRIPTS: Mapping[str, Sequence[Iterable[Step]]] = {row.name: row.scripts for row in ROWS} | {
    name: [script] for name, script in ENDLESS.items()
}
FAILS = frozenset(ENDLESS) | {row.name for row in ROWS if isinstance(row.made, type) and not row.arrived}
"""Scripts of which no answer can be made."""


@contextmanager
def bad_server(folder: Path) -> Iterator[Setup]:
    """A server with a path for every script, and a model for every path: a model that fails rests for a while."""
    with BadServer() as server:
        models = {}
        for number, scripts in enumerate(SCRIPTS.values()):
            server.also(*scripts, path=f"/{number}{CHAT}")
            models[f"bad-{number}"] = {"engine": "upstream", "url": f"{server.url}/{number}", **OPTIONS}
        yield Setup(models, resource=server)


async def bad_upstreams(trial: Trial) -> None:
    """Servers behind us that stall, lie, send garbage or gigabytes. Each request gets 502, 504 or an error frame."""
    chosen = _chosen(trial)
    async with trial.load(PROBE, 1, ANSWERED, PROBE_TEXT):
        for number in range(trial.times):
            await _ask_bad(trial, *chosen[number % len(chosen)])


async def ask_each_once(trial: Trial) -> None:
    """A model that has been asked keeps its engine and a connection: that is no leak."""
    for number, name in _chosen(trial):
        await _ask_bad(trial, number, name)


def _chosen(trial: Trial) -> list[tuple[int, str]]:
    """All scripts in random order, or as many as there is time for."""
    return Random(trial.times).sample(list(enumerate(SCRIPTS)), min(trial.times, len(SCRIPTS)))


async def _ask_bad(trial: Trial, number: int, name: str) -> None:
    server: BadServer = trial.resource
    begun = time.monotonic()
    for result in await asyncio.gather(*(trial.ask(f"bad-{number}", stream=stream) for stream in (True, False))):
        trial.endings[f"bad: {result.label}"] += 1
        trial.expect(result.ending in ANSWERED_OR_ERROR, f"{name}: {result.label}: {result.text[:200]}")
        trial.expect(name not in FAILS or result.ending != "answered", f"{name}: answered with {result.text[:100]!r}")
    took = time.monotonic() - begun
    bound = REPLY_SECONDS * trial.patience
    trial.expect(took < bound, f"{name}: took {took:.1f} s; {bound:g} s are allowed")
    trial.expect(bool(server.requests[f"/{number}{CHAT}"]), f"{name}: the upstream server was not asked")


SCENARIOS = {"bad_upstreams": Scenario(bad_upstreams, 4 * len(SCRIPTS), 15, setup=bad_server, warm_up=ask_each_once)}
