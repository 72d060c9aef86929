"""One server: how it is asked, what it has refused, what it offers."""

from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import httpx
import msgspec

from dragoman.client import http_settings, rest_calls
from dragoman.client.async_transport import Answer, Line
from dragoman.client.call import COMPLETIONS, PROTOCOLS, Exchange, Spoken
from dragoman.client.planner import Call, Talk
from dragoman.client.rest_calls import Made, Model
from dragoman.core import loop_guard
from dragoman.core.embeddings import Input
from dragoman.core.errors import DragomanError, MethodNotAllowed, NotFound, NotSupported
from dragoman.core.events import Event, Finished, Listener, Started
from dragoman.core.request import GenerationRequest
from dragoman.core.urls import find_secrets, public, redact_secrets
from dragoman.engines.upstream.http_transport import Wire
from dragoman.engines.upstream.options import PlaceOptions, UpstreamOptions
from dragoman.engines.upstream.refused_fields import ESSENTIAL, blamed
from dragoman.engines.upstream.request_fitting import fitted, not_taken

MOST_REFUSALS = 8
LOOK_SECONDS = 5.0
AS_IT_IS = {"accept-encoding": "identity"}
"""What is compressed on the way to us costs more than it spares."""
NO_ROUTE = (NotFound, MethodNotAllowed)
UNCOUNTED = "the server behind this model does not say how many tokens it used"


class Way(msgspec.Struct, frozen=True):
    """One way to put a request, and what of it is not said."""

    call: Call
    ignored: tuple[str, ...]


class Hearing:
    """A listener, and what it hears beside the words of a place: what was left out, and that nobody counted."""

    def __init__(self, listener: Listener, begin: Callable[[], None]) -> None:
        self.begun = False
        self._begin = begin
        self.ignored: tuple[str, ...] = ()
        self._listener = listener
        self._raised: DragomanError | None = None

    def __call__(self, events: Sequence[Event]) -> Awaitable[None] | None:
        if not self.begun:
            self.begun = True
            self._begin()
            events = _told(events, self.ignored)
        elif type(events[-1]) is Finished:
            events = _told(events, self.ignored)
        try:
            return self._listener(events)
        except DragomanError as error:
            self._raised = error
            raise

    def has_raised(self, error: DragomanError) -> bool:
        """Whether it is the listener's error, and not that of a place."""
        return error is self._raised


class Place:
    def __init__(self, place: PlaceOptions, options: UpstreamOptions, key: str | None, asker: str) -> None:
        self.url = public(place.url)
        self.model = place.model
        self.talk = Talk(place.url, api_key=key, protocol=place.protocol or "auto", retries=0, extra_headers=AS_IT_IS)
        self.models: dict[str, Model] = {}
        """What it offers, as far as that is known, by name in lower case."""
        settings = http_settings.settings(self.talk.site, options.silence_seconds, options.connect_seconds)
        settings |= {"trust_env": False, "event_hooks": {"request": [partial(_sign, asker)]}}
        # A proxy has ways of its own, which httpx knows.
        settings |= {"transport": Wire()} if options.proxy is None else {"proxy": options.proxy}
        if options.proxy is not None and self.talk.site.is_tls:
            # Of the environment's only whom it believes, as without a proxy.
            settings |= {"verify": httpx.create_ssl_context()}
        self._line = Line(self.talk, httpx.AsyncClient(**settings))
        self._refused: defaultdict[str, set[str]] = defaultdict(set)
        """By model, what it does not take."""
        self._secrets = find_secrets(place.url, key)

    def redact(self, error: DragomanError) -> None:
        """Hide the credentials that were sent to this server, in case its error repeats them."""
        error.message = redact_secrets(error.message, self._secrets)
        error.args = (error.message,)
        if error.param is not None:
            error.param = redact_secrets(error.param, self._secrets)

    async def aclose(self) -> None:
        await self._line.aclose()

    def forget(self) -> None:
        """It was away, and may have come back as something else."""
        self._refused.clear()

    async def look(self) -> None:
        """Whether it is there, and what it offers."""
        body = await self._line.json("models", [rest_calls.models_call(self.talk)])
        self.models = {model.name.lower(): model for model in rest_calls.read_models(body).models}

    async def tell(self, request: GenerationRequest, hearing: Hearing) -> None:
        way, arrived = await self._asked(request)
        assert way.call.exchange is not None
        hearing.ignored = way.ignored
        await self._line.tell(way.call.exchange, arrived, hearing)

    async def _asked(self, request: GenerationRequest) -> tuple[Way, Answer]:
        """The answer, after whatever the place does not take has been left out."""
        refused = self._refused[request.model]
        for _ in range(MOST_REFUSALS):
            ways = self._ways(request, refused)
            try:
                call, arrived = await self._line.open(_topic(request), [way.call for way in ways])
            except NO_ROUTE as error:
                if type(error) in NO_ROUTE and request.prompts:
                    raise not_taken(request, "completion") from error
                raise
            except DragomanError as error:
                name = blamed(error, _fields(ways))
                if name is None or name in refused:
                    raise
                refused.add(name)
                if name in ESSENTIAL:
                    raise not_taken(request, name) from error
                continue
            return next(way for way in ways if way.call is call), arrived
        raise NotSupported("the server behind this model takes none of what was asked")

    def _ways(self, request: GenerationRequest, refused: set[str]) -> list[Way]:
        if request.prompts:
            return [self._way(COMPLETIONS, request, refused)]
        ways: list[Way] = []
        unsaid: NotSupported | None = None
        for name in self.talk.names():
            try:
                ways.append(self._way(PROTOCOLS[name], request, refused))
            except NotSupported as error:
                unsaid = unsaid or error
        if not ways and unsaid is not None:
            raise unsaid
        return ways

    def _way(self, protocol: Spoken, request: GenerationRequest, refused: set[str]) -> Way:
        fit = fitted(request, protocol, refused)
        exchange = Exchange(protocol, fit.request, stream=True, check_calls=False)
        if "stream_options" in refused:
            exchange.body.pop("stream_options", None)
        return Way(self.talk.question(protocol.name, exchange, stream=True), fit.ignored)

    async def embed(self, inputs: Sequence[Input], model: str) -> Made:
        body = await self._line.json("embeddings", [rest_calls.embeddings_call(self.talk, inputs, model, None)])
        return rest_calls.read_embeddings(body, len(inputs))

    async def count(self, request: GenerationRequest) -> int:
        plain = msgspec.structs.replace(request, labels={})
        return rest_calls.read_count(await self._line.json("count", rest_calls.count_calls(self.talk, plain)))


async def _sign(asker: str, request: httpx.Request) -> None:
    request.headers[loop_guard.HEADER] = loop_guard.signed(asker)


def _topic(request: GenerationRequest) -> str:
    return "completions" if request.prompts else "generate"


def _fields(ways: Sequence[Way]) -> set[str]:
    exchanges = (way.call.exchange for way in ways)
    return {field for exchange in exchanges if exchange is not None for field in exchange.body}


def _told(events: Sequence[Event], ignored: tuple[str, ...]) -> Sequence[Event]:
    first, last = events[0], events[-1]
    if ignored and type(first) is Started:
        events = [msgspec.structs.replace(first, ignored=ignored), *events[1:]]
    if type(last) is Finished and last.usage is None:
        events = [*events[:-1], msgspec.structs.replace(last, warnings=(*last.warnings, UNCOUNTED))]
    return events
