"""One scenario on one server: what was asked, how it ended, and what is found wrong.

A scenario injects its faults through a `Trial`, and every request goes through `Trial.note`.
"""

import asyncio
import statistics
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import httpx

from tools.client import Ending, Result, ask, chat_body
from tools.server import Server, Usage

KEY = "operator"
"""The key of all requests. It may do everything."""
PROBE = "probe"
PROBE_TEXT = "The quick brown fox jumps over the lazy dog. " * 4
PROBE_MODEL: Mapping[str, Any] = {"engine": "scripted", "replies": [{"output": PROBE_TEXT}]}
"""The default model of every scenario. It runs in the server's own process: no fault of a worker concerns it."""
IN_WORKER: Mapping[str, Any] = {"engine": "scripted", "crash_after": 1_000_000}
"""The scripted engine in a worker process: a reply never gets as far as the crash."""
REQUEST_SECONDS = 90.0
"""Every request has ended by then."""
STORAGE_READS = 32
"""Requests at the same time that need the storage: many more than it has connections."""
ROUND = 100
"""Requests of one measurement of speed."""
SAMPLE_SECONDS = 0.2
ANSWERED: frozenset[Ending] = frozenset({"answered"})
ANSWERED_OR_ERROR: frozenset[Ending] = frozenset({"answered", "error", "error frame"})
"""The caller has an answer, or knows why there is none."""


class Skipped(Exception):
    """The scenario cannot run on this machine; the message says why."""


class Speed(NamedTuple):
    first_token: float
    """Seconds, the median."""
    cpu: float
    """Seconds of CPU time that the server used for a request."""


class Baseline(NamedTuple):
    """What a server uses while it has nothing to do."""

    usage: Usage
    processes: int
    speed: Speed


@dataclass
class Trial:
    server: Server
    folder: Path
    times: int
    random: Random
    patience: float = 1.0
    """Factor of the time bounds."""
    resource: Any = None
    """What the setup of the scenario made for it."""
    endings: Counter[str] = field(default_factory=Counter)
    problems: Counter[str] = field(default_factory=Counter)
    figures: dict[str, str] = field(default_factory=dict)
    may_drop: bool = False
    """Whether connections of requests that did nothing wrong may break."""
    peak: int = 0
    """The most memory that was seen, in bytes."""

    def note(
        self, name: str, result: Result, allowed: frozenset[Ending] = ANSWERED_OR_ERROR, text: str | None = None
    ) -> None:
        """Count how a request ended. `text` is what an answer must be, where it is known."""
        self.endings[f"{name}: {result.label}"] += 1
        if result.ending not in allowed:
            self.problems[f"{name}: {result.label}: {result.text[:200]}"] += 1
        elif result.ending == "answered" and text is not None and result.text != text:
            self.problems[f"{name}: answered with another text: {result.text[:200]!r}"] += 1

    async def ask(self, model: str, key: str = KEY, **fields: Any) -> Result:
        return await ask(self.server.port, chat_body(model, **fields), key=key, timeout=REQUEST_SECONDS)

    def expect(self, condition: bool, problem: str) -> None:
        if not condition:
            self.problems[problem] += 1

    async def get(self, path: str) -> Any:
        return (await self._operate("GET", path)).json()

    async def post(self, path: str) -> int:
        return (await self._operate("POST", path, json={})).status_code

    async def open_storage(self) -> None:
        """Make the storage open all its connections, which stay open, each with a thread."""
        await asyncio.gather(*[self.get("/v1/files") for _ in range(STORAGE_READS)])

    async def _operate(self, method: str, path: str, **content: Any) -> httpx.Response:
        """A request of the operator. Where the server drops it, that is a problem, and it is sent again."""
        deadline = time.monotonic() + REQUEST_SECONDS
        while True:
            try:
                async with self._client() as client:
                    return await client.request(method, path, **content)
            except httpx.TransportError as error:
                self.endings[f"operator: {type(error).__name__}"] += 1
                if not self.may_drop:
                    self.problems[f"{method} {path}: {error!r}"] += 1
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(0.1)

    def _client(self) -> httpx.AsyncClient:
        headers = {"connection": "close", "authorization": f"Bearer {KEY}"}
        return httpx.AsyncClient(base_url=self.server.url, trust_env=False, timeout=REQUEST_SECONDS, headers=headers)

    async def wait(self, condition: Callable[[], bool | Awaitable[bool]], what: str, seconds: float = 60) -> None:
        """Wait until the condition holds. Where it never does, that is a problem."""
        deadline = time.monotonic() + seconds * self.patience
        while True:
            found = condition()
            if found if isinstance(found, bool) else await found:
                return
            if time.monotonic() > deadline:
                self.problems[f"not within {seconds * self.patience:g} s: {what}"] += 1
                return
            await asyncio.sleep(0.05)

    @asynccontextmanager
    async def load(
        self,
        model: str,
        clients: int,
        allowed: frozenset[Ending] = ANSWERED_OR_ERROR,
        text: str | None = None,
        **fields: Any,
    ) -> AsyncIterator[None]:
        """Clients that ask one request after the other during the block. Those that have begun are read to the end."""
        is_over = asyncio.Event()

        async def client() -> None:
            while not is_over.is_set():
                result = await self.ask(model, **fields)
                self.note(model, result, allowed, text)
                if result.ending != "answered":
                    await asyncio.sleep(0.05)

        async with asyncio.TaskGroup() as group:
            for _ in range(clients):
                group.create_task(client())
            try:
                yield
            finally:
                is_over.set()

    @asynccontextmanager
    async def sampling(self) -> AsyncIterator[None]:
        """Record the peak of memory during the block."""

        async def sample() -> None:
            while True:
                self.peak = max(self.peak, self.server.usage().memory)
                await asyncio.sleep(SAMPLE_SECONDS)

        async with in_background(sample()):
            yield

    async def measure_speed(self) -> Speed:
        cpu, first = self.server.cpu_seconds(), []
        for _ in range(ROUND):
            result = await self.ask(PROBE)
            self.note(PROBE, result, ANSWERED, PROBE_TEXT)
            first.append(result.first_token or REQUEST_SECONDS)
        return Speed(statistics.median(first), (self.server.cpu_seconds() - cpu) / ROUND)

    async def measure(self) -> Baseline:
        speed = await self.measure_speed()
        return Baseline(self.server.usage(), len(self.server.processes()), speed)


@asynccontextmanager
async def in_background(work: Coroutine[None, None, None]) -> AsyncIterator[None]:
    """Cancel the work at the end of the block, and raise what made it fail before that."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        try:
            await task
        except asyncio.CancelledError:
            pass
