"""What is measured of a model while it is loaded and afterwards."""

import asyncio
from pathlib import Path

import pytest

from dragoman.catalog import Catalog
from dragoman.config import ModelSpec, Settings

TAKEN = "dragoman.catalog.host.taken"
SETTINGS = Settings(models=(ModelSpec("m", "scripted"),), models_dir=(), memory=1000)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is measured here is remembered nowhere else."""
    monkeypatch.setenv("DRAGOMAN_HOME", str(tmp_path))


def test_the_most_that_was_measured_is_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = iter([100, 0, 300, 200])
    monkeypatch.setattr(TAKEN, lambda pid: next(sizes))

    async def scenario() -> None:
        catalog = Catalog(SETTINGS)
        host = catalog.resolve("m").host
        await host.ready()
        seen = [catalog.lifecycle.seat(host).weight]
        for _ in range(3):
            await host.measure()
            seen.append(catalog.lifecycle.seat(host).weight)
        assert seen == [100, 100, 300, 300]
        await catalog.stop()

    asyncio.run(scenario())
