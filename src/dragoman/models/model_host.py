"""An engine on its way from a wish to a running thing, and back.

Who uses an engine enters before and leaves afterwards: in between it stays loaded.
One whose process has died and is being started again is loading, as the first time, and keeps its place in memory.

One that could not be loaded is left alone for a while, longer each time until it has been there for a while: to load it
anew for every request would cost the others, and help nobody. An operator who wishes it loaded does not wait, and a new
configuration is a new beginning.
"""

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Literal, Protocol

from dragoman.config.quantities import shown_size
from dragoman.config.settings import Limits
from dragoman.core.engine import Engine
from dragoman.core.errors import ConfigError, DragomanError, ModelFailed, ModelLoading, QueueFull
from dragoman.formats import named
from dragoman.ipc.restart_backoff import YOUNG_SECONDS, Deaths
from dragoman.ipc.worker_engine import MOST_DEATHS, WorkerEngine
from dragoman.models.admission import Admission
from dragoman.models.process_memory import taken
from dragoman.models.residency import Seat

log = logging.getLogger("dragoman.models")

State = Literal["cold", "waiting", "loading", "ready", "unloading", "failed"]
STOP_SECONDS = 10.0
EXPECTED_SECONDS = 5.0
"""What loading takes, as long as nobody has seen it."""
SPEED_WEIGHT = 0.2
"""Of the newest generation in the average."""
FIRST_PAUSE = 5.0
LONGEST_PAUSE = 60.0
"""Between the failure to load a model and the next try that somebody's request, or a probe, brings about."""
NOT_LOADED = "the model could not be loaded; the server's log says why"

GivenUp = Callable[[str], None]
"""Is told why an engine will not come back by itself."""
Make = Callable[[GivenUp], Awaitable[Engine]]


class Lives(Protocol):
    """Who decides when a host loads and unloads."""

    def seat(self, host: "Host") -> Seat: ...

    def enter(self, host: "Host") -> bool: ...

    def ask(self, host: "Host") -> "asyncio.Future[None]": ...

    def give_up(self, host: "Host", ticket: "asyncio.Future[None]") -> None: ...

    def leave(self, host: "Host") -> None: ...

    def wish(self, host: "Host") -> None: ...

    def lost(self, host: "Host") -> None: ...

    def measured(self, host: "Host") -> None: ...


