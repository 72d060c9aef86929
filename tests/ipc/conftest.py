from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from dragoman.ipc.worker_engine import WorkerEngine

MakeWorker = Callable[..., WorkerEngine]


@pytest.fixture
async def make_worker() -> AsyncIterator[MakeWorker]:
    """Makes workers of `tests.ipc.engines` that are stopped after the test."""
    made: list[WorkerEngine] = []

    def make(
        name: str = "Obedient", stall_seconds: float = 60.0, load_seconds: float | None = None, **options: Any
    ) -> WorkerEngine:
        path = f"tests.ipc.engines:{name}"
        made.append(WorkerEngine(path, name.lower(), options, stall_seconds, load_seconds=load_seconds))
        return made[-1]

    yield make
    for engine in made:
        await engine.stop()


@pytest.fixture
async def engine(make_worker: MakeWorker) -> WorkerEngine:
    worker = make_worker()
    await worker.start()
    return worker
