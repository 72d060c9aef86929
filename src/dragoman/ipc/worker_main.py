"""Runs an engine in a worker process: `python -m dragoman.ipc.worker_main`, over standard input and output.

Rules
1. The end of standard input ends the process at once, so that a parent killed with kill -9 leaves no worker behind.
   The worker ignores signals to the parent's process group.
2. Events that become ready in one turn of the event loop leave in one message. A step of an engine that works in steps
   is one message, without a task per request.
3. Output that cannot be encoded fails its own request only.
"""

import asyncio
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, BinaryIO, Never

import msgspec

from dragoman.core.engine import Engine
from dragoman.core.errors import ConfigError, DragomanError
from dragoman.core.logs import configure_as_parent
from dragoman.core.request import GenerationRequest
from dragoman.engines import engine_class
from dragoman.engines.step_delivery import RequestUpdate, SteppingEngine
from dragoman.ipc.worker_messages import (
    HEADER,
    Answer,
    CancelRequest,
    CountTokens,
    Embed,
    Failure,
    Generate,
    GenerationProgress,
    Loading,
    PackedStep,
    Question,
    Ready,
    Render,
    Start,
    StartFailed,
    Tokenize,
    ToParent,
    ToWorker,
    UnpackedStep,
    decode_to_worker,
    encode,
    pack,
)
from dragoman.pipeline.event_stream import call_engine, engine_failure, stream_events

log = logging.getLogger("dragoman.ipc")

PROGRESS_SECONDS = 0.2


class WorkerServer:
    def __init__(self, engine: Engine, output: BinaryIO) -> None:
        self._engine = engine
        self._output = output
        self._loop = asyncio.get_running_loop()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._outbox: list[msgspec.Raw] = []
        self._stepping = engine if isinstance(engine, SteppingEngine) else None
        self._begun: set[int] = set()
        """Unfinished generations of an engine that works in steps."""
        if self._stepping is not None:
            self._stepping.receiver = self

    def handle(self, message: ToWorker) -> None:
        if isinstance(message, Generate) and self._stepping is not None:
            # Added before the task runs: a cancellation in between must report the end too.
            self._begun.add(message.id)
            self._spawn(message.id, self._begin(self._stepping, message.id, message.request), self._forget)
        elif isinstance(message, Generate):
            self._spawn(message.id, self._generate(message.id, message.request), self._end)
        elif isinstance(message, Question):
            self._spawn(message.id, self._answer(message), self._forget)
        elif isinstance(message, CancelRequest):
            self._cancel(message.id)

    def _cancel(self, key: int) -> None:
        if key in self._tasks:
            self._tasks[key].cancel()
        if key in self._begun and self._stepping is not None:
            self._begun.discard(key)
            self._stepping.drop(key)
            self._post(GenerationProgress(key, ended=True))

    def _spawn(
        self, key: int, work: Coroutine[Any, Any, None], on_done: Callable[[int, asyncio.Task[None]], None]
    ) -> None:
        task = self._loop.create_task(work)
        self._tasks[key] = task
        task.add_done_callback(lambda task: on_done(key, task))

    def _forget(self, key: int, task: asyncio.Task[None]) -> None:
        del self._tasks[key]

    def _end(self, key: int, task: asyncio.Task[None]) -> None:
        self._forget(key, task)
        if task.cancelled():
            self._post(GenerationProgress(key, ended=True))

    async def _generate(self, key: int, request: GenerationRequest) -> None:
        failure = None
        try:
            async with aclosing(stream_events(self._engine, request)) as stream:
                async for events in stream:
                    self._post(GenerationProgress(key, tuple(events)))
        except Exception as error:  # noqa: BLE001 (reported to the parent and logged)
            failure = to_failure(error)
        self._post(GenerationProgress(key, ended=True, failure=failure))

    async def _begin(self, engine: SteppingEngine, key: int, request: GenerationRequest) -> None:
        try:
            await engine.begin(key, request)
        except Exception as error:  # noqa: BLE001 (reported to the parent and logged)
            self._begun.discard(key)
            self._post(GenerationProgress(key, ended=True, failure=to_failure(error)))

    def take(self, portions: Sequence[RequestUpdate]) -> None:
        progress: list[RequestUpdate | GenerationProgress] = []
        for portion in portions:
            if portion.ended:
                self._begun.discard(portion.key)
            if portion.error is None:
                progress.append(portion)
            else:
                progress.append(
                    GenerationProgress(portion.key, portion.events, portion.ended, Failure.of(portion.error))
                )
        try:
            encoded = encode(UnpackedStep(progress, self._engine.kv_used))
        except Exception:  # noqa: BLE001 (encoding the parts one by one finds the invalid one)
            encoded = encode(PackedStep(tuple(map(self._pack, progress, portions)), self._engine.kv_used))
        self._write(encoded)

    def _pack(self, progress: RequestUpdate | GenerationProgress, portion: RequestUpdate) -> msgspec.Raw:
        try:
            return pack(progress)
        except Exception as error:  # noqa: BLE001 (reported to the parent and logged)
            self._begun.discard(portion.key)
            if self._stepping is not None:
                self._stepping.drop(portion.key)
            return pack(GenerationProgress(portion.key, ended=True, failure=to_failure(error)))

    def lose(self, reason: str) -> None:
        log.error("the engine stopped working: %s", reason)
        _exit(1)

    def _post(self, progress: GenerationProgress) -> None:
        packed = pack(progress)
        if not self._outbox:
            self._loop.call_soon(self._flush)
        self._outbox.append(packed)

    def _flush(self) -> None:
        step = PackedStep(tuple(self._outbox), self._engine.kv_used)
        self._outbox.clear()
        self._write(encode(step))

    async def _answer(self, message: Question) -> None:
        try:
            encoded = encode(await answer_question(self._engine, message))
        except Exception as error:  # noqa: BLE001 (reported to the parent and logged)
            encoded = encode(Answer(message.id, failure=to_failure(error)))
        self._write(encoded)

    def send(self, message: ToParent) -> None:
        self._write(encode(message))

    def _write(self, encoded: bytes) -> None:
        self._output.write(encoded)
        self._output.flush()