class Host:
    """`expect` tells, in a thread, how much memory it will need; `remember` is told how much it did. `written` is where
    and under which key somebody wrote it down."""

    def __init__(
        self,
        key: str,
        make: Make,
        lives: Lives,
        limits: Limits,
        slots: int | None = None,
        expect: Callable[[], int] = int,
        remember: Callable[[int], None] = lambda size: None,
        written: str | None = None,
    ) -> None:
        self.key = key
        self.expect = expect
        self.remember = remember
        self.written = written
        self.limits = limits
        self.engine: Engine | None = None
        self.supports: frozenset[str] = frozenset()
        self.is_known = False
        """Whether it has been loaded before, so that it is known what it supports."""
        self.failure: str | None = None
        self.memory = 0
        self.tokens_per_second: float | None = None
        self.admission = Admission(slots, limits.queue, limits.queue_seconds)
        self._make = make
        self._lives = lives
        self._coming: Engine | None = None
        self._begun = 0.0
        self._load_seconds = EXPECTED_SECONDS
        self._loaded_at = math.inf
        """When it came, if it has since it last failed."""
        self.forget_failures()
        self._awaiting = 0
        """Who waits for a process that is being started again."""

    def bound(self, limits: Limits) -> None:
        self.limits = limits
        self.admission.bound(limits.queue, limits.queue_seconds)

    @property
    def state(self) -> State:
        seat = self._lives.seat(self)
        if seat.state == "out":
            return "waiting" if seat.is_wanted else "failed" if self.failure else "cold"
        if seat.state == "in" and self.is_returning:
            return "loading"
        states: dict[str, State] = {"loading": "loading", "in": "ready", "leaving": "unloading"}
        return states[seat.state]

    @property
    def loading_seconds(self) -> float | None:
        """For how long it has been loading, where it is."""
        if self.state != "loading":
            return None
        away = self._away
        return time.monotonic() - self._begun if away is None else away.away_seconds

    @property
    def progress(self) -> float | None:
        """How much of it has been loaded, from 0 to 1, where its engine tells."""
        coming = self._coming or self._away
        return None if coming is None else coming.progress

    @property
    def is_returning(self) -> bool:
        """Whether it was there, and its process is being started again."""
        return self._away is not None

    @property
    def waiting(self) -> int:
        """How many wait for it to be loaded."""
        return len(self._lives.seat(self).waiting) + self._awaiting

    @property
    def _away(self) -> WorkerEngine | None:
        return self.engine if isinstance(self.engine, WorkerEngine) and self.engine.is_away else None

    @property
    def pid(self) -> int | None:
        return self.engine.pid if isinstance(self.engine, WorkerEngine) else None

    def enter_now(self) -> Engine | None:
        """The engine, if it is there for whoever asks; who got it must `leave`."""
        if self.engine is None or self._away is not None:
            return None
        return self.engine if self._lives.enter(self) else None

    async def enter(self) -> Engine:
        """The same after a while, or an error that says when to come again."""
        engine = self.enter_now()
        if engine is not None:
            return engine
        if self.state == "failed" and self._rests_until > time.monotonic():
            raise self.refusal()
        if not self.limits.load_seconds:
            self.load()
            raise self._still_loading()
        patience = time.monotonic() + self.limits.load_seconds
        await self._wait(self.limits.load_seconds)
        if self._away is not None:
            await self._wait_for(self._away, patience - time.monotonic())
        if self.engine is None:
            # It was lost in the moment in which it came.
            self.leave()
            raise ModelFailed(NOT_LOADED, retry_after=1)
        return self.engine

    async def _wait(self, seconds: float) -> None:
        room = self.limits.queue + (self.admission.slots or math.inf)
        if self.waiting >= room:
            raise QueueFull(f"the queue of this model is full ({self.limits.queue} requests wait); try again later")
        ticket = self._lives.ask(self)
        try:
            async with asyncio.timeout(seconds):
                await ticket
        except (asyncio.CancelledError, TimeoutError) as error:
            self._lives.give_up(self, ticket)
            if isinstance(error, TimeoutError):
                raise self._still_loading() from None
            raise

    async def _wait_for(self, engine: WorkerEngine, seconds: float) -> None:
        """Until its process is there again, for one who has entered."""
        self._awaiting += 1
        try:
            async with asyncio.timeout(seconds):
                await engine.back()
        except BaseException as error:
            self.leave()
            if isinstance(error, TimeoutError):
                raise self._still_loading() from None
            raise
        finally:
            self._awaiting -= 1

    def _still_loading(self) -> ModelLoading:
        left = self._load_seconds - (self.loading_seconds or 0)
        return ModelLoading("the model is still being loaded; try again later", retry_after=max(1.0, left))

    def refusal(self) -> ModelFailed:
        """For who asks for it while it cannot be loaded: when the next try may be made."""
        error = ModelFailed(NOT_LOADED, retry_after=max(1.0, self._rests_until - time.monotonic()))
        # The words are for the operator: they may name files. Who tells the caller tells the log.
        error.__cause__ = ConfigError(self.failure or "it could not be loaded")
        return error

    def forget_failures(self) -> None:
        """What kept it from being loaded may have been mended."""
        self._failures = Deaths(FIRST_PAUSE, LONGEST_PAUSE, first=FIRST_PAUSE)
        self._failed_at = -math.inf
        self._rests_until = -math.inf
        """Until when no request has it loaded again."""

    def leave(self) -> None:
        self._lives.leave(self)

    @asynccontextmanager
    async def engaged(self) -> AsyncIterator[Engine]:
        engine = self.enter_now() or await self.enter()
        try:
            yield engine
        finally:
            self.leave()

    async def ready(self) -> Engine:
        """The engine, loaded if need be, for one who only wants to know it."""
        async with self.engaged() as engine:
            return engine

    def load(self) -> None:
        """Begin to load it, if nobody has."""
        self._lives.wish(self)

    def load_again(self) -> None:
        """The same for one that has failed, for somebody who asks all the time: the pauses between tries grow."""
        if self.state == "failed" and time.monotonic() - self._failed_at >= self._failures.pause:
            self.load()

    def note_speed(self, tokens: int, seconds: float) -> None:
        if tokens > 1 and seconds > 0:
            speed, known = tokens / seconds, self.tokens_per_second
            self.tokens_per_second = speed if known is None else known + SPEED_WEIGHT * (speed - known)

    async def start(self) -> int:
        """Load it, and tell how much memory it takes."""
        self._begun = time.monotonic()
        log.info("model %s: loading", self.key)
        try:
            self._coming = engine = await self._make(self._given_up)
            await engine.start()
            for info in engine.models():
                named(info.format)
        except (Exception, asyncio.CancelledError) as error:
            if self._coming is not None:
                await stopped(self._coming)
            if isinstance(error, Exception):
                self.fail(error)
            raise
        finally:
            self._coming = None
        self.failure, self._rests_until, self._loaded_at = None, -math.inf, time.monotonic()
        self.engine = engine
        self.supports = engine.supports()
        self.is_known = True
        self.admission.resize(engine.slots)
        self.memory = await asyncio.to_thread(taken, self.pid)
        if self.engine is None:
            # It was given up meanwhile.
            raise ModelFailed(NOT_LOADED)
        self._load_seconds = time.monotonic() - self._begun
        log.info("model %s: ready after %.1f s, %s", self.key, self._load_seconds, shown_size(self.memory))
        return self.memory

    def fail(self, error: Exception) -> None:
        """It could not be loaded: the operator hears of it, whether somebody waits or not."""
        words = str(error) or type(error).__name__
        if self.written is not None and isinstance(error, ConfigError):
            key = self.written.rpartition(" ")[2]
            words = f"{self.written}: {words.removeprefix(f'{key}: ')}"
        self._note_failure(words)
        self._rests_until = self._failed_at + self._failures.pause
        # Only of what nobody foresaw is it worth knowing where it was raised.
        is_foreseen = isinstance(error, ConfigError | DragomanError | OSError)
        log.error("model %s: not loaded: %s", self.key, self.failure, exc_info=None if is_foreseen else error)

    def _note_failure(self, words: str) -> None:
        now = time.monotonic()
        # A worker is given up after several deaths: one that dies young each time is loaded as often in between.
        young = MOST_DEATHS * (YOUNG_SECONDS + self._load_seconds)
        self._failures.note(max(0.0, now - self._loaded_at), young)
        self.failure, self._failed_at, self._loaded_at = words, now, math.inf

    async def measure(self) -> int:
        """The memory it takes now; what it has once taken still counts when it has gone."""
        now = await asyncio.to_thread(taken, self.pid)
        if now > self.memory:
            self.memory = now
            self._lives.measured(self)
        return now

    async def end(self) -> None:
        engine, self.engine = self.engine, None
        if engine is not None:
            await stopped(engine)

    def _given_up(self, reason: str) -> None:
        self._note_failure(reason)
        self.engine = None
        log.error("model %s: %s", self.key, reason)
        self._lives.lost(self)


async def stopped(engine: Engine) -> None:
    """An engine that does not end, or fails to, must not keep the server from ending."""
    try:
        async with asyncio.timeout(STOP_SECONDS):
            await engine.stop()
    except TimeoutError:
        log.error("an engine (%s) did not stop within %g s", type(engine).__name__, STOP_SECONDS)
    except Exception:
        log.exception("an engine (%s) failed to stop", type(engine).__name__)
