"""The server's side of a worker: an Engine whose work is done by a child process.

Rules
1. A child that dies fails the requests it had, with `EngineDied`, and is started again, at once the first time and
   with growing pauses if it keeps dying young. After `MOST_DEATHS` of those it is given up: whoever wants the model
   from then on makes a new worker.
2. Requests that come while it starts wait for it. A model that cannot be loaded is `ModelFailed`, and is tried again
   when it is next asked for.
3. A child that says nothing for `stall_seconds` although it has work is killed.
"""

import asyncio
import itertools
import logging
import os
import signal
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from dragoman.conversation import GenerationRequest
from dragoman.embedding import Embedding, Input
from dragoman.engines.interface import Engine, ModelInfo, Rendered
from dragoman.errors import (
    BadRequest,
    ConfigError,
    DragomanError,
    EngineDied,
    EngineFailed,
    EngineTimeout,
    ModelFailed,
    Unavailable,
)
from dragoman.events import Event
from dragoman.mailbox import Mailbox
from dragoman.worker.messages import (
    HEADER,
    KEY_BITS,
    OWN_NUMBER,
    Answer,
    Broken,
    Cancel,
    CountTokens,
    Detokenize,
    Embed,
    Failure,
    Generate,
    Loading,
    PackedStep,
    PassedGenerate,
    Progress,
    Question,
    Ready,
    Render,
    Start,
    Step,
    ToChild,
    Tokenize,
    ToParent,
    ToPasser,
    decode_to_parent,
    decode_to_passer,
    encode,
    key_of,
    pack,
    unpack,
)

log = logging.getLogger("dragoman.worker")

YOUNG_SECONDS = 10.0
LONGEST_PAUSE = 30.0
MOST_DOUBLINGS = 7
"""Beyond them a pause is longer than the longest."""
MOST_DEATHS = 3
"""Of young ones, one after the other."""
STOPPED = "the engine has been stopped"
UNSENDABLE = "the request has an integer of more than 64 bits or half a character: it cannot be passed to the engine"


class Follower(Protocol):
    """Whoever follows generations in another process: what becomes of them is passed on as it came."""

    def put(self, progress: msgspec.Raw) -> None: ...


