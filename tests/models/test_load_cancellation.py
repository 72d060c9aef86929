"""A request that leaves during a load does not cancel it for others."""

import asyncio

import pytest

from dragoman.config.model_spec import ModelSpec
from dragoman.config.settings import Limits, Settings
from dragoman.core.errors import ModelLoading
from dragoman.models import Catalog

SLOW = ModelSpec("slow", "tests.support.engines:SlowToLoad")


@pytest.mark.parametrize(
    ("limits", "error"), [(Limits(), asyncio.CancelledError), (Limits(load_seconds=0.2), ModelLoading)]
)
async def test_request_that_leaves_does_not_cancel_the_load(limits: Limits, error: type[BaseException]) -> None:
    catalog = Catalog(Settings(models=(SLOW,), models_dir=(), limits=limits))
    host = catalog.resolve("slow").host
    try:
        leaving = asyncio.create_task(host.ready())
        await asyncio.sleep(0.1)
        host.set_limits(Limits())
        staying = asyncio.create_task(host.ready())
        await asyncio.sleep(0.2)
        if error is asyncio.CancelledError:
            leaving.cancel()
        with pytest.raises(error):
            await leaving
        async with asyncio.timeout(60):
            await staying
        assert not catalog.lifecycle.residency_of(host).running
        assert not catalog.lifecycle.residency_of(host).waiting
    finally:
        await catalog.stop()
