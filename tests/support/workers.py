"""Helpers for tests of engines in worker processes."""

import asyncio
import os
from collections.abc import Callable

from dragoman.core.engine import stream_events
from dragoman.core.events import Event
from dragoman.core.request import GenerationRequest, Message, Text
from dragoman.ipc.worker_engine import WorkerEngine
from tests.support.requests import PATIENCE
from tests.support.server_process import children_of, has_ended


def ask(text: str) -> GenerationRequest:
    return GenerationRequest(id="1", messages=(Message("user", (Text(text),)),))


async def events(engine: WorkerEngine, text: str) -> list[Event]:
    return [event async for ready in stream_events(engine, ask(text)) for event in ready]


async def until(condition: Callable[[], object]) -> None:
    """Wait for something that happens in another process."""
    async with asyncio.timeout(PATIENCE):
        while not condition():  # noqa: ASYNC110 (another process does not notify this one)
            await asyncio.sleep(0.01)


def alive(pid: int) -> bool:
    return not has_ended(pid)


def children() -> set[int]:
    return set(children_of(os.getpid()))
