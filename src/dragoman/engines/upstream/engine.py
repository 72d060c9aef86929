"""The engine for a model that runs on other servers: one, or several that share the load.

Rules
1. A request that fails before any part of the reply has reached the client is retried on another server: a streamed
   reply until its first event, a complete reply until its end.
2. A server that is unreachable at start may become available later; only configuration errors prevent the start.
3. Closing a generation closes the connection, which cancels the generation on the server.
4. Errors of a server decide about retries:

    client error         400, 413, 422, 501                     passed on with its message; not retried
    overload             429, 503, 529                          retried elsewhere; else passed on with Retry-After
    configuration error  401, 403, 402, 404, 3xx                retried; else 502, because the client's key is valid
    server error         5xx, no answer, malformed, cut off     retried; else 502 or 504

   Details go to the log: the client sees neither addresses nor messages of failing servers.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Self, TypeVar

import msgspec

from dragoman.core import loop_guard
from dragoman.core.embeddings import Embedding, Input
from dragoman.core.engine import Engine, ModelInfo
from dragoman.core.errors import (
    AnswerTimeout,
    BadAnswer,
    BadRequest,
    ConfigError,
    DragomanError,
    LoopDetected,
    ModelNotFound,
    NotFound,
    NotSupported,
    QuotaExhausted,
    RateLimited,
    ResourceUnavailable,
    ServerFailed,
    StreamCutOff,
    TooLarge,
    Unavailable,
    Unreachable,
)
from dragoman.core.events import Finished, Listener, Started, Usage, notify
from dragoman.core.features import SAMPLING_FEATURES, Feature
from dragoman.core.request import GenerationRequest
from dragoman.core.urls import parse_address, remove_credentials
from dragoman.engines.upstream.health import HealthProber
from dragoman.engines.upstream.options import UpstreamOptions, find_key_error, read_api_key
from dragoman.engines.upstream.pool import ServerPool, UpstreamState, hash_prefixes
from dragoman.engines.upstream.server import TrackedListener, UpstreamServer
from dragoman.protocols.registry import CLIENT_PROTOCOLS

FIRST_PROBE_SECONDS = 1.0
"""How long `start` waits for the first probe of all servers."""
log = logging.getLogger("dragoman.upstream")
T = TypeVar("T")

CLIENT_ERRORS = (BadRequest, TooLarge, NotSupported)
MIN_PAUSE_SECONDS = 1.0
MAX_RETRY_AFTER = 3600.0
"""The longest `Retry-After` of a server that is applied and passed on."""
SERVER = "the upstream server of this model"
CLIENT_MESSAGES: Mapping[type[DragomanError], str] = {
    LoopDetected: f"{SERVER} leads back to the model itself; the operator must correct its address",
    AnswerTimeout: f"{SERVER} did not answer in time",
    StreamCutOff: f"{SERVER} ended its reply early",
    **dict.fromkeys((Unreachable, ServerFailed, BadAnswer), f"{SERVER} is unreachable or failed; see the server log"),
}
"""The message for the client by the first class that an error belongs to."""

FEATURES = frozenset(
    {
        *(Feature.CHAT, Feature.COMPLETION, Feature.TOKEN_PROMPT, Feature.INFILL, Feature.IMAGES, Feature.EMBEDDINGS),
        *(Feature.COUNT_TOKENS, Feature.MAX_TOKENS, Feature.USAGE),
        *(Feature.TOOLS, Feature.STRICT_TOOLS, Feature.CONSTRAINT, Feature.THINKING),
    }
)
PROTOCOL_FEATURES = SAMPLING_FEATURES | {
    *(Feature.STOP_TOKEN_IDS, Feature.IGNORE_EOS, Feature.LOGPROBS, Feature.DOCUMENTS, Feature.SERVICE_TIER),
    Feature.PREFILL,
}
"""Features that only some protocols have."""


class UpstreamEngine(Engine):
    Options = UpstreamOptions
    runs_elsewhere = True
    device = "elsewhere"

    def __init__(self, name: str, options: UpstreamOptions) -> None:
        self.name = name
        self.options = options
        self.slots = options.slots
        self.emits_tool_calls = options.format is None
        self._id = loop_guard.new_id()
        self.servers = [UpstreamServer(server, options, read_api_key(server), self._id) for server in options.servers]
        self.pool = ServerPool(self.servers)
        self._health = HealthProber(name, self.pool, options.health_seconds)
        self._prober: asyncio.Task[None] | None = None

    @classmethod
    def configured(cls, name: str, options: msgspec.Struct) -> Self:
        assert isinstance(options, UpstreamOptions)
        return cls(name, options)

    @classmethod
    def find_option_errors(cls, options: msgspec.Struct) -> Sequence[tuple[str, str]]:
        assert isinstance(options, UpstreamOptions)
        return [("", message) for server in options.servers if (message := find_key_error(server)) is not None]

    def models(self) -> Sequence[ModelInfo]:
        syntax = self.options.format or "plain"
        if self.options.models is None:
            return [ModelInfo(self.name, context=self.options.context or self._context(), format=syntax)]
        offered = {model.name: model for server in self.servers for model in server.models.values()}
        return [
            ModelInfo(f"{self.name}/{model.name}", context=self.options.context or model.context, format=syntax)
            for model in offered.values()
        ]

    def _context(self) -> int | None:
        models = (server.models.get((server.model or self.name).lower()) for server in self.servers)
        return min((model.context for model in models if model and model.context), default=None)

    def supports(self) -> frozenset[str]:
        """Features that the protocols of the servers have. A reply reports what a server rejects."""
        protocols = [server.planner.protocol for server in self.servers]
        known = frozenset().union(
            *(CLIENT_PROTOCOLS[name].supported_fields if name else PROTOCOL_FEATURES for name in protocols)
        )
        return FEATURES | (PROTOCOL_FEATURES & known)

    async def start(self) -> None:
        first = asyncio.create_task(self._health.probe_all())
        self._prober = asyncio.create_task(self._health.probe_forever(first))
        # With `models: all` the model list is needed, so wait for the slowest server.
        await asyncio.wait({first}, timeout=FIRST_PROBE_SECONDS if self.options.models is None else None)
        if first.done():
            first.result()

    async def stop(self) -> None:
        if self._prober is not None:
            self._prober.cancel()
            await asyncio.gather(self._prober, return_exceptions=True)
        await asyncio.gather(*(server.aclose() for server in self.servers))

    async def deliver(self, request: GenerationRequest, listener: Listener) -> None:
        self._check_model(request.model)
        self._check_images(request)
        if request.max_tokens == 0:
            await notify(listener, [Started(), Finished("length", usage=Usage())])
            return

        async def generate(server: UpstreamServer, model: str, tracked: TrackedListener) -> None:
            await server.generate(_for_server(request, model), tracked)

        await self._try_servers(request.model, generate, request, listener)

    async def _try_servers(
        self,
        model: str,
        call: Callable[[UpstreamServer, str, TrackedListener], Awaitable[T]],
        request: GenerationRequest | None = None,
        listener: Listener = lambda events: None,
    ) -> T:
        """Call the servers until one succeeds."""
        tried: set[UpstreamServer] = set()
        links = hash_prefixes(request) if request is not None and len(self.servers) > 1 else []
        failure: DragomanError | None = None
        while True:
            server = self._choose_server(links, tried, failure)
            tried.add(server)
            tracked = TrackedListener(listener, partial(self.pool.record_reply_start, server))
            try:
                result = await call(server, self._upstream_name(model, server), tracked)
                self.pool.record_success(server)
                return result
            except DragomanError as error:
                if tracked.has_raised(error):
                    raise
                failure = self._record_error(server, error, model, "" if request is None else request.id)
                is_visible = tracked.has_begun and request is not None and request.delivery.stream
                if is_visible or isinstance(error, CLIENT_ERRORS):
                    raise failure from error
            finally:
                self.pool.ended(server, tracked.has_begun)

    def _choose_server(
        self, links: Sequence[bytes], tried: set[UpstreamServer], failure: DragomanError | None
    ) -> UpstreamServer:
        server = self.pool.choose(links, tried)
        if server is not None:
            return server
        # The first request that finds the only server unreachable gets that error; later ones get a 503.
        is_new = isinstance(failure, Unreachable) and not self.pool.is_known_unreachable
        if failure is not None and (is_new or not isinstance(failure, Unreachable)):
            raise failure
        message = "no upstream server of this model is available; try again later"
        raise Unavailable(message, retry_after=self.pool.seconds_until_available()) from failure

    def _record_error(self, server: UpstreamServer, error: DragomanError, model: str, request_id: str) -> DragomanError:
        """Record and log the failure of a server, and return the error for the client."""
        server.redact(error)
        if isinstance(error, CLIENT_ERRORS):
            # Retrying an invalid request does not help.
            error.retry_after = None
            return error
        prefix, extra = (f"request {request_id}: ", {"request_id": request_id}) if request_id else ("", {})
        kind = type(error).__name__
        log.warning("%smodel %s: %s: %s (%s)", prefix, model, server.url, error.message, kind, extra=extra)
        if isinstance(error, ResourceUnavailable):
            # The server answers, and may still serve interactive requests.
            self.pool.record_success(server)
            message = f"{SERVER} has no room for batch requests; try again later"
            return ResourceUnavailable(message, retry_after=error.retry_after or MIN_PAUSE_SECONDS)
        seconds = _pause_seconds(error)
        if seconds is None:
            self.pool.record_failure(server, is_unreachable=isinstance(error, Unreachable))
        else:
            self.pool.pause(server, seconds)
        # With `models: all` the client chose one of the server's own models.
        if isinstance(error, ModelNotFound) and self.options.models is not None:
            return ModelNotFound(f"model '{model}' not found", param="model")
        return _to_client_error(error, seconds)

    def _upstream_name(self, model: str, server: UpstreamServer) -> str:
        """The name of the model on the server."""
        if self.options.models is None:
            return server.model or self.name
        name = model[len(self.name) + 1 :]
        found = server.models.get(name.lower())
        return name if found is None else found.name

    def _check_model(self, model: str) -> None:
        """Reject loops, and incomplete names before a server is chosen, so that no server is blamed for them."""
        loop_guard.check(self._id, model)
        if self.options.models is not None and not model[len(self.name) + 1 :]:
            names = ", ".join(info.name for info in self.models()[:20])
            raise ModelNotFound(f"'{self.name}' stands for several models: {names}", param="model")

    def _check_images(self, request: GenerationRequest) -> None:
        if self.options.image_urls:
            return
        for at, message in enumerate(request.messages):
            if any(image.data is None and not (image.url or "").startswith("data:") for image in message.images):
                text = "image URLs are not passed on to this model's server; send the image as a data: URL or base64"
                raise BadRequest(text, param=f"messages[{at}]")

    async def count_tokens(self, request: GenerationRequest) -> int:
        return await self._ask(
            "does not count tokens", request.model, lambda server, name: server.count_tokens(_for_server(request, name))
        )

    async def embed(self, inputs: Sequence[Input]) -> Sequence[Embedding]:
        return await self.embed_function_for(self.name)(inputs)

    def embed_function_for(self, model: str) -> Callable[[Sequence[Input]], Awaitable[Sequence[Embedding]]]:
        async def embed(inputs: Sequence[Input]) -> Sequence[Embedding]:
            vectors, usage = await self._ask(
                "does not support embeddings", model, lambda server, name: server.embed(inputs, name)
            )
            # Servers report the tokens of all inputs together.
            first, *others = vectors
            return [Embedding(first.vector, usage.prompt), *others]

        return embed

    async def _ask(self, lacks: str, model: str, ask: Callable[[UpstreamServer, str], Awaitable[T]]) -> T:
        async def call(server: UpstreamServer, name: str, tracked: TrackedListener) -> T:
            try:
                return await ask(server, name)
            except NotFound as error:
                if type(error) is not NotFound:
                    raise
                raise NotSupported(f"the upstream server of model '{model}' {lacks}") from error

        self._check_model(model)
        return await self._try_servers(model, call)

    def states(self) -> list[UpstreamState]:
        """The state of each server, for the operator."""
        return [
            UpstreamState(
                server.url, self.pool.state(server), server.running, server.failures, server.weight, server.rank
            )
            for server in self.servers
        ]

    def drain(self, url: str, drained: bool) -> None:
        """Stop or resume sending requests to a server."""
        address = parse_address(url).api
        server = next((server for server in self.servers if server.planner.address.api == address), None)
        if server is None:
            raise ConfigError(f"model {self.name} has no server {remove_credentials(url)!r:.200}")
        server.is_drained = drained


def _for_server(request: GenerationRequest, model: str) -> GenerationRequest:
    """The request with the server's model name and without template options, which clients may not set there."""
    return msgspec.structs.replace(request, model=model, template_options={})


def _pause_seconds(error: DragomanError) -> float | None:
    """How long the server asks not to be used; None for errors other than overload."""
    if isinstance(error, Unavailable) or (isinstance(error, RateLimited) and not isinstance(error, QuotaExhausted)):
        return MIN_PAUSE_SECONDS if error.retry_after is None else min(error.retry_after, MAX_RETRY_AFTER)
    return None


def _to_client_error(error: DragomanError, pause_seconds: float | None) -> DragomanError:
    """Return the error for the client, without details of the server."""
    if pause_seconds is not None:
        message, retry_after = f"{SERVER} is overloaded; try again later", max(pause_seconds, MIN_PAUSE_SECONDS)
        overloaded = type(error) if isinstance(error, Unavailable) else RateLimited
        return overloaded(message, retry_after=retry_after)
    for kind, message in CLIENT_MESSAGES.items():
        if isinstance(error, kind):
            return kind(message)
    return ServerFailed(f"{SERVER} refused the request; see the server log")
