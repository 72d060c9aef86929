"""Measures the CPU time that the parent of front ends needs for each token and each request.

    python -m bench.fronts [--workers 2] [--streams 256] [--tokens 400]

The engine runs in a worker and makes a token for every stream in each step, as with continuous batching, but does not
compute. The figures of the front ends, beside those of the parent, are the work that the parent is spared.
"""

import argparse
import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

import msgspec

from bench.frontend import Caller, Connection, Stream, cpu_seconds, run, run_connections
from bench.servers import run_dragoman
from dragoman.core.engine import Engine, ModelInfo
from dragoman.core.events import Event, Finished, Listener, Started, TextDelta, Usage, notify
from dragoman.core.request import GenerationRequest


class SteppingOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tokens: int = 400
    steps_per_second: float = 100.0


class SteppingEngine(Engine):
    """All running requests get their next tokens at the same time."""

    Options = SteppingOptions

    def __init__(self, name: str, options: SteppingOptions) -> None:
        self.name = name
        self.options = options
        self._running: set[asyncio.Queue[Event]] = set()
        self._stepping: asyncio.Task[None] | None = None

    @classmethod
    def configured(cls, name: str, options: msgspec.Struct) -> Self:
        assert isinstance(options, SteppingOptions)
        return cls(name, options)

    @classmethod
    def needs_worker(cls, options: msgspec.Struct) -> bool:
        return True

    def models(self) -> Sequence[ModelInfo]:
        return [ModelInfo(self.name)]

    def supports(self) -> frozenset[str]:
        return frozenset({"chat", "usage", "max_tokens"})

    async def start(self) -> None:
        self._stepping = asyncio.create_task(self._step())

    async def _step(self) -> None:
        while True:
            await asyncio.sleep(1 / self.options.steps_per_second)
            for queue in self._running:
                queue.put_nowait(TextDelta("word"))

    async def deliver(self, request: GenerationRequest, listener: Listener) -> None:
        queue: asyncio.Queue[Event] = asyncio.Queue()
        limit = self.options.tokens if request.max_tokens is None else request.max_tokens
        self._running.add(queue)
        try:
            await notify(listener, [Started(10)])
            for _ in range(limit):
                await notify(listener, [await queue.get()])
        finally:
            self._running.discard(queue)
        await notify(listener, [Finished("length", usage=Usage(10, limit))])


def fronts_of(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(one) for one in children if b"frontends.process" in Path(f"/proc/{one}/cmdline").read_bytes()]


class ShortCaller(Caller):
    def __init__(self, calls: int) -> None:
        super().__init__(calls)
        self.request = self.request.replace(b'"scripted"', b'"short"   ')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=400)
    options = parser.parse_args()
    print(f"{options.workers} workers; CPU in microseconds")
    models = {
        "scripted": {"engine": "bench.fronts:SteppingEngine", "tokens": options.tokens},
        "short": {"engine": "scripted", "replies": [{"output": "Paris is."}]},
    }
    config = {"models": models, "models_dir": [], "workers": options.workers, "limits": {"queue": 5000}}
    with run_dragoman(config) as (port, parent):
        fronts = fronts_of(parent)
        run(run_connections(Stream, port, 8))
        kinds: tuple[tuple[str, Callable[[], Connection], int], ...] = (
            (f"per frame, {options.streams} streams", Stream, options.streams),
            ("per request with a short reply, 64 connections", lambda: ShortCaller(100), 64),
        )
        for name, create, connections in kinds:
            begun = cpu_seconds(parent), sum(map(cpu_seconds, fronts))
            count = run(run_connections(create, port, connections))
            ended = cpu_seconds(parent), sum(map(cpu_seconds, fronts))
            own, others = ((after - before) / count * 1e6 for before, after in zip(begun, ended, strict=True))
            print(f"  {name:<50} parent {own:6.2f}   front ends {others:6.2f}   ({count:,})")


if __name__ == "__main__":
    main()
