"""The server's side of a worker: an Engine whose work is done by a child process.

Rules
1. A child that dies fails the requests it had, with `EngineDied`, and is started again, at once the first time and
   with growing pauses if it keeps dying young.
2. Requests that come while it starts wait for it. A model that cannot be loaded is `ModelFailed`, and is tried again
   when it is next asked for.
3. A child that says nothing for `stall_seconds` although it has work is killed.
"""

import asyncio
import itertools
import logging
import sys
import time
from collections import deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

import msgspec

from dragoman.conversation import GenerationRequest
from dragoman.engines.interface import Engine, ModelInfo
from dragoman.errors import ConfigError, DragomanError, EngineDied, EngineTimeout, ModelFailed
from dragoman.events import Event
from dragoman.worker.messages import (
    HEADER,
    Answer,
    Broken,
    Cancel,
    Detokenize,
    Generate,
    Ready,
    Start,
    Step,
    ToChild,
    Tokenize,
    decode_to_parent,
    encode,
)

log = logging.getLogger("dragoman.worker")

YOUNG_SECONDS = 10.0
LONGEST_PAUSE = 30.0


class _Stream:
    """Events of one request between the arrival of a step and the reader's turn."""

    def __init__(self) -> None:
        self._ready: deque[Sequence[Event]] = deque()
        self._wake: asyncio.Future[None] | None = None
        self._error: DragomanError | None = None
        self.ended = False

    def put(self, events: Sequence[Event]) -> None:
        self._ready.append(events)
        self._notify()

    def end(self, error: DragomanError | None = None) -> None:
        self.ended = True
        self._error = error
        self._notify()

    def _notify(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    async def take(self) -> Sequence[Event]:
        """Everything that is ready; nothing at the end."""
        while not self._ready:
            if self._error is not None:
                raise self._error
            if self.ended:
                return ()
            self._wake = asyncio.get_running_loop().create_future()
            await self._wake
        if len(self._ready) == 1:
            return self._ready.popleft()
        taken = [event for events in self._ready for event in events]
        self._ready.clear()
        return taken


class _Child:
    """One running child process and the requests it has."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self.process = process
        self._input = process.stdin
        self._output = process.stdout
        self._keys = itertools.count()
        self.streams: dict[int, _Stream] = {}
        self.answers: dict[int, asyncio.Future[Answer]] = {}
        self.heard = time.monotonic()
        self.last_words: DragomanError = EngineDied("the engine's process died; the request can be sent again")

    def send(self, message: ToChild) -> None:
        self._input.write(encode(message))

    def open(self, request: GenerationRequest) -> tuple[int, _Stream]:
        key, stream = next(self._keys), _Stream()
        if not self.streams:
            self.heard = time.monotonic()
        self.send(Generate(key, request))
        self.streams[key] = stream
        return key, stream

    def close(self, key: int, stream: _Stream) -> None:
        if not stream.ended:
            self.send(Cancel(key))

    async def ask(self, key: int, message: ToChild) -> Answer:
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self.answers[key] = future
        self.send(message)
        try:
            answer = await future
        finally:
            del self.answers[key]
        if answer.failure is not None:
            raise answer.failure.error()
        return answer

    def next_key(self) -> int:
        return next(self._keys)

    async def read(self) -> Ready | Broken | Step | Answer | None:
        try:
            (length,) = HEADER.unpack(await self._output.readexactly(HEADER.size))
            body = await self._output.readexactly(length)
        except asyncio.IncompleteReadError:
            return None
        self.heard = time.monotonic()
        return decode_to_parent(body)

    def deliver(self, message: Step | Answer) -> None:
        if isinstance(message, Answer):
            future = self.answers.get(message.id)
            if future is not None and not future.done():
                future.set_result(message)
            return
        for progress in message.progress:
            stream = self.streams[progress.id]
            if progress.events:
                stream.put(progress.events)
            if progress.ended:
                del self.streams[progress.id]
                stream.end(progress.failure.error() if progress.failure else None)

    def bury(self) -> None:
        """Tell everybody who still waits."""
        for stream in self.streams.values():
            stream.end(self.last_words)
        self.streams.clear()
        for future in self.answers.values():
            if not future.done():
                future.set_exception(self.last_words)


class WorkerEngine(Engine):
    streams_events = True

    def __init__(self, engine: str, name: str, options: Mapping[str, Any], stall_seconds: float = 600.0) -> None:
        self._start = Start(engine, name, options)
        self._stall_seconds = stall_seconds
        self._facts = Ready((ModelInfo(name),), frozenset(), "cpu", None)
        self._child: _Child | None = None
        self._starting: asyncio.Task[_Child] | None = None
        self._followers: set[asyncio.Task[None]] = set()
        self._deaths = 0
        self._started = False
        self._stopped = False

    def models(self) -> Sequence[ModelInfo]:
        return self._facts.models

    def supports(self) -> frozenset[str]:
        return self._facts.supports

    async def start(self) -> None:
        await self._running()
        self._started = True

    async def stop(self) -> None:
        self._stopped = True
        if self._starting is not None:
            self._starting.cancel()
        if self._child is not None:
            self._child.process.kill()
        await asyncio.gather(*self._followers, return_exceptions=True)

    @property
    def pid(self) -> int | None:
        return self._child.process.pid if self._child else None

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Sequence[Event], None]:
        child = await self._asked()
        key, stream = child.open(request)
        try:
            while events := await stream.take():
                yield events
        finally:
            child.close(key, stream)

    async def tokenize(self, text: str, special: bool) -> Sequence[int]:
        child = await self._asked()
        key = child.next_key()
        return (await child.ask(key, Tokenize(key, text, special))).tokens or ()

    async def detokenize(self, tokens: Sequence[int]) -> str:
        child = await self._asked()
        key = child.next_key()
        return (await child.ask(key, Detokenize(key, tuple(tokens)))).text or ""

    async def _asked(self) -> _Child:
        """The child, for a request: the operator's mistakes are not the caller's to read."""
        try:
            return await self._running()
        except ConfigError as error:
            raise self._failed() from error

    async def _running(self) -> _Child:
        """The child, started if need be; many who ask at once start one."""
        if self._child is not None:
            return self._child
        if self._starting is None:
            self._starting = asyncio.create_task(self._launch())
            self._starting.add_done_callback(self._launched)
        return await asyncio.shield(self._starting)

    def _launched(self, task: "asyncio.Task[_Child]") -> None:
        self._starting = None
        # What goes wrong with the first start is told by whoever asked for it.
        if self._started and not task.cancelled() and task.exception() is not None:
            log.error("model %s: %s", self._start.name, task.exception())

    async def _launch(self) -> _Child:
        if self._deaths > 1:
            await asyncio.sleep(min(LONGEST_PAUSE, 0.25 * 2**self._deaths))
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "dragoman.worker.child",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        child = _Child(process)
        try:
            child.send(self._start)
            answer = await child.read()
        except asyncio.CancelledError:
            process.kill()
            raise
        if not isinstance(answer, Ready):
            await process.wait()
            raise self._refusal(answer)
        self._facts, self._child = answer, child
        self.device, self.slots = answer.device, answer.slots
        follower = asyncio.create_task(self._follow(child))
        self._followers.add(follower)
        follower.add_done_callback(self._followers.discard)
        return child

    def _refusal(self, answer: object) -> Exception:
        if isinstance(answer, Broken):
            return ConfigError(answer.reason) if answer.mistake else self._failed()
        self._deaths += 1
        name = self._start.name
        return ModelFailed(f"model '{name}' could not be loaded: its process died", retry_after=10)

    def _failed(self) -> ModelFailed:
        return ModelFailed(f"model '{self._start.name}' could not be loaded; the server's log says why", retry_after=10)

    async def _follow(self, child: _Child) -> None:
        """Hand out what the child says until it dies, then start another."""
        born = time.monotonic()
        watch = asyncio.create_task(self._watch(child))
        try:
            while isinstance(message := await child.read(), Step | Answer):
                child.deliver(message)
        finally:
            watch.cancel()
            self._child = None
            if child.process.returncode is None:
                child.process.kill()
            await child.process.wait()
            child.bury()
        if self._stopped:
            return
        self._deaths = self._deaths + 1 if time.monotonic() - born < YOUNG_SECONDS else 1
        log.error(
            "model %s: the engine's process died (exit %s); starting it again",
            self._start.name,
            child.process.returncode,
        )
        try:
            await self._running()
        except (DragomanError, ConfigError):
            # Logged by `_launched`; the next request tries again.
            pass

    async def _watch(self, child: _Child) -> None:
        while True:
            await asyncio.sleep(min(1.0, self._stall_seconds / 4))
            if child.streams and time.monotonic() - child.heard > self._stall_seconds:
                log.error("model %s: the engine says nothing any more; ending its process", self._start.name)
                child.last_words = EngineTimeout(f"the engine gave no answer within {self._stall_seconds:g} s")
                child.process.kill()


def options_of(options: msgspec.Struct) -> dict[str, Any]:
    """An engine's options in a form that crosses the pipe."""
    plain: dict[str, Any] = msgspec.to_builtins(options)
    return plain
