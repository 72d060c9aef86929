"""The engine whose model runs somewhere else: in one place, or in several that share the work.

Rules
1. As long as nothing of a reply has reached our caller, a failure of a place is another place's chance: of a stream
   until the first word, of a reply that is handed over whole until its end. Then it begins again (`events`, rule 3).
2. A place that is not there when we start may come later: only a mistake of the configuration keeps us from starting.
   In the first `EARLY_SECONDS` one that could not be reached is looked for again and again, so that servers and their
   pool may be started at the same moment.
3. Closing a generation closes the connection to the place: it stops working on it.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import Self, TypeVar

import msgspec

from dragoman.client.call import PROTOCOLS
from dragoman.core import loop_guard
from dragoman.core.embeddings import Embedding, Input
from dragoman.core.engine import Engine, MakeVectors, ModelInfo
from dragoman.core.errors import (
    AnswerTimeout,
    BadRequest,
    ConfigError,
    DragomanError,
    ModelNotFound,
    NotFound,
    NotSupported,
    Unavailable,
    Unreachable,
)
from dragoman.core.events import Event, Finished, Listener, Started, Usage
from dragoman.core.request import GenerationRequest, Image, Sampling
from dragoman.core.urls import public, site
from dragoman.engines.upstream import error_mapping
from dragoman.engines.upstream.options import UpstreamOptions, key_of
from dragoman.engines.upstream.pool import PlaceState, Pool, Spot
from dragoman.engines.upstream.prefix_index import chain
from dragoman.engines.upstream.upstream_server import LOOK_SECONDS, Hearing, Place
from dragoman.pipeline.event_stream import read

FIRST_SECONDS = 1.0
"""How long a start waits until all servers have been looked at."""
EARLY_SECONDS = 30.0
EARLY_PAUSE = 0.25
log = logging.getLogger("dragoman.upstream")
T = TypeVar("T")

FEATURES = frozenset(
    {
        *("chat", "completion", "token_prompt", "infill", "count_tokens", "max_tokens", "usage"),
        *("images", "tools", "strict_tools", "constraint", "thinking", "embeddings"),
    }
)
BY_PROTOCOL = frozenset(Sampling.__struct_fields__) | {
    *("stop_token_ids", "ignore_eos", "logprobs", "documents", "service_tier")
}
"""What not every protocol has a word for."""


class UpstreamEngine(Engine):
    Options = UpstreamOptions
    streams_events = True
    calls_back = True
    device = "elsewhere"

    def __init__(self, name: str, options: UpstreamOptions, clock: Callable[[], float] = time.monotonic) -> None:
        self.name = name
        self.options = options
        self.slots = options.slots
        self.tells_calls = options.format is None
        given = options.places
        self._id = loop_guard.new_id()
        self.places = [Place(place, options, key_of(name, place), self._id) for place in given]
        self.pool = Pool([Spot(place.weight, place.rank) for place in given], clock)
        self._looking: asyncio.Task[None] | None = None
        self._looked: asyncio.Future[None]
        """Done when all have been looked at once."""

    @classmethod
    def configured(cls, name: str, options: msgspec.Struct) -> Self:
        assert isinstance(options, UpstreamOptions)
        return cls(name, options)

    def models(self) -> Sequence[ModelInfo]:
        form = self.options.format or "plain"
        if self.options.models is None:
            return [ModelInfo(self.name, context=self.options.context or self._context(), format=form)]
        offered = {model.name: model for place in self.places for model in place.models.values()}
        return [
            ModelInfo(f"{self.name}/{model.name}", context=self.options.context or model.context, format=form)
            for model in offered.values()
        ]

    def _context(self) -> int | None:
        names = ((place.model or self.name).lower() for place in self.places)
        found = (place.models.get(name) for place, name in zip(self.places, names, strict=True))
        return min((model.context for model in found if model and model.context), default=None)

    def supports(self) -> frozenset[str]:
        """What no place is known to lack; of what turns out later, a reply tells itself."""
        spoken = [place.talk.protocol for place in self.places]
        said = frozenset().union(*(PROTOCOLS[name].says if name else BY_PROTOCOL for name in spoken))
        return FEATURES | (BY_PROTOCOL & said)

    async def start(self) -> None:
        self._looked = asyncio.get_running_loop().create_future()
        self._looking = asyncio.create_task(self._look_on())
        # Whoever is slow is waited for only where nobody knows what there is without it.
        seconds = FIRST_SECONDS if self.options.models is None else None
        first: set[asyncio.Future[None]] = {self._looked, self._looking}
        await asyncio.wait(first, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if self._looking.done():
            self._looking.result()

    async def stop(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)
        await asyncio.gather(*(place.aclose() for place in self.places))

    async def _look_on(self) -> None:
        everywhere = range(len(self.places))
        await self._look_at(everywhere)
        self._looked.set_result(None)
        if not self.options.health_seconds:
            return
        await self._look_early()
        while True:
            await asyncio.sleep(self.options.health_seconds)
            await self._look_at(everywhere)

    async def _look_early(self) -> None:
        """Soon again at those that were not there, and at all others when it is time for that."""
        now = time.monotonic()
        until, due = now + EARLY_SECONDS, now + self.options.health_seconds
        while now < until and (missing := [at for at in range(len(self.places)) if self.pool.state(at) == "out"]):
            await asyncio.sleep(min(EARLY_PAUSE, self.options.health_seconds))
            now = time.monotonic()
            if now >= due:
                missing, due = list(range(len(self.places))), now + self.options.health_seconds
            await self._look_at(missing)

    async def _look_at(self, places: Iterable[int]) -> None:
        await asyncio.gather(*(self._look(at) for at in places))

    async def _look(self, at: int) -> None:
        """A place that answers at all is there; what it answers is another matter."""
        place, before = self.places[at], self.pool.state(at)
        try:
            async with asyncio.timeout(LOOK_SECONDS):
                await place.look()
        except Unreachable as error:
            self.pool.failed(at, unreached=True)
            if before == "up":
                log.warning("model %s: %s is not there: %s", self.name, place.url, error)
            return
        except (AnswerTimeout, TimeoutError):
            self._slow(at, before)
            return
        except DragomanError as error:
            place.redact(error)
            log.debug("model %s: %s tells no models: %s", self.name, place.url, error)
        self.pool.seen(at)
        if before == "out" and self.pool.state(at) != "out":
            log.warning("model %s: %s is back", self.name, place.url)
            place.forget()

    def _slow(self, at: int, before: str) -> None:
        """No proof of anything: to list models may take a busy server longer than to answer."""
        self.pool.slow(at)
        place, words = self.places[at], f"its list of models takes longer than {LOOK_SECONDS:g} s"
        if before == "up" and self.pool.state(at) == "out":
            log.warning("model %s: %s is not there: %s, and it answers nobody", self.name, place.url, words)
        elif self.pool.spots[at].slow_looks == 1:
            log.warning("model %s: %s is slow: %s; it is asked all the same", self.name, place.url, words)

    def generate(self, request: GenerationRequest) -> AsyncGenerator[Sequence[Event], None]:
        return read(lambda listener: self.tell(request, listener))

    async def tell(self, request: GenerationRequest, listener: Listener) -> None:
        loop_guard.check(self._id, request.model)
        self._check_name(request.model)
        self._check_images(request)
        if request.max_tokens == 0:
            pause = listener([Started(), Finished("length", usage=Usage())])
            if pause is not None:
                await pause
            return
        tried: set[int] = set()
        links = chain(request) if len(self.places) > 1 else []
        failure: DragomanError | None = None
        while True:
            at = self._next(links, tried, failure)
            tried.add(at)
            hearing = Hearing(listener, partial(self.pool.begun, at))
            try:
                await self.places[at].tell(self._over_there(request, at), hearing)
                self.pool.worked(at)
                return
            except DragomanError as error:
                if hearing.has_raised(error):
                    raise
                failure = self._noted(at, error, request.model, request.id)
                if (hearing.begun and request.delivery.stream) or error_mapping.is_callers(error):
                    raise failure from error
            finally:
                self.pool.ended(at, hearing.begun)

    def _next(self, links: Sequence[bytes], tried: set[int], failure: DragomanError | None) -> int:
        at = self.pool.choose(links, tried)
        if at is not None:
            return at
        # Whoever is the first to find the only server gone hears of it; all others that there is nobody to ask.
        is_news = isinstance(failure, Unreachable) and not self.pool.is_away
        if failure is not None and (is_news or not isinstance(failure, Unreachable)):
            raise failure
        words = "no server behind this model can be asked now; try again later"
        raise Unavailable(words, retry_after=self.pool.wait()) from failure

    def _noted(self, at: int, error: DragomanError, model: str, request: str = "") -> DragomanError:
        """What a failure means for the place, and the error that a caller hears of."""
        self.places[at].redact(error)
        seconds = error_mapping.rest(error)
        if seconds is not None:
            self.pool.rests(at, seconds)
        elif not error_mapping.is_callers(error):
            self.pool.failed(at, unreached=isinstance(error, Unreachable))
        return error_mapping.told(error, model, self.places[at].url, self.options.models is not None, request)

    def _over_there(self, request: GenerationRequest, at: int) -> GenerationRequest:
        """The request by the name that the model has there."""
        return _named(request, self._name(request.model, at))

    def _name(self, model: str, at: int) -> str:
        if self.options.models is None:
            return self.places[at].model or self.name
        wanted = model[len(self.name) + 1 :]
        found = self.places[at].models.get(wanted.lower())
        return wanted if found is None else found.name

    def _check_name(self, model: str) -> None:
        """Before a place is chosen: a name that is the caller's mistake is no place's failure."""
        if self.options.models is not None and not model[len(self.name) + 1 :]:
            words = f"'{self.name}' stands for several models: {', '.join(info.name for info in self.models()[:20])}"
            raise ModelNotFound(words, param="model")

    def _check_images(self, request: GenerationRequest) -> None:
        if self.options.image_urls:
            return
        for at, message in enumerate(request.messages):
            if any(_is_address(image) for image in message.images):
                words = "addresses of images are not passed on here; send the image itself, as a data: URL or base64"
                raise BadRequest(words, param=f"messages[{at}]")

    async def count_tokens(self, request: GenerationRequest) -> int:
        return await self._anywhere(
            "does not count its tokens", request.model, lambda place, model: place.count(_named(request, model))
        )

    async def embed(self, inputs: Sequence[Input]) -> Sequence[Embedding]:
        return await self._embed(self.name, inputs)

    def vectors_of(self, model: str) -> MakeVectors:
        return partial(self._embed, model)

    async def _embed(self, model: str, inputs: Sequence[Input]) -> Sequence[Embedding]:
        made = await self._anywhere("makes no embeddings", model, lambda place, name: place.embed(inputs, name))
        # Servers count the tokens of all inputs together.
        first, *others = made.vectors
        return [Embedding(first.vector, made.usage.prompt), *others]

    async def _anywhere(self, lacks: str, model: str, ask: Callable[[Place, str], Awaitable[T]]) -> T:
        """The answer of the first place that has one."""
        loop_guard.check(self._id, model)
        self._check_name(model)
        tried: set[int] = set()
        failure: DragomanError | None = None
        while True:
            at = self._next((), tried, failure)
            tried.add(at)
            try:
                answer = await ask(self.places[at], self._name(model, at))
                self.pool.worked(at)
                return answer
            except DragomanError as error:
                if type(error) is NotFound:
                    raise NotSupported(f"the server behind model '{model}' {lacks}") from error
                failure = self._noted(at, error, model)
                if error_mapping.is_callers(error):
                    raise failure from error
            finally:
                self.pool.ended(at)

    def states(self) -> list[PlaceState]:
        """The places, for the operator."""
        return [
            PlaceState(place.url, self.pool.state(at), spot.running, spot.failures, spot.weight, spot.rank)
            for at, (place, spot) in enumerate(zip(self.places, self.pool.spots, strict=True))
        ]

    def drain(self, url: str, drained: bool) -> None:
        """Nothing new goes to the place, or something goes there again."""
        wanted = site(url).api
        found = [at for at, place in enumerate(self.places) if place.talk.site.api == wanted]
        if not found:
            raise ConfigError(f"model {self.name} has no place {public(url)!r:.200}")
        self.pool.drain(found[0], drained)


def _named(request: GenerationRequest, model: str) -> GenerationRequest:
    """Variables of a chat template are not for callers to set."""
    return msgspec.structs.replace(request, model=model, template_options={})


def _is_address(image: Image) -> bool:
    return image.data is None and not (image.url or "").startswith("data:")
