"""Contains the Engine that the server holds for an engine in a worker process."""

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any

import msgspec

from dragoman.core.embeddings import Embedding, Input
from dragoman.core.engine import Engine, ModelInfo, RenderedPrompt
from dragoman.core.errors import EngineFailed
from dragoman.core.events import Event
from dragoman.core.request import GenerationRequest
from dragoman.ipc.fatal_requests import FatalRequests
from dragoman.ipc.worker_messages import (
    Answer,
    CountTokens,
    Detokenize,
    Embed,
    Question,
    Ready,
    Render,
    Start,
    Tokenize,
)
from dragoman.ipc.worker_process import ProgressSink, WorkerProcess
from dragoman.ipc.worker_supervisor import WorkerSupervisor


class WorkerEngine(Engine):
    """Passes every call on to the worker that a `WorkerSupervisor` keeps running (see its rules).

    A request that was alone in the worker at two crashes is refused with `RequestRefused` (see `fatal_requests`).
    """

    emits_events = True

    def __init__(
        self,
        engine: str,
        name: str,
        options: Mapping[str, Any],
        stall_seconds: float = 600.0,
        on_lost: Callable[[str], None] | None = None,
        load_seconds: float | None = None,
    ) -> None:
        self._start = Start(engine, name, options)
        self._info = Ready((ModelInfo(name),), frozenset(), "cpu", None)
        self._fatal = FatalRequests()
        self._supervisor = WorkerSupervisor(self._start, self, self._fatal, stall_seconds, on_lost, load_seconds)

    def models(self) -> Sequence[ModelInfo]:
        return self._info.models

    def supports(self) -> frozenset[str]:
        return self._info.supports

    def describe(self, info: Ready) -> None:
        """Adopt what a new worker reports about its engine."""
        self._info = info
        self.device, self.slots = info.device, info.slots

    async def start(self) -> None:
        await self._supervisor.start()

    async def stop(self) -> None:
        await self._supervisor.stop()

    @property
    def _worker(self) -> WorkerProcess | None:
        return self._supervisor.worker

    @property
    def pid(self) -> int | None:
        return None if self._worker is None else self._worker.process.pid

    @property
    def is_restarting(self) -> bool:
        """Whether the worker has died and its successor is not ready yet."""
        return self._supervisor.is_restarting

    @property
    def restart_seconds(self) -> float:
        """Seconds since the worker died."""
        return self._supervisor.restart_seconds

    async def wait_until_running(self) -> None:
        await self._supervisor.running_worker(timeout=None)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Sequence[Event], None]:
        self._fatal.check(request)
        worker = await self._supervisor.worker_for_request()
        key, stream = worker.open(request)
        try:
            while events := await stream.take():
                yield events
        finally:
            worker.cancel(key)

    async def forward(self, sink: ProgressSink, key: int, request: msgspec.Raw) -> None:
        """Start a generation for another process, which has chosen a unique key for it."""
        self._fatal.check(request)
        (await self._supervisor.worker_for_request()).open_forwarded(sink, key, request)

    def forward_now(self, sink: ProgressSink, key: int, request: msgspec.Raw) -> bool:
        """Do the same without waiting; return False if the worker is not running."""
        if self._worker is None:
            return False
        self._fatal.check(request)
        self._worker.open_forwarded(sink, key, request)
        return True

    def stop_forwarding(self, key: int, ended: bool) -> None:
        """Discard further output of a forwarded generation; cancel it unless it has `ended`."""
        if self._worker is not None:
            self._worker.stop_forwarding(key, ended)

    async def render(self, request: GenerationRequest) -> RenderedPrompt:
        rendered = (await self._ask(lambda key: Render(key, request))).rendered
        if rendered is None:
            raise EngineFailed("the engine returned no prompt")
        return rendered

    async def count_tokens(self, request: GenerationRequest) -> int:
        count = (await self._ask(lambda key: CountTokens(key, request))).count
        if count is None:
            raise EngineFailed("the engine returned no token count")
        return count

    async def tokenize(self, text: str, special: bool) -> Sequence[int]:
        return (await self._ask(lambda key: Tokenize(key, text, special))).tokens or ()

    async def detokenize(self, tokens: Sequence[int]) -> str:
        return (await self._ask(lambda key: Detokenize(key, tuple(tokens)))).text or ""

    async def embed(self, inputs: Sequence[Input]) -> Sequence[Embedding]:
        return (await self._ask(lambda key: Embed(key, tuple(inputs)))).embeddings or ()

    async def _ask(self, question: Callable[[int], Question]) -> Answer:
        self._fatal.check(question(0))
        return await (await self._supervisor.worker_for_request()).ask(question)


def dump_options(options: msgspec.Struct) -> dict[str, Any]:
    """Convert an engine's options to plain values that cross the pipe."""
    plain: dict[str, Any] = msgspec.to_builtins(options)
    return plain