class _Child:
    """One running child process and the requests it has."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self.process = process
        self._input = process.stdin
        self._output = process.stdout
        self._keys = itertools.count(OWN_NUMBER << KEY_BITS)
        self._buried = False
        self.streams: dict[int, Mailbox] = {}
        self.followed: dict[int, Follower] = {}
        """Streams that are passed on, each until its follower lets go of it."""
        self.answers: dict[int, asyncio.Future[Answer]] = {}
        self.heard = time.monotonic()
        self.last_words = Failure.of(EngineDied("the engine's process died; the request can be sent again"))

    @property
    def busy(self) -> bool:
        return bool(self.streams or self.answers or self.followed)

    def send(self, message: ToChild | PassedGenerate) -> None:
        encoded = encode(message)
        if self._buried or self._input.is_closing():
            raise self.last_words.error()
        try:
            self._input.write(encoded)
        except (OSError, RuntimeError) as error:
            # Which of them a pipe without a reader raises depends on the event loop.
            raise self.last_words.error() from error

    def open(self, request: GenerationRequest) -> tuple[int, Mailbox]:
        key = self._begin(lambda key: Generate(key, request))
        self.streams[key] = stream = Mailbox()
        return key, stream

    def open_for(self, follower: Follower, key: int, request: msgspec.Raw) -> None:
        if not self.busy:
            self.heard = time.monotonic()
        self.send(PassedGenerate(key, request))
        self.followed[key] = follower

    def let_go(self, key: int, ended: bool) -> None:
        """Of a stream that was passed on. What still comes of it is for nobody."""
        if self.followed.pop(key, None) is not None and not ended:
            self._stop(key)

    async def ask(self, question: Callable[[int], Question]) -> Answer:
        key = self._begin(question)
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self.answers[key] = future
        try:
            answer = await future
        except asyncio.CancelledError:
            self._stop(key)
            raise
        finally:
            del self.answers[key]
        if answer.failure is not None:
            raise answer.failure.error()
        return answer

    def _begin(self, message: Callable[[int], ToChild]) -> int:
        """Send what the message for a new key is, and give the key."""
        key = next(self._keys)
        if not self.busy:
            self.heard = time.monotonic()
        try:
            self.send(message(key))
        except (OverflowError, TypeError, ValueError, RecursionError, msgspec.MsgspecError) as error:
            raise BadRequest(UNSENDABLE) from error
        return key

    def cancel(self, key: int) -> None:
        """Nobody wants the rest of a generation. One that has ended may be cancelled too."""
        if key in self.streams:
            self._stop(key)

    def _stop(self, key: int) -> None:
        try:
            self.send(Cancel(key))
        except DragomanError:
            # It has died, and works on nothing any more.
            pass

    async def read(self) -> ToParent | ToPasser | None:
        """The next message; None where nothing more can be understood."""
        try:
            (length,) = HEADER.unpack(await self._output.readexactly(HEADER.size))
            body = await self._output.readexactly(length)
        except asyncio.IncompleteReadError:
            return None
        self.heard = time.monotonic()
        try:
            return decode_to_passer(body) if self.followed else decode_to_parent(body)
        except msgspec.MsgspecError:
            log.exception("a message of the engine's process could not be read")
            return None

    def deliver(self, message: Step | PackedStep | Answer) -> None:
        if isinstance(message, Answer):
            future = self.answers.get(message.id)
            if future is not None and not future.done():
                future.set_result(message)
        elif isinstance(message, PackedStep):
            self._pass_on(message)
        else:
            for progress in message.progress:
                self._put(progress)

    def _pass_on(self, step: PackedStep) -> None:
        followed = self.followed
        for packed in step.progress:
            follower = followed.get(key_of(packed))
            if follower is None:
                self._put(unpack(packed))
            else:
                follower.put(packed)

    def _put(self, progress: Progress) -> None:
        stream = self.streams.get(progress.id)
        if stream is None:
            # Of one that was passed on, to somebody who has let go of it.
            return
        stream.put(progress.events)
        if progress.ended:
            del self.streams[progress.id]
            if progress.failure is None:
                stream.end()
            else:
                stream.fail(progress.failure.error())

    async def kill(self) -> None:
        """End the process and all that it has started, and wait for its end."""
        if hasattr(os, "killpg"):
            self._kill_group()
        elif self.process.returncode is None:
            self.process.kill()
        await self.process.wait()

    def _kill_group(self) -> None:
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            # They ended by themselves; a Mac forbids to kill what has ended and not been waited for.
            pass

    def bury(self) -> None:
        """Tell everybody who still waits."""
        self._buried = True
        for stream in self.streams.values():
            stream.fail(self.last_words.error())
        self.streams.clear()
        for key, follower in self.followed.items():
            follower.put(pack(Progress(key, ended=True, failure=self.last_words)))
        self.followed.clear()
        for future in self.answers.values():
            if not future.done():
                future.set_exception(self.last_words.error())


class WorkerEngine(Engine):
    streams_events = True

    def __init__(
        self,
        engine: str,
        name: str,
        options: Mapping[str, Any],
        stall_seconds: float = 600.0,
        given_up: Callable[[str], None] | None = None,
    ) -> None:
        self._start = Start(engine, name, options)
        self._stall_seconds = stall_seconds
        self._facts = Ready((ModelInfo(name),), frozenset(), "cpu", None)
        self._child: _Child | None = None
        self._starting: asyncio.Task[_Child] | None = None
        self._followers: set[asyncio.Task[None]] = set()
        self._deaths = 0
        self._given_up = given_up
        self._reason: str | None = None
        """Why it was given up."""
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
        ending: list[Awaitable[object]] = [*self._followers]
        if self._starting is not None:
            self._starting.cancel()
            ending.append(self._starting)
        if self._child is not None:
            ending.append(self._child.kill())
        await asyncio.gather(*ending, return_exceptions=True)

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
            child.cancel(key)

    async def pass_on(self, follower: Follower, key: int, request: msgspec.Raw) -> None:
        """A generation for somebody in another process, who has a key for it that nobody else has."""
        (await self._asked()).open_for(follower, key, request)

    def pass_on_now(self, follower: Follower, key: int, request: msgspec.Raw) -> bool:
        """The same where the child runs; False where one has to wait for it."""
        if self._child is None:
            return False
        self._child.open_for(follower, key, request)
        return True

    def let_go(self, key: int, ended: bool) -> None:
        """The follower wants no more of a generation; where it has not ended, it is cancelled."""
        if self._child is not None:
            self._child.let_go(key, ended)

    async def render(self, request: GenerationRequest) -> Rendered:
        child = await self._asked()
        rendered = (await child.ask(lambda key: Render(key, request))).rendered
        if rendered is None:
            raise EngineFailed("the engine told no prompt")
        return rendered

    async def count_tokens(self, request: GenerationRequest) -> int:
        child = await self._asked()
        count = (await child.ask(lambda key: CountTokens(key, request))).count
        if count is None:
            raise EngineFailed("the engine told no count")
        return count

    async def tokenize(self, text: str, special: bool) -> Sequence[int]:
        child = await self._asked()
        return (await child.ask(lambda key: Tokenize(key, text, special))).tokens or ()

    async def detokenize(self, tokens: Sequence[int]) -> str:
        child = await self._asked()
        return (await child.ask(lambda key: Detokenize(key, tuple(tokens)))).text or ""

    async def embed(self, inputs: Sequence[Input]) -> Sequence[Embedding]:
        child = await self._asked()
        return (await child.ask(lambda key: Embed(key, tuple(inputs)))).embeddings or ()

    async def _asked(self) -> _Child:
        """The child, for a request: the operator's mistakes are not the caller's to read."""
        try:
            return await self._running()
        except ConfigError as error:
            raise self._failed() from error

    async def _running(self) -> _Child:
        """The child, started if need be; many who ask at once start one."""
        if self._stopped:
            raise Unavailable(STOPPED)
        if self._reason is not None:
            raise self._failed()
        if self._child is not None:
            return self._child
        if self._starting is None:
            self._starting = asyncio.create_task(self._launch())
            self._starting.add_done_callback(self._launched)
        starting = self._starting
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            asking = asyncio.current_task()
            if not starting.cancelled() or (asking is not None and asking.cancelling()):
                raise
            # Not the one who asked was cancelled, but the start.
            raise Unavailable(STOPPED) from None

    def _launched(self, task: "asyncio.Task[_Child]") -> None:
        self._starting = None
        # What goes wrong with the first start is told by whoever asked for it.
        if self._started and not task.cancelled() and task.exception() is not None:
            log.error("model %s: %s", self._start.name, task.exception())

    async def _launch(self) -> _Child:
        if self._deaths > 1:
            await asyncio.sleep(min(LONGEST_PAUSE, 0.25 * 2 ** min(self._deaths, MOST_DOUBLINGS)))
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "dragoman.worker.child",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            # A session of its own: what an engine starts ends with it, however it ends.
            start_new_session=True,
        )
        child = _Child(process)
        try:
            child.send(self._start)
            while isinstance(answer := await child.read(), Loading):
                self.progress = answer.progress
            if not isinstance(answer, Ready):
                raise self._refusal(answer)
        except BaseException:
            await child.kill()
            raise
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
            while isinstance(message := await child.read(), Step | PackedStep | Answer):
                child.deliver(message)
                if isinstance(message, Step | PackedStep):
                    self.kv_used = message.kv_used
        finally:
            watch.cancel()
            self._child = None
            await child.kill()
            child.bury()
        if self._stopped:
            return
        self._deaths = self._deaths + 1 if time.monotonic() - born < YOUNG_SECONDS else 1
        if self._deaths >= MOST_DEATHS and self._give_up(
            f"its process died {self._deaths} times soon after its start (exit {child.process.returncode})"
        ):
            return
        log.error(
            "model %s: the engine's process died (exit %s); starting it again",
            self._start.name,
            child.process.returncode,
        )
        try:
            await self._running()
        except (DragomanError, ConfigError) as error:
            # Logged by `_launched`. Where nobody makes another worker, the next request tries again.
            self._give_up(str(error))

    def _give_up(self, reason: str) -> bool:
        """Whether there is somebody who makes another worker when there is need for one."""
        if self._given_up is None or self._stopped:
            return False
        self._reason = reason
        self._given_up(reason)
        return True

    async def _watch(self, child: _Child) -> None:
        while True:
            await asyncio.sleep(min(1.0, self._stall_seconds / 4))
            if child.busy and time.monotonic() - child.heard > self._stall_seconds:
                log.error("model %s: the engine says nothing any more; ending its process", self._start.name)
                late = EngineTimeout(f"the engine gave no answer within {self._stall_seconds:g} s")
                child.last_words = Failure.of(late)
                await child.kill()


def options_of(options: msgspec.Struct) -> dict[str, Any]:
    """An engine's options in a form that crosses the pipe."""
    plain: dict[str, Any] = msgspec.to_builtins(options)
    return plain
