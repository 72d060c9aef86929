"""The lease of a model by one request."""

import asyncio

from dragoman.config.model_spec import ModelSpec
from dragoman.config.settings import Settings
from dragoman.models import Catalog
from dragoman.server.auth.callers import UNRESTRICTED
from dragoman.server.model_lease import LeaseRequest, LocalModelLease

REQUEST = LeaseRequest("m", (), None, strict=False)
SETTINGS = Settings(models=(ModelSpec("m", "scripted", None, {"slots": 1}),), models_dir=())


async def test_waiting_for_a_slot_does_not_hold_the_model() -> None:
    catalog = Catalog(SETTINGS)
    seat = catalog.lifecycle.residency_of(catalog.resolve("m").host)
    first, second = (LocalModelLease(catalog, UNRESTRICTED, None) for _ in range(2))
    # The features are unknown before the first load, so both wait for it.
    await asyncio.gather(first.find(REQUEST), second.find(REQUEST))
    assert seat.running == 2
    engine = await first.start()
    waiting = asyncio.create_task(second.start())
    await asyncio.sleep(0.05)
    assert (seat.running, waiting.done()) == (1, False)
    first.close()
    async with asyncio.timeout(60):
        assert await waiting is engine
    assert seat.running == 1
    second.close()
    second.close()
    assert seat.running == 0
    await catalog.stop()
