"""Runs an engine in a worker process: `python -m dragoman.ipc.worker_main`, over standard input and output.

Rules
1. The end of standard input ends the process at once, so that a parent killed with kill -9 leaves no worker behind. A
   thread reads it, because the engine may block the event loop. On Linux the kernel ends a worker whose threads are
   all stuck (see `parent_death`).
2. Events that become ready in one turn of the event loop leave in one message, so a step of an engine is one message.
3. Output that cannot be encoded fails its own request only.
4. Every generation is reported to its end, even if it was cancelled.

Front ends and replicas run calls in the same way, by `run_generation` and `run_method_call`.
"""

import asyncio
import logging
import os
import signal
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, BinaryIO, Never

import msgspec

from dragoman.core.embeddings import Input
from dragoman.core.engine import Engine, call_engine, run_delivery, start_engine
from dragoman.core.errors import ConfigError
from dragoman.core.request import GenerationRequest
from dragoman.engines import engine_class
from dragoman.ipc import messages
from dragoman.ipc.child_process import enter_child
from dragoman.ipc.framing import encode, read_body
from dragoman.ipc.messages import (
    Cancel,
    Failure,
    Generate,
    GenerationProgress,
    MethodCall,
    MethodResult,
    Start,
    ToWorker,
)
from dragoman.ipc.parent_death import kill_after_parent

log = logging.getLogger("dragoman.ipc")

PROGRESS_SECONDS = 0.2
ARGUMENTS: dict[str, msgspec.msgpack.Decoder[Any]] = {
    "render": msgspec.msgpack.Decoder(tuple[GenerationRequest]),
    "count_tokens": msgspec.msgpack.Decoder(tuple[GenerationRequest]),
    "tokenize": msgspec.msgpack.Decoder(tuple[str, bool]),
    "tokenize_text": msgspec.msgpack.Decoder(tuple[str, bool]),
    "token_texts": msgspec.msgpack.Decoder(tuple[tuple[int, ...]]),
    "detokenize": msgspec.msgpack.Decoder(tuple[tuple[int, ...]]),
    "embed": msgspec.msgpack.Decoder(tuple[tuple[Input, ...]]),
}
"""The methods of an engine that can be called, with the types of their arguments."""


async def run_generation(
    engine: Engine,
    key: int,
    request: GenerationRequest,
    put: Callable[[GenerationProgress], Awaitable[None] | None],
) -> None:
    """Pass the progress of a generation to `put`, which may return an awaitable to pause the engine."""
    failure = None
    try:
        await run_delivery(engine, request, lambda events: put(GenerationProgress(key, tuple(events))))
    except Exception as error:  # noqa: BLE001 (reported to the other process and logged)
        failure = Failure.of(error)
    put(GenerationProgress(key, ended=True, failure=failure))


async def run_method_call(engine: Engine, method_call: MethodCall) -> MethodResult:
    try:
        arguments = ARGUMENTS[method_call.method].decode(method_call.arguments)
        value: Any = await call_engine(getattr(engine, method_call.method), *arguments)
        if method_call.method in ("tokenize", "tokenize_text", "token_texts", "embed"):
            value = tuple(value)
        return MethodResult(method_call.key, messages.pack(value))
    except Exception as error:  # noqa: BLE001 (reported to the other process and logged)
        return MethodResult(method_call.key, failure=Failure.of(error))


class EngineServer:
    """Serves the parent of a worker; `output` is the connection to it."""

    def __init__(self, engine: Engine, output: BinaryIO) -> None:
        self._engine = engine
        self._output = output
        self._loop = asyncio.get_running_loop()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._outbox: list[GenerationProgress] = []
        engine.on_death = self._exit

    def handle(self, message: ToWorker) -> None:
        if isinstance(message, Generate):
            task = self._spawn(message.key, run_generation(self._engine, message.key, message.request, self._post))
            task.add_done_callback(lambda task: self._post_cancelled(message.key, task))
        elif isinstance(message, MethodCall):
            self._spawn(message.key, self._run_method_call(message))
        elif isinstance(message, Cancel) and message.key in self._tasks:
            self._tasks[message.key].cancel()

    def _spawn(self, key: int, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        self._tasks[key] = task = self._loop.create_task(work)
        task.add_done_callback(lambda _: self._tasks.pop(key))
        return task

    def _post_cancelled(self, key: int, task: "asyncio.Task[None]") -> None:
        if task.cancelled():
            self._post(GenerationProgress(key, ended=True))

    def _exit(self, reason: str) -> None:
        log.error("the engine stopped working: %s", reason)
        exit_with_group(1)

    def _post(self, progress: GenerationProgress) -> None:
        if not self._outbox:
            self._loop.call_soon(self._flush)
        self._outbox.append(progress)

    def _flush(self) -> None:
        progress, self._outbox = self._outbox, []
        try:
            encoded = encode(messages.Step(tuple(progress), self._engine.kv_used))
        except Exception:  # noqa: BLE001 (encoding the parts one by one finds the invalid one)
            encoded = encode(messages.PackedStep(tuple(map(self._pack, progress)), self._engine.kv_used))
        _write(self._output, encoded)

    def _pack(self, progress: GenerationProgress) -> msgspec.Raw:
        try:
            return messages.pack(progress)
        except Exception as error:  # noqa: BLE001 (reported to the other process and logged)
            if progress.key in self._tasks:
                self._tasks[progress.key].cancel()
            return messages.pack(GenerationProgress(progress.key, ended=True, failure=Failure.of(error)))

    async def _run_method_call(self, method_call: MethodCall) -> None:
        _write(self._output, encode(await run_method_call(self._engine, method_call)))


def exit_with_group(code: int) -> Never:
    """Exit and kill the processes that the engine started, which are in the same group."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(code)


def _read(source: BinaryIO) -> ToWorker:
    """Read the next message; exit at the end of the connection."""
    body = read_body(source)
    if body is None:
        exit_with_group(0)
    return messages.decode_to_worker(body)


def _write(output: BinaryIO, encoded: bytes) -> None:
    output.write(encoded)
    output.flush()


async def _load(start: Start, output: BinaryIO) -> Engine:
    cls = engine_class(start.engine)
    engine = cls.configured(start.name, msgspec.convert(start.options, cls.Options))
    reporter = asyncio.create_task(_report_progress(engine, output))
    try:
        await start_engine(engine)
    finally:
        reporter.cancel()
    return engine


async def _report_progress(engine: Engine, output: BinaryIO) -> None:
    reported = None
    while True:
        await asyncio.sleep(PROGRESS_SECONDS)
        if engine.progress is not None and engine.progress != reported:
            reported = engine.progress
            _write(output, encode(messages.Loading(reported)))


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
        _write(output, encode(messages.StartFailed(str(error) or type(error).__name__, is_config_error)))
        return
    server = EngineServer(engine, output)
    _write(output, encode(messages.EngineInfo.of(engine)))
    while True:
        server.handle(await inbox.get())


def main() -> None:
    source, output = enter_child()
    kill_after_parent()
    asyncio.run(_main(os.fdopen(source, "rb"), os.fdopen(output, "wb")))
    # Threads and processes of a library might keep this process alive.
    exit_with_group(0)


if __name__ == "__main__":
    main()
