"""Embeddings from a worker, and their cancellation."""

import asyncio

import pytest

from dragoman.core.embeddings import Embedding
from dragoman.core.errors import NotSupported
from tests.ipc.test_worker import run, worker


def test_embeddings_cross_the_pipe() -> None:
    engine = worker("Embedding")

    async def scenario() -> None:
        await engine.start()
        assert engine.supports() == {"embeddings"}
        made = await engine.embed(["abc", (1, 2)])
        assert list(made) == [Embedding.of([1, 0], tokens=3), Embedding.of([1, 0], tokens=2)]

    run(engine, scenario())


def test_cancelled_embed_stops_the_work() -> None:
    engine = worker("Embedding")

    async def working() -> int:
        return (await engine.embed(["working"]))[0].tokens

    async def scenario() -> None:
        await engine.start()
        assert await working() == 1
        waiting = [asyncio.create_task(engine.embed(["wait"])) for _ in range(3)]
        async with asyncio.timeout(60):
            while await working() != 4:  # noqa: ASYNC110 (it happens in another process)
                await asyncio.sleep(0.01)
            for task in waiting:
                task.cancel()
            while await working() != 1:  # noqa: ASYNC110 (as above)
                await asyncio.sleep(0.01)
        # The worker still answers.
        assert len(await engine.embed(["a", "b"])) == 2

    run(engine, scenario())


def test_engine_without_embeddings() -> None:
    engine = worker()

    async def scenario() -> None:
        await engine.start()
        with pytest.raises(NotSupported):
            await engine.embed(["a"])

    run(engine, scenario())
