import asyncio

import pytest

from dragoman.core.errors import StorageUnavailable
from dragoman.storage.maintenance import Maintenance


async def test_failing_job_runs_again_and_leaves_the_others(caplog: pytest.LogCaptureFixture) -> None:
    runs = {"failing": 0, "unavailable": 0, "good": 0}
    done = asyncio.Event()

    async def failing() -> None:
        runs["failing"] += 1
        raise ValueError("broken")

    async def unavailable() -> None:
        runs["unavailable"] += 1
        raise StorageUnavailable("full")

    async def good() -> None:
        runs["good"] += 1
        if min(runs.values()) >= 3:
            done.set()

    maintenance = Maintenance()
    for job in (failing, unavailable, good):
        maintenance.add(job, 0.001)
    maintenance.start()
    await asyncio.wait_for(done.wait(), 30)
    await maintenance.stop()
    assert {record.message for record in caplog.records} == {"a periodic job of the storage failed"}
