"""What front ends cost their parent: CPU for a token that it passes on, and for a request that it lets in.

    python -m bench.fronts [--workers 2] [--streams 256] [--tokens 400]

The engine is one in a worker that makes a token for every stream in each step, as an engine with continuous batching
does, and no work of its own. Beside the parent's figures are those of the front ends: what they do is what the parent
would have to do without them.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import msgspec
from tools.ports import free_port

from bench.frontend import Caller, Stream, cpu_seconds, run, served_until_ready
from dragoman.core.engine import Engine, ModelInfo
from dragoman.core.events import Event, Finished, Listener, Started, TextDelta, Usage, notify
from dragoman.core.request import GenerationRequest


class SteppingOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tokens: int = 400
    steps_per_second: float = 100.0


class Stepping(Engine):
    """Every running request gets its next token in the same moment."""

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
            for mailbox in self._running:
                mailbox.put_nowait(TextDelta("word"))

    async def deliver(self, request: GenerationRequest, listener: Listener) -> None:
        mailbox: asyncio.Queue[Event] = asyncio.Queue()
        wanted = self.options.tokens if request.max_tokens is None else request.max_tokens
        self._running.add(mailbox)
        try:
            await notify(listener, [Started(10)])
            for _ in range(wanted):
                await notify(listener, [await mailbox.get()])
        finally:
            self._running.discard(mailbox)
        await notify(listener, [Finished("length", usage=Usage(10, wanted))])


@contextmanager
def server(workers: int, tokens: int) -> Iterator[tuple[int, int, list[int]]]:
    """Its port, its process, its front ends."""
    port = free_port()
    config = {
        "models": {
            "scripted": {"engine": "bench.fronts:Stepping", "tokens": tokens},
            "short": {"engine": "scripted", "replies": [{"output": "Paris is."}]},
        },
        "models_dir": [],
        "workers": workers,
        "limits": {"queue": 5000},
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "dragoman.yaml"
        path.write_text(json.dumps(config))
        command = [sys.executable, "-m", "dragoman", "serve", "--config", str(path), "--port", str(port)]
        child = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        try:
            served_until_ready(child, port)
            yield port, child.pid, fronts_of(child.pid)
        finally:
            child.terminate()
            child.wait(10)


def fronts_of(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(one) for one in children if b"frontends.process" in Path(f"/proc/{one}/cmdline").read_bytes()]


async def streamed(port: int, streams: int) -> int:
    loop = asyncio.get_running_loop()
    opened = [await loop.create_connection(Stream, "127.0.0.1", port) for _ in range(streams)]
    return sum(await asyncio.gather(*(stream.done for _, stream in opened)))


class ShortCaller(Caller):
    def __init__(self, calls: int) -> None:
        super().__init__(calls)
        self.request = self.request.replace(b'"scripted"', b'"short"   ')


async def asked(port: int, connections: int, calls: int) -> int:
    loop = asyncio.get_running_loop()
    opened = [await loop.create_connection(lambda: ShortCaller(calls), "127.0.0.1", port) for _ in range(connections)]
    await asyncio.gather(*(caller.done for _, caller in opened))
    return connections * calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=400)
    options = parser.parse_args()
    print(f"{options.workers} workers; CPU in microseconds")
    with server(options.workers, options.tokens) as (port, parent, fronts):
        run(streamed(port, 8))
        kinds: tuple[tuple[str, Callable[[], Coroutine[Any, Any, int]]], ...] = (
            (f"per frame, {options.streams} streams", lambda: streamed(port, options.streams)),
            ("per request with a short reply, 64 connections", lambda: asked(port, 64, 100)),
        )
        for name, work in kinds:
            begun = cpu_seconds(parent), sum(map(cpu_seconds, fronts))
            count = run(work())
            ended = cpu_seconds(parent), sum(map(cpu_seconds, fronts))
            own, others = ((after - before) / count * 1e6 for before, after in zip(begun, ended, strict=True))
            print(f"  {name:<50} parent {own:6.2f}   front ends {others:6.2f}   ({count:,})")


if __name__ == "__main__":
    main()
