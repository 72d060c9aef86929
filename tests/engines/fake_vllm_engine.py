"""Helpers that run the vllm engine in a worker process with a fake vLLM."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from dragoman.core.engine import stream_events
from dragoman.core.events import Event, TextDelta
from dragoman.core.request import (
    GenerationRequest,
    JsonSchema,
    Message,
    Text,
)
from dragoman.ipc.worker_engine import WorkerEngine

STAND_IN = Path(__file__).parent / "fakevllm"
IM_START, IM_END = 256, 257


@asynccontextmanager
async def engine(kind: str = "vllm", args: dict[str, Any] | None = None, **options: Any) -> AsyncIterator[WorkerEngine]:
    given = {"path": "some/model", "args": {"steps_per_second": 500, **(args or {})}, **options}
    made = WorkerEngine(kind, "m", given)
    await made.start()
    try:
        yield made
    finally:
        await made.stop()


def with_engine(test: Callable[[WorkerEngine], Awaitable[None]], kind: str = "vllm", **options: Any) -> None:
    async def main() -> None:
        async with asyncio.timeout(100), engine(kind, **options) as made:
            await test(made)

    asyncio.run(main())


def chat(text: str, **fields: Any) -> GenerationRequest:
    return GenerationRequest(id="1", messages=(Message("user", (Text(text),)),), **fields)


NOT_ONE = JsonSchema(
    {"type": "object", "properties": {"a": {"type": "integer", "not": {"const": 1}}}, "required": ["a"]}
)
"""A schema whose `not` is not enforced."""


async def events(made: WorkerEngine, request: GenerationRequest) -> list[Event]:
    return [event async for batch in stream_events(made, request) for event in batch]


def text_of(said: Sequence[Event]) -> str:
    return "".join(event.text for event in said if isinstance(event, TextDelta))


def numbers(count: int) -> str:
    return " ".join(map(str, range(count)))


def helpers_of(pid: int) -> list[int]:
    """Child processes of a process, started by any of its threads."""
    found = [children.read_text().split() for children in Path(f"/proc/{pid}/task").glob("*/children")]
    return [int(child) for child in itertools.chain(*found)]


def engine_process(made: WorkerEngine) -> int:
    assert made.pid is not None
    (found,) = helpers_of(made.pid)
    return found


async def gone(pid: int) -> None:
    async with asyncio.timeout(60):
        while _runs(pid):  # noqa: ASYNC110 (another process ends)
            await asyncio.sleep(0.02)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False
