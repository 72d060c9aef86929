"""Helpers that run the vllm engine in a worker process, with the fake vLLM if the fixture `stand_in` is used."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from dragoman.core.request import GenerationRequest, JsonSchema, Message, Text
from dragoman.ipc.worker_engine import WorkerEngine

STAND_IN = Path(__file__).parent / "fakevllm"
IM_START, IM_END = 256, 257
NOT_ONE = JsonSchema(
    {"type": "object", "properties": {"a": {"type": "integer", "not": {"const": 1}}}, "required": ["a"]}
)
"""A schema whose `not` is not enforced."""


@asynccontextmanager
async def start_engine(
    kind: str = "vllm", path: str = "some/model", args: Mapping[str, Any] = {}, **options: Any
) -> AsyncIterator[WorkerEngine]:
    engine = WorkerEngine(kind, "m", {"path": path, "args": args, **options})
    try:
        await engine.start()
        yield engine
    finally:
        await engine.stop()


def chat(text: str, **fields: Any) -> GenerationRequest:
    return GenerationRequest(id="1", messages=(Message("user", (Text(text),)),), **fields)


def numbers(count: int) -> str:
    return " ".join(map(str, range(count)))


def child_processes(pid: int) -> list[int]:
    """Child processes of a process, started by any of its threads."""
    found = [children.read_text().split() for children in Path(f"/proc/{pid}/task").glob("*/children")]
    return [int(child) for child in itertools.chain(*found)]


def engine_process(engine: WorkerEngine) -> int:
    assert engine.pid is not None
    (found,) = child_processes(engine.pid)
    return found


async def wait_until_ended(pid: int) -> None:
    async with asyncio.timeout(60):
        while _is_running(pid):  # noqa: ASYNC110 (another process ends)
            await asyncio.sleep(0.02)


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False