async def answer_question(engine: Engine, message: Question) -> Answer:
    """Return the engine's answer to a question."""
    if isinstance(message, Render):
        return Answer(message.id, rendered=await call_engine(engine.render, message.request))
    if isinstance(message, CountTokens):
        return Answer(message.id, count=await call_engine(engine.count_tokens, message.request))
    if isinstance(message, Tokenize):
        tokens = await call_engine(engine.tokenize, message.text, message.special)
        return Answer(message.id, tokens=tuple(tokens))
    if isinstance(message, Embed):
        made = await call_engine(engine.embed, message.inputs)
        return Answer(message.id, embeddings=tuple(made))
    return Answer(message.id, text=await call_engine(engine.detokenize, message.tokens))


def _exit(code: int) -> Never:
    """Exit and kill the processes that the engine started, which are in the same group."""
    if hasattr(os, "killpg") and os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(code)


def to_failure(error: Exception) -> Failure:
    """Convert an error for the other process; log an unexpected one."""
    if not isinstance(error, DragomanError):
        log.error("the engine raised", exc_info=error)
        error = engine_failure(error)
    return Failure.of(error)


def _read(source: BinaryIO) -> ToWorker:
    """Read the next message; exit at the end of the pipe."""
    header = source.read(HEADER.size)
    if len(header) < HEADER.size:
        _exit(0)
    (length,) = HEADER.unpack(header)
    body = source.read(length)
    if len(body) < length:
        _exit(0)
    return decode_to_worker(body)


async def _load(start: Start, output: BinaryIO) -> Engine:
    cls = engine_class(start.engine)
    engine = cls.configured(start.name, msgspec.convert(start.options, cls.Options))
    reporter = asyncio.create_task(_report_progress(engine, output))
    try:
        await engine.start()
    finally:
        reporter.cancel()
    return engine


async def _report_progress(engine: Engine, output: BinaryIO) -> None:
    reported = None
    while True:
        await asyncio.sleep(PROGRESS_SECONDS)
        if engine.progress is not None and engine.progress != reported:
            reported = engine.progress
            output.write(encode(Loading(reported)))
            output.flush()


async def _main(source: BinaryIO, output: BinaryIO) -> None:
    start = await asyncio.to_thread(_read, source)
    assert isinstance(start, Start)
    inbox: asyncio.Queue[ToWorker] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def read_messages() -> None:
        try:
            while True:
                loop.call_soon_threadsafe(inbox.put_nowait, _read(source))
        except Exception:
            # Without the reader the worker would miss EOF from its parent, so it exits.
            log.exception("a message from the server could not be read; the worker exits")
            os._exit(1)

    threading.Thread(target=read_messages, name="dragoman-parent", daemon=True).start()
    try:
        engine = await _load(start, output)
    except Exception as error:
        is_config_error = isinstance(error, ConfigError | msgspec.ValidationError)
        if not is_config_error:
            log.exception("the engine could not be loaded")
        output.write(encode(StartFailed(str(error) or type(error).__name__, is_config_error)))
        output.flush()
        return
    child = WorkerServer(engine, output)
    child.send(Ready(tuple(engine.models()), engine.supports(), engine.device, engine.slots))
    while True:
        child.handle(await inbox.get())


def main() -> None:
    configure_as_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # Standard output carries messages; what an engine or a library prints goes to standard error.
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    asyncio.run(_main(sys.stdin.buffer, output))
    # Threads and processes of a library might keep this process alive.
    _exit(0)


if __name__ == "__main__":
    main()
