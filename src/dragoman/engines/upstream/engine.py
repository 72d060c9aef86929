"""The engine for a model that runs on other servers: one, or several that share the load.

Rules
1. A request that fails before any part of the reply has reached the client is retried on another server: a streamed
   reply until its first event, a complete reply until its end.
2. A server that is unreachable at start may become available later; only configuration errors prevent the start.
   During the first STARTUP_SECONDS unreachable servers are probed frequently, so that servers and their pool may be
   started at the same time.
3. Closing a generation closes the connection, which cancels the generation on the server.
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
from dragoman.core.engine import EmbedFunction, Engine, ModelInfo
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
from dragoman.core.urls import parse_address, remove_credentials
from dragoman.engines.upstream import error_mapping
from dragoman.engines.upstream.options import UpstreamOptions, read_api_key
from dragoman.engines.upstream.pool import PoolMember, ServerPool, UpstreamState
from dragoman.engines.upstream.prefix_index import hash_prefixes
from dragoman.engines.upstream.upstream_server import PROBE_SECONDS, TrackedListener, UpstreamServer
from dragoman.pipeline.event_stream import pull_events

FIRST_PROBE_SECONDS = 1.0
"""How long `start` waits for the first probe of all servers."""
STARTUP_SECONDS = 30.0
STARTUP_PROBE_INTERVAL = 0.25
log = logging.getLogger("dragoman.upstream")
T = TypeVar("T")

FEATURES = frozenset(
    {
        *("chat", "completion", "token_prompt", "infill", "count_tokens", "max_tokens", "usage"),
        *("images", "tools", "strict_tools", "constraint", "thinking", "embeddings"),
    }
)
PROTOCOL_FEATURES = frozenset(Sampling.__struct_fields__) | {
    *("stop_token_ids", "ignore_eos", "logprobs", "documents", "service_tier")
}
"""Features that only some protocols have."""


class UpstreamEngine(Engine):
    Options = UpstreamOptions
    emits_events = True
    is_push_based = True
    device = "elsewhere"

    def __init__(self, name: str, options: UpstreamOptions, clock: Callable[[], float] = time.monotonic) -> None:
        self.name = name
        self.options = options
        self.slots = options.slots
        self.emits_tool_calls = options.format is None
        self._id = loop_guard.new_id()
        self.servers = [
            UpstreamServer(server, options, read_api_key(name, server), self._id) for server in options.places
        ]
        self.pool = ServerPool([PoolMember(server.weight, server.rank) for server in options.places], clock)
        self._prober: asyncio.Task[None] | None = None
        self._first_probe: asyncio.Future[None]
        """Done when all servers have been probed once."""

    @classmethod
    def configured(cls, name: str, options: msgspec.Struct) -> Self:
        assert isinstance(options, UpstreamOptions)
        return cls(name, options)

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
            *(PROTOCOLS[name].supported_fields if name else PROTOCOL_FEATURES for name in protocols)
        )
        return FEATURES | (PROTOCOL_FEATURES & known)

    async def start(self) -> None:
        self._first_probe = asyncio.get_running_loop().create_future()
        self._prober = asyncio.create_task(self._probe_forever())
        # With `models: all` the model list is needed, so wait for the slowest server.
        timeout = FIRST_PROBE_SECONDS if self.options.models is None else None
        first: set[asyncio.Future[None]] = {self._first_probe, self._prober}
        await asyncio.wait(first, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        if self._prober.done():
            self._prober.result()

    async def stop(self) -> None:
        if self._prober is not None:
            self._prober.cancel()
            await asyncio.gather(self._prober, return_exceptions=True)
        await asyncio.gather(*(server.aclose() for server in self.servers))

    async def _probe_forever(self) -> None:
        every_server = range(len(self.servers))
        await self._probe_all(every_server)
        self._first_probe.set_result(None)
        if not self.options.health_seconds:
            return
        await self._probe_startup()
        while True:
            await asyncio.sleep(self.options.health_seconds)
            await self._probe_all(every_server)

    async def _probe_startup(self) -> None:
        """Probe unreachable servers frequently, and all servers every `health_seconds`."""
        now = time.monotonic()
        end, next_full_probe = now + STARTUP_SECONDS, now + self.options.health_seconds
        while now < end and (missing := [at for at in range(len(self.servers)) if self.pool.state(at) == "out"]):
            await asyncio.sleep(min(STARTUP_PROBE_INTERVAL, self.options.health_seconds))
            now = time.monotonic()
            if now >= next_full_probe:
                missing, next_full_probe = list(range(len(self.servers))), now + self.options.health_seconds
            await self._probe_all(missing)

    async def _probe_all(self, servers: Iterable[int]) -> None:
        await asyncio.gather(*(self._probe(at) for at in servers))

    async def _probe(self, at: int) -> None:
        """Probe one server. Any answer, even an error, shows that it is reachable."""
        server, before = self.servers[at], self.pool.state(at)
        try:
            async with asyncio.timeout(PROBE_SECONDS):
                await server.probe()
        except Unreachable as error:
            self.pool.record_failure(at, is_unreachable=True)
            if before == "up":
                log.warning("model %s: %s is unreachable: %s", self.name, server.url, error)
            return
        except (AnswerTimeout, TimeoutError):
            self._record_slow_probe(at, before)
            return
        except DragomanError as error:
            server.redact(error)
            log.debug("model %s: %s does not list its models: %s", self.name, server.url, error)
        self.pool.record_probe(at)
        if before == "out" and self.pool.state(at) != "out":
            log.warning("model %s: %s is reachable again", self.name, server.url)
            server.forget_rejections()

    def _record_slow_probe(self, at: int, before: str) -> None:
        """A busy server may answer requests faster than it lists its models, so a slow probe alone proves little."""
        self.pool.record_slow_probe(at)
        url, problem = self.servers[at].url, f"listing its models takes longer than {PROBE_SECONDS:g} s"
        if before == "up" and self.pool.state(at) == "out":
            log.warning("model %s: %s is unreachable: %s, and no request succeeded", self.name, url, problem)
        elif self.pool.members[at].slow_probes == 1:
            log.warning("model %s: %s is slow: %s; requests are still sent to it", self.name, url, problem)

    def generate(self, request: GenerationRequest) -> AsyncGenerator[Sequence[Event], None]:
        return pull_events(lambda listener: self.tell(request, listener))

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
        links = hash_prefixes(request) if len(self.servers) > 1 else []
        failure: DragomanError | None = None
        while True:
            at = self._choose_server(links, tried, failure)
            tried.add(at)
            tracked = TrackedListener(listener, partial(self.pool.record_reply_start, at))
            try:
                await self.servers[at].generate(_for_server(request, self._upstream_name(request.model, at)), tracked)
                self.pool.record_success(at)
                return
            except DragomanError as error:
                if tracked.has_raised(error):
                    raise
                failure = self._record_error(at, error, request.model, request.id)
                if (tracked.has_begun and request.delivery.stream) or error_mapping.is_client_error(error):
                    raise failure from error
            finally:
                self.pool.ended(at, tracked.has_begun)

    def _choose_server(self, links: Sequence[bytes], tried: set[int], failure: DragomanError | None) -> int:
        at = self.pool.choose(links, tried)
        if at is not None:
            return at
        # The first request that finds the only server unreachable gets that error; later ones get a 503.
        is_new = isinstance(failure, Unreachable) and not self.pool.is_known_unreachable
        if failure is not None and (is_new or not isinstance(failure, Unreachable)):
            raise failure
        message = "no upstream server of this model is available; try again later"
        raise Unavailable(message, retry_after=self.pool.seconds_until_available()) from failure

    def _record_error(self, at: int, error: DragomanError, model: str, request_id: str = "") -> DragomanError:
        """Record the failure of a server and return the error for the client."""
        server = self.servers[at]
        server.redact(error)
        seconds = error_mapping.pause_seconds(error)
        if seconds is not None:
            self.pool.pause(at, seconds)
        elif not error_mapping.is_client_error(error):
            self.pool.record_failure(at, is_unreachable=isinstance(error, Unreachable))
        return error_mapping.to_client_error(error, model, server.url, self.options.models is not None, request_id)

    def _upstream_name(self, model: str, at: int) -> str:
        """The name of the model on the server."""
        if self.options.models is None:
            return self.servers[at].model or self.name
        name = model[len(self.name) + 1 :]
        found = self.servers[at].models.get(name.lower())
        return name if found is None else found.name

    def _check_name(self, model: str) -> None:
        """Reject an incomplete name before a server is chosen, so that no server is blamed for it."""
        if self.options.models is not None and not model[len(self.name) + 1 :]:
            names = ", ".join(info.name for info in self.models()[:20])
            raise ModelNotFound(f"'{self.name}' stands for several models: {names}", param="model")

    def _check_images(self, request: GenerationRequest) -> None:
        if self.options.image_urls:
            return
        for at, message in enumerate(request.messages):
            if any(_is_remote(image) for image in message.images):
                text = "image URLs are not passed on to this model's server; send the image as a data: URL or base64"
                raise BadRequest(text, param=f"messages[{at}]")

    async def count_tokens(self, request: GenerationRequest) -> int:
        return await self._call_any(
            "does not count tokens", request.model, lambda server, name: server.count_tokens(_for_server(request, name))
        )

    async def embed(self, inputs: Sequence[Input]) -> Sequence[Embedding]:
        return await self._embed(self.name, inputs)

    def embed_function_for(self, model: str) -> EmbedFunction:
        return partial(self._embed, model)

    async def _embed(self, model: str, inputs: Sequence[Input]) -> Sequence[Embedding]:
        made = await self._call_any(
            "does not support embeddings", model, lambda server, name: server.embed(inputs, name)
        )
        # Servers report the tokens of all inputs together.
        first, *others = made.vectors
        return [Embedding(first.vector, made.usage.prompt), *others]

    async def _call_any(self, lacks: str, model: str, call: Callable[[UpstreamServer, str], Awaitable[T]]) -> T:
        """Call the servers until one succeeds."""
        loop_guard.check(self._id, model)
        self._check_name(model)
        tried: set[int] = set()
        failure: DragomanError | None = None
        while True:
            at = self._choose_server((), tried, failure)
            tried.add(at)
            try:
                result = await call(self.servers[at], self._upstream_name(model, at))
                self.pool.record_success(at)
                return result
            except DragomanError as error:
                if type(error) is NotFound:
                    raise NotSupported(f"the upstream server of model '{model}' {lacks}") from error
                failure = self._record_error(at, error, model)
                if error_mapping.is_client_error(error):
                    raise failure from error
            finally:
                self.pool.ended(at)

    def states(self) -> list[UpstreamState]:
        """The state of each server, for the operator."""
        return [
            UpstreamState(server.url, self.pool.state(at), spot.running, spot.failures, spot.weight, spot.rank)
            for at, (server, spot) in enumerate(zip(self.servers, self.pool.members, strict=True))
        ]

    def drain(self, url: str, drained: bool) -> None:
        """Stop or resume sending requests to a server."""
        address = parse_address(url).api
        found = [at for at, server in enumerate(self.servers) if server.planner.address.api == address]
        if not found:
            raise ConfigError(f"model {self.name} has no server {remove_credentials(url)!r:.200}")
        self.pool.drain(found[0], drained)


def _for_server(request: GenerationRequest, model: str) -> GenerationRequest:
    """The request with the server's model name and without template options, which clients may not set there."""
    return msgspec.structs.replace(request, model=model, template_options={})


def _is_remote(image: Image) -> bool:
    return image.data is None and not (image.url or "").startswith("data:")
