"""The server's side of a worker: an Engine whose work is done by a child process.

Rules
1. A child that dies fails the requests it had, with `EngineDied`, and is started again, at once the first time and
   with growing pauses if it keeps dying young. After `MOST_DEATHS` of those it is given up: whoever wants the model
   from then on makes a new worker.
2. Requests that come while it starts wait for it, for `load_seconds` at most. A model that cannot be loaded is
   `ModelFailed`, and is tried again when it is next asked for.
3. A child that says nothing for `stall_seconds` although it has work is killed.
4. A request that was alone in the child at two crashes is refused, with `RequestRefused` (`fatal_requests`).
"""

import asyncio
import logging
import signal
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec

from dragoman.core.embeddings import Embedding, Input
from dragoman.core.engine import Engine, ModelInfo, Rendered
from dragoman.core.errors import (
    ConfigError,
    DragomanError,
    EngineFailed,
    EngineTimeout,
    ModelFailed,
    ModelLoading,
    Unavailable,
)
from dragoman.core.events import Event
from dragoman.core.request import GenerationRequest
from dragoman.ipc.fatal_requests import FatalRequests
from dragoman.ipc.restart_backoff import Deaths
from dragoman.ipc.worker_messages import (
    Answer,
    Broken,
    CountTokens,
    Detokenize,
    Embed,
    Failure,
    Loading,
    PackedStep,
    Question,
    Ready,
    Render,
    Start,
    Step,
    Tokenize,
)
from dragoman.ipc.worker_process import ChildProcess, Follower

log = logging.getLogger("dragoman.ipc")

SHORTEST_PAUSE, LONGEST_PAUSE = 1.0, 30.0
MOST_DEATHS = 3
KILLED = (-signal.SIGKILL, -signal.SIGTERM)
"""Exit codes of a process that something else has ended."""
"""Of young ones, one after the other."""
STOPPED = "the engine has been stopped"


