"""The child's side of a worker: `python -m dragoman.ipc.worker_main`, talking over standard input and output.

Rules
1. The end of standard input is the end of the process, at once and whatever it is doing: a parent that died, even by
   kill -9, leaves no child behind. Signals for the parent's process group are the parent's to handle.
2. Events that become ready in one turn of the event loop leave in one message. What an engine that works in steps makes
   in one of them is such a message as it is, without a task for each request.
3. What cannot be encoded fails the request that it belongs to, and no other.
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
from dragoman.engines.step_delivery import Portion, SteppingEngine
from dragoman.ipc.worker_messages import (
    HEADER,
    Answer,
    Broken,
    Cancel,
    CountTokens,
    Embed,
    Failure,
    Generate,
    Loading,
    PackedStep,
    Progress,
    Question,
    Ready,
    Render,
    Start,
    ToChild,
    Tokenize,
    ToParent,
    WholeStep,
    decode_to_child,
    encode,
    pack,
)
from dragoman.pipeline.event_stream import call, failed, run

log = logging.getLogger("dragoman.ipc")

PROGRESS_SECONDS = 0.2


class Child:
    def __init__(self, engine: Engine, output: BinaryIO) -> None:
        self._engine = engine
        self._output = output
        self._loop = asyncio.get_running_loop()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._outbox: list[msgspec.Raw] = []
        self._stepping = engine if isinstance(engine, SteppingEngine) else None
        self._begun: set[int] = set()
        """What the engine that works in steps has, and has not ended."""
        if self._stepping is not None:
            self._stepping.receiver = self

    def handle(self, message: ToChild) -> None:
        if isinstance(message, Generate) and self._stepping is not None:
            # Now, and not when the task gets its turn: it may be cancelled before that, and the end has to be told.
            self._begun.add(message.id)
            self._keep(message.id, self._begin(self._stepping, message.id, message.request), self._forget)
        elif isinstance(message, Generate):
            self._keep(message.id, self._generate(message.id, message.request), self._end)
        elif isinstance(message, Question):
            self._keep(message.id, self._answer(message), self._forget)
        elif isinstance(message, Cancel):
            self._cancel(message.id)

    def _cancel(self, key: int) -> None:
        if key in self._tasks:
            self._tasks[key].cancel()
        if key in self._begun and self._stepping is not None:
            self._begun.discard(key)
            self._stepping.drop(key)
            self._post(Progress(key, ended=True))

    def _keep(self, key: int, work: Coroutine[Any, Any, None], done: Callable[[int, asyncio.Task[None]], None]) -> None:
        task = self._loop.create_task(work)
        self._tasks[key] = task
        task.add_done_callback(lambda task: done(key, task))

    def _forget(self, key: int, task: asyncio.Task[None]) -> None:
        del self._tasks[key]

    def _end(self, key: int, task: asyncio.Task[None]) -> None:
        self._forget(key, task)
        if task.cancelled():
            self._post(Progress(key, ended=True))

    async def _generate(self, key: int, request: GenerationRequest) -> None:
        failure = None
        try:
            async with aclosing(run(self._engine, request)) as stream:
                async for events in stream:
                    self._post(Progress(key, tuple(events)))
        except Exception as error:  # noqa: BLE001 (told to the parent, and to the log)
            failure = failure_of(error)
        self._post(Progress(key, ended=True, failure=failure))

    async def _begin(self, engine: SteppingEngine, key: int, request: GenerationRequest) -> None:
        try:
            await engine.begin(key, request)
        except Exception as error:  # noqa: BLE001 (told to the parent, and to the log)
            self._begun.discard(key)
            self._post(Progress(key, ended=True, failure=failure_of(error)))

    def take(self, portions: Sequence[Portion]) -> None:
        told: list[Portion | Progress] = []
        for portion in portions:
            if portion.ended:
                self._begun.discard(portion.key)
            # Failures have to be put into words; everything else leaves as it is.
            told.append(portion if portion.error is None else _failed(portion, portion.error))
        try:
            encoded = encode(WholeStep(told, self._engine.kv_used))
        except Exception:  # noqa: BLE001 (whose fault it is shows when each is encoded alone)
            encoded = encode(PackedStep(tuple(map(self._alone, portions, told)), self._engine.kv_used))
        self._write(encoded)

    def _alone(self, portion: Portion, told: Portion | Progress) -> msgspec.Raw:
        try:
            return pack(told)
        except Exception as error:  # noqa: BLE001 (told to the parent, and to the log)
            self._begun.discard(portion.key)
            if self._stepping is not None:
                self._stepping.drop(portion.key)
            return pack(Progress(portion.key, ended=True, failure=failure_of(error)))

    def lose(self, reason: str) -> None:
        log.error("the engine is gone: %s", reason)
        _end(1)

    def _post(self, progress: Progress) -> None:
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
            encoded = encode(await answered(self._engine, message))
        except Exception as error:  # noqa: BLE001 (told to the parent, and to the log)
            encoded = encode(Answer(message.id, failure=failure_of(error)))
        self._write(encoded)

    def send(self, message: ToParent) -> None:
        self._write(encode(message))

    def _write(self, encoded: bytes) -> None:
        self._output.write(encoded)
        self._output.flush()


async def answered(engine: Engine, message: Question) -> Answer:
    """What an engine says to a question."""
    if isinstance(message, Render):
        return Answer(message.id, rendered=await call(engine.render, message.request))
    if isinstance(message, CountTokens):
        return Answer(message.id, count=await call(engine.count_tokens, message.request))
    if isinstance(message, Tokenize):
        tokens = await call(engine.tokenize, message.text, message.special)
        return Answer(message.id, tokens=tuple(tokens))
    if isinstance(message, Embed):
        made = await call(engine.embed, message.inputs)
        return Answer(message.id, embeddings=tuple(made))
    return Answer(message.id, text=await call(engine.detokenize, message.tokens))


def _failed(portion: Portion, error: DragomanError) -> Progress:
    return Progress(portion.key, portion.events, portion.ended, Failure.of(error))


def _end(code: int) -> Never:
    """With all processes that the engine has started, which are of the same group."""
    if hasattr(os, "killpg") and os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(code)


def failure_of(error: Exception) -> Failure:
    """What is told of an error; what nobody foresaw is for the log."""
    if not isinstance(error, DragomanError):
        log.error("the engine raised", exc_info=error)
        error = failed(error)
    return Failure.of(error)


def _read(source: BinaryIO) -> ToChild:
    """The next message; at the end of the pipe the process ends."""
    header = source.read(HEADER.size)
    if len(header) < HEADER.size:
        _end(0)
    (length,) = HEADER.unpack(header)
    body = source.read(length)
    if len(body) < length:
        _end(0)
    return decode_to_child(body)


async def _load(start: Start, output: BinaryIO) -> Engine:
    cls = engine_class(start.engine)
    engine = cls.configured(start.name, msgspec.convert(start.options, cls.Options))
    telling = asyncio.create_task(_tell_progress(engine, output))
    try:
        await engine.start()
    finally:
        telling.cancel()
    return engine


async def _tell_progress(engine: Engine, output: BinaryIO) -> None:
    told = None
    while True:
        await asyncio.sleep(PROGRESS_SECONDS)
        if engine.progress is not None and engine.progress != told:
            told = engine.progress
            output.write(encode(Loading(told)))
            output.flush()


async def _main(source: BinaryIO, output: BinaryIO) -> None:
    start = await asyncio.to_thread(_read, source)
    assert isinstance(start, Start)
    inbox: asyncio.Queue[ToChild] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def follow() -> None:
        try:
            while True:
                loop.call_soon_threadsafe(inbox.put_nowait, _read(source))
        except Exception:
            # Deaf it would be of no use, and would not even notice the end of its parent.
            log.exception("a message from the server could not be read; the process ends")
            os._exit(1)

    threading.Thread(target=follow, name="dragoman-parent", daemon=True).start()
    try:
        engine = await _load(start, output)
    except Exception as error:
        mistake = isinstance(error, ConfigError | msgspec.ValidationError)
        if not mistake:
            log.exception("the engine could not be loaded")
        output.write(encode(Broken(str(error) or type(error).__name__, mistake)))
        output.flush()
        return
    child = Child(engine, output)
    child.send(Ready(tuple(engine.models()), engine.supports(), engine.device, engine.slots))
    while True:
        child.handle(await inbox.get())


def main() -> None:
    configure_as_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # What the engine or a library prints must not get among the messages.
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    asyncio.run(_main(sys.stdin.buffer, output))
    # Threads and processes of a library may never end by themselves.
    _end(0)


if __name__ == "__main__":
    main()
