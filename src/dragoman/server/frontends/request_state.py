"""A request of a front end, as the parent knows it: what it holds, until it leaves."""

import asyncio

from dragoman.core.engine import Engine
from dragoman.core.rate_limits import Rate
from dragoman.ipc.worker_engine import WorkerEngine
from dragoman.server.auth.quotas import Lease
from dragoman.server.model_lease import Engagement


class Guest:
    __slots__ = ("engagement", "engine", "lease", "opening", "passed", "played", "tasks", "via")

    def __init__(self) -> None:
        self.lease: Lease | None = None
        self.engagement: Engagement | None = None
        self.engine: Engine | None = None
        self.passed: set[int] = set()
        """Generations in workers."""
        self.opening: dict[int, asyncio.Task[None]] = {}
        """Those of them that still wait for their worker."""
        self.played: dict[int, Played] = {}
        """Generations in this process."""
        self.tasks: set[asyncio.Task[None]] = set()
        self.via: bytes | None = None
        """By whom it came (see `hops`)."""

    def rates(self) -> tuple[Rate, ...]:
        return () if self.lease is None else tuple(self.lease.rates())

    def let_go(self, key: int, ended: bool) -> None:
        if key in self.passed:
            self.passed.discard(key)
            if key in self.opening:
                self.opening.pop(key).cancel()
            elif isinstance(self.engine, WorkerEngine):
                self.engine.let_go(key, ended)
        elif key in self.played:
            self.played.pop(key).task.cancel()

    def leave(self, ended: bool) -> None:
        """`ended`: what it had running has come to its end, or was cancelled."""
        for task in self.tasks:
            task.cancel()
        for key in [*self.passed, *self.played]:
            self.let_go(key, ended)
        if self.engagement is not None:
            self.engagement.close()
        self.engagement = self.engine = None


class Played:
    __slots__ = ("free", "task")

    def __init__(self, task: "asyncio.Task[None]", free: asyncio.Event) -> None:
        self.task = task
        self.free = free