class WorkerEngine(Engine):
    streams_events = True

    def __init__(
        self,
        engine: str,
        name: str,
        options: Mapping[str, Any],
        stall_seconds: float = 600.0,
        given_up: Callable[[str], None] | None = None,
        load_seconds: float | None = None,
    ) -> None:
        self._start = Start(engine, name, options)
        self._stall_seconds = stall_seconds
        self._load_seconds = load_seconds
        self._facts = Ready((ModelInfo(name),), frozenset(), "cpu", None)
        self._child: ChildProcess | None = None
        self._starting: asyncio.Task[ChildProcess] | None = None
        self._followers: set[asyncio.Task[None]] = set()
        self._deaths = Deaths(SHORTEST_PAUSE, LONGEST_PAUSE)
        self._fatal = FatalRequests()
        self._given_up = given_up
        self._reason: str | None = None
        """Why it was given up."""
        self._started = False
        self._stopped = False
        self._away_since = 0.0

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

    @property
    def is_away(self) -> bool:
        """Whether its child has died, and the next one is not there yet."""
        return self._started and self._child is None

    @property
    def away_seconds(self) -> float:
        return time.monotonic() - self._away_since

    async def back(self) -> None:
        """When the child is there (again)."""
        try:
            await self._running()
        except ConfigError as error:
            raise self._failed() from error

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Sequence[Event], None]:
        self._fatal.check(request)
        child = await self._asked()
        key, stream = child.open(request)
        try:
            while events := await stream.take():
                yield events
        finally:
            child.cancel(key)

    async def pass_on(self, follower: Follower, key: int, request: msgspec.Raw) -> None:
        """A generation for somebody in another process, who has a key for it that nobody else has."""
        self._fatal.check(request)
        (await self._asked()).open_for(follower, key, request)

    def pass_on_now(self, follower: Follower, key: int, request: msgspec.Raw) -> bool:
        """The same where the child runs; False where one has to wait for it."""
        if self._child is None:
            return False
        self._fatal.check(request)
        self._child.open_for(follower, key, request)
        return True

    def let_go(self, key: int, ended: bool) -> None:
        """The follower wants no more of a generation; where it has not ended, it is cancelled."""
        if self._child is not None:
            self._child.let_go(key, ended)

    async def render(self, request: GenerationRequest) -> Rendered:
        rendered = (await self._answer(lambda key: Render(key, request))).rendered
        if rendered is None:
            raise EngineFailed("the engine told no prompt")
        return rendered

    async def count_tokens(self, request: GenerationRequest) -> int:
        count = (await self._answer(lambda key: CountTokens(key, request))).count
        if count is None:
            raise EngineFailed("the engine told no count")
        return count

    async def tokenize(self, text: str, special: bool) -> Sequence[int]:
        return (await self._answer(lambda key: Tokenize(key, text, special))).tokens or ()

    async def detokenize(self, tokens: Sequence[int]) -> str:
        return (await self._answer(lambda key: Detokenize(key, tuple(tokens)))).text or ""

    async def embed(self, inputs: Sequence[Input]) -> Sequence[Embedding]:
        return (await self._answer(lambda key: Embed(key, tuple(inputs)))).embeddings or ()

    async def _answer(self, question: Callable[[int], Question]) -> Answer:
        self._fatal.check(question(0))
        return await (await self._asked()).ask(question)

    async def _asked(self) -> ChildProcess:
        """The child, for a request: the operator's mistakes are not the caller's to read."""
        if self._child is not None and not self._stopped:
            return self._child
        try:
            async with asyncio.timeout(self._load_seconds):
                return await self._running()
        except TimeoutError:
            raise ModelLoading("the model is still being loaded; try again later", retry_after=5) from None
        except ConfigError as error:
            raise self._failed() from error

    async def _running(self) -> ChildProcess:
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

    def _launched(self, task: "asyncio.Task[ChildProcess]") -> None:
        self._starting = None
        # What goes wrong with the first start is told by whoever asked for it.
        if self._started and not task.cancelled() and task.exception() is not None:
            log.error("model %s: %s", self._start.name, task.exception())

    async def _launch(self) -> ChildProcess:
        if self._deaths.pause:
            await asyncio.sleep(self._deaths.pause)
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "dragoman.ipc.worker_main",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            # A session of its own: what an engine starts ends with it, however it ends.
            start_new_session=True,
        )
        child = ChildProcess(process)
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
        if self._started:
            log.info("model %s: there again after %.1f s", self._start.name, self.away_seconds)
        follower = asyncio.create_task(self._follow(child))
        self._followers.add(follower)
        follower.add_done_callback(self._followers.discard)
        return child

    def _refusal(self, answer: object) -> Exception:
        if isinstance(answer, Broken):
            return ConfigError(answer.reason) if answer.mistake else self._failed()
        self._deaths.note(age=0)
        name = self._start.name
        return ModelFailed(f"model '{name}' could not be loaded: its process died", retry_after=10)

    def _failed(self) -> ModelFailed:
        return ModelFailed(f"model '{self._start.name}' could not be loaded; the server's log says why", retry_after=10)

    async def _follow(self, child: ChildProcess) -> None:
        """Hand out what the child says until it dies, then start another."""
        born = time.monotonic()
        watch = asyncio.create_task(self._watch(child))
        try:
            await self._hand_out(child)
        except Exception:
            # Nobody listens to it any more: that is as good as a death.
            log.exception("model %s: what the engine's process said could not be handed out", self._start.name)
        finally:
            watch.cancel()
            self._child = self.progress = self.kv_used = None
            self._away_since = time.monotonic()
            await child.kill()
            alone = next(iter(child.asked.values())) if len(child.asked) == 1 else None
            child.bury()
        if self._stopped:
            return
        if alone is not None and child.process.returncode not in KILLED:
            self._fatal.note(alone)
        self._deaths.note(age=time.monotonic() - born)
        if self._deaths.count >= MOST_DEATHS and self._give_up(
            f"its process died {self._deaths.count} times soon after its start (exit {child.process.returncode})"
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

    async def _hand_out(self, child: ChildProcess) -> None:
        while isinstance(message := await child.read(), Step | PackedStep | Answer):
            child.deliver(message)
            if isinstance(message, Step | PackedStep):
                self.kv_used = message.kv_used

    def _give_up(self, reason: str) -> bool:
        """Whether there is somebody who makes another worker when there is need for one."""
        if self._given_up is None or self._stopped:
            return False
        self._reason = reason
        if self._starting is not None:
            # Somebody asked in the moment of its death: nobody would ever stop what comes of that.
            self._starting.cancel()
        self._given_up(reason)
        return True

    async def _watch(self, child: ChildProcess) -> None:
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
