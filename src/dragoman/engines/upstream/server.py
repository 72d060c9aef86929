"""One upstream server: requests to it, the features it has rejected, and its models.

A server may reject a field, for example:

    400 "Unsupported parameter: 'temperature' …"     OpenAI            422 [{"loc": ["body", "seed"], …}]     FastAPI
    400 "… does not support tools"                   Ollama            500 "tools param requires --jinja"     llama.cpp

Rules
1. An optional field is omitted from then on and reported as ignored, under the name the client used.
2. Stop strings are omitted without a report, because the pipeline applies them itself.
3. A request that needs a rejected essential field fails with 501.
4. A rejection that names no field is followed by one more request, without all optional fields that the server has not
   accepted before. If the server accepts that, they are omitted from then on.
5. Some servers leave out the usage or the finish reason in streams. For a caller that does not stream, a reply is
   therefore streamed only if the last stream of the model had its usage, or if the server refuses to answer otherwise.
   Where nothing is lost, a stream is better: it shows that the server still works, and can be ended early.
"""

import re
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import httpx
import msgspec

from dragoman.client import http_settings, rest_calls
from dragoman.client.async_transport import AsyncTransport
from dragoman.client.call import ClientCall
from dragoman.client.http_transport import HttpTransport
from dragoman.client.planner import CallPlanner, PlannedCall, is_rejection, is_unexplained, names_field
from dragoman.client.rest_calls import ServerModel
from dragoman.core import loop_guard
from dragoman.core.embeddings import Embedding, Input
from dragoman.core.errors import (
    ContextTooLong,
    DragomanError,
    InvalidSchema,
    MethodNotAllowed,
    NotFound,
    NotSupported,
    UnsupportedParameter,
)
from dragoman.core.events import Event, Finished, Listener, Started, Usage
from dragoman.core.features import SAMPLING_FEATURES, Feature
from dragoman.core.request import GenerationRequest, Message, Reasoning, Sampling, Thinking
from dragoman.core.urls import find_secrets, redact_secrets, remove_credentials
from dragoman.engines.upstream.options import ServerOptions, UpstreamOptions
from dragoman.engines.upstream.pool import PoolMember
from dragoman.protocols import request_fields
from dragoman.protocols.chat.client import COMPLETIONS
from dragoman.protocols.registry import CLIENT_PROTOCOLS
from dragoman.protocols.reply_reader import ClientProtocol

MAX_ATTEMPTS = 8
"""Attempts to send a request, each without one more rejected feature."""
NO_COMPRESSION = {"accept-encoding": "identity"}
"""Decompressing a stream costs more than it saves."""
NO_ROUTE = (NotFound, MethodNotAllowed)
MISSING_USAGE = "the upstream server of this model did not report token usage"

FEATURE_BY_FIELD = {
    **{str(feature): str(feature) for feature in SAMPLING_FEATURES},
    **{name: name for name in ("stop_token_ids", "ignore_eos", "documents", "tools", "images")},
    **{name: name for name in ("cache_control", "stream", "stream_options")},
    **dict.fromkeys(("continue_final_message", "add_generation_prompt"), "prefill"),
    **{name: name for name in ("user", "metadata", "prompt_cache_key", "safety_identifier", "service_tier")},
    **dict.fromkeys(("logprobs", "top_logprobs"), "logprobs"),
    **dict.fromkeys(("stop", "stop_sequences"), "stop"),
    **dict.fromkeys(("reasoning_effort", "reasoning", "thinking", "chat_template_kwargs", "include"), "thinking"),
    **dict.fromkeys(("response_format", "structured_outputs", "text", "output_config"), "constraint"),
    "thinking_token_budget": "thinking_budget",
    "parallel_tool_calls": "parallel",
    "strict": "strict_tools",
    "tool_choice": "tools",
    "image_url": "images",
    "streaming": "stream",
    "include_usage": "stream_options",
    "reasoning_content": "past_reasoning",
}
"""The feature behind each request field of all protocols."""
ESSENTIAL_FEATURES = frozenset({Feature.TOOLS, Feature.IMAGES, Feature.CONSTRAINT})
ESSENTIAL_FIELDS = {
    **dict.fromkeys(("json_object", "json_schema", "regex", "grammar", "one_of"), Feature.CONSTRAINT),
    "prompts": Feature.COMPLETION,
    "suffix": Feature.INFILL,
}
"""The features behind fields that cannot be left out if a protocol lacks them."""
REJECTION_PATTERN = re.compile(
    r"not (currently )?support|unsupported|not permitted|unrecognized|unknown (field|parameter|argument|name)"
    r"|extra_forbidden|not allowed|requires --|not enabled|not available",
    re.IGNORECASE,
)
REJECTION_STATUSES = (400, 422, 500, 501)
STREAM_PATTERN = re.compile(r"\bstream(ing)?\b", re.IGNORECASE)
WHOLE_REPLY = "whole_reply"
"""The feature that a server lacks if it only streams."""
PARENT_FIELDS = {
    **dict.fromkeys(("cache_control", "image_url", "images", "reasoning_content"), "messages"),
    "strict": "tools",
    "streaming": "stream",
    "include_usage": "stream_options",
}
"""The top-level field that contains a nested field."""
COMMON_WORDS = frozenset({"text", "include", "user"})
"""Field names that are too common in prose to identify a field in an error message."""
UNREPORTED = frozenset({"stop", "stream", "stream_options", WHOLE_REPLY, "past_reasoning", "parallel"})
OPTIONAL_FEATURES = frozenset(FEATURE_BY_FIELD.values()) - ESSENTIAL_FEATURES - {"temperature", "top_p", "stream"}
"""What is left out once after a rejection that names no field."""
EMPTY_FIELDS: Mapping[str, Mapping[str, Any]] = {
    "cache_control": {"keep_at": ()},
    "thinking": {"thinking": Thinking()},
    "logprobs": {"logprobs": None},
    "stop": {"stop": ()},
    "stop_token_ids": {"stop_token_ids": ()},
    "ignore_eos": {"ignore_eos": False},
    "documents": {"documents": ()},
    "prefill": {"continues_last": False},
}
"""What a request without a feature has in its fields."""


class Attempt(msgspec.Struct, frozen=True):
    """A request in one protocol, and the parameters left out of it."""

    call: PlannedCall
    client_call: ClientCall
    ignored: tuple[str, ...]


class TrackedListener:
    """Adds ignored parameters and usage warnings to the events, and records whether the reply has begun."""

    def __init__(self, listener: Listener, on_begin: Callable[[], None]) -> None:
        self.has_begun = False
        self.ignored: tuple[str, ...] = ()
        self._listener = listener
        self._on_begin = on_begin
        self._raised: DragomanError | None = None

    def __call__(self, events: Sequence[Event]) -> Awaitable[None] | None:
        if not self.has_begun:
            self.has_begun = True
            self._on_begin()
            events = _annotate(events, self.ignored)
        elif type(events[-1]) is Finished:
            events = _annotate(events, self.ignored)
        try:
            return self._listener(events)
        except DragomanError as error:
            self._raised = error
            raise

    def has_raised(self, error: DragomanError) -> bool:
        """Whether the error came from the listener and not from the server."""
        return error is self._raised


class UpstreamServer(PoolMember):
    def __init__(self, server: ServerOptions, options: UpstreamOptions, key: str | None, engine_id: str) -> None:
        super().__init__(server.weight, server.rank)
        self.url = remove_credentials(server.url)
        self.model = server.model
        self.planner = CallPlanner(
            server.url, api_key=key, protocol=server.protocol or "auto", retries=0, extra_headers=NO_COMPRESSION
        )
        self.models: dict[str, ServerModel] = {}
        """The known models of the server, by lower-case name."""
        settings = http_settings.client_settings(self.planner.address, options.silence_seconds, options.connect_seconds)
        settings |= {"trust_env": False, "event_hooks": {"request": [partial(_add_loop_header, engine_id)]}}
        # httpx's own transport implements proxies.
        settings |= {"transport": HttpTransport()} if options.proxy is None else {"proxy": options.proxy}
        if options.proxy is not None and self.planner.address.is_tls:
            # Like HttpTransport, use only the certificates of the environment.
            settings |= {"verify": httpx.create_ssl_context()}
        self._transport = AsyncTransport(httpx.AsyncClient(**settings))
        self._rejected: defaultdict[str, set[str]] = defaultdict(set)
        """Rejected features by model."""
        self._accepted: defaultdict[str, set[str]] = defaultdict(set)
        """Features that the server has accepted, by model. A later rejection is due to their values."""
        self._streams_usage: dict[str, bool] = {}
        """Whether the last stream of a model had its usage."""
        self._secrets = find_secrets(server.url, key)

    def redact(self, error: DragomanError) -> None:
        """Hide the credentials that were sent to this server, in case its error repeats them."""
        error.message = redact_secrets(error.message, self._secrets)
        error.args = (error.message,)
        if error.param is not None:
            error.param = redact_secrets(error.param, self._secrets)

    async def aclose(self) -> None:
        await self._transport.aclose()

    def forget_rejections(self) -> None:
        """Called when the server is reachable again; it may have been replaced."""
        self._rejected.clear()
        self._accepted.clear()
        self._streams_usage.clear()

    async def probe(self) -> None:
        """Check that the server answers, and update its models."""
        models = await self._transport.run(rest_calls.list_models(self.planner))
        self.models = {model.name.lower(): model for model in models}

    async def generate(self, request: GenerationRequest, listener: TrackedListener) -> None:
        attempt, response = await self._send(request)
        listener.ignored = attempt.ignored
        try:
            await self._transport.deliver(attempt.client_call, response, listener)
        finally:
            # The listener may have raised at the end of the reply.
            if attempt.client_call.streams_usage is not None:
                self._streams_usage[request.model] = attempt.client_call.streams_usage

    async def _send(self, request: GenerationRequest) -> tuple[Attempt, httpx.Response]:
        """Send the request, and again without each feature that the server rejects."""
        rejected, accepted = self._rejected[request.model], self._accepted[request.model]
        suspected: frozenset[str] = frozenset()
        """Features that are left out on trial."""
        topic = "completions" if request.prompts else "generate"
        for _ in range(MAX_ATTEMPTS):
            left_out = rejected | suspected
            attempts = self._build_attempts(request, left_out)
            try:
                steps = self.planner.open(topic, [attempt.call for attempt in attempts])
                call, response = await self._transport.run(steps)
            except NO_ROUTE as error:
                if type(error) in NO_ROUTE and request.prompts:
                    raise _unsupported(request, Feature.COMPLETION) from error
                raise
            except DragomanError as error:
                sent = {field for attempt in attempts for field in attempt.client_call.body}
                feature = _find_rejected_feature(error, sent)
                if feature is None:
                    found = _suspect_features(request, error, sent) - left_out - accepted
                    if not found:
                        raise
                    suspected |= found
                    continue
                if feature in left_out:
                    raise
                rejected.add(feature)
                if feature in ESSENTIAL_FEATURES:
                    raise _unsupported(request, feature) from error
                continue
            attempt = next(attempt for attempt in attempts if attempt.call is call)
            rejected |= suspected
            accepted |= _used_features(request, attempt.client_call.body) - rejected
            return attempt, response
        raise NotSupported("the upstream server of this model rejected too many parameters of the request")

    def _build_attempts(self, request: GenerationRequest, rejected: set[str]) -> list[Attempt]:
        """One attempt for each protocol that can express the request."""
        if request.prompts:
            return [self._build_attempt(COMPLETIONS, request, rejected)]
        attempts: list[Attempt] = []
        first_error: NotSupported | None = None
        for name in self.planner.protocol_names():
            try:
                attempts.append(self._build_attempt(CLIENT_PROTOCOLS[name], request, rejected))
            except NotSupported as error:
                first_error = first_error or error
        if not attempts and first_error is not None:
            raise first_error
        return attempts

    def _build_attempt(self, protocol: ClientProtocol, request: GenerationRequest, rejected: set[str]) -> Attempt:
        adapted, ignored = _adapt_request(request, protocol, rejected)
        loses_nothing = self._streams_usage.get(request.model, False)
        stream = "stream" not in rejected and (request.delivery.stream or loses_nothing or WHOLE_REPLY in rejected)
        client_call = ClientCall(protocol, adapted, stream=stream, check_calls=False)
        if "stream_options" in rejected:
            client_call.body.pop("stream_options", None)
        return Attempt(self.planner.build_call(protocol.name, client_call, stream), client_call, ignored)

    async def embed(self, inputs: Sequence[Input], model: str) -> tuple[tuple[Embedding, ...], Usage]:
        return await self._transport.run(rest_calls.embed(self.planner, inputs, model))

    async def count_tokens(self, request: GenerationRequest) -> int:
        unlabelled = msgspec.structs.replace(request, labels={})
        return await self._transport.run(rest_calls.count_tokens(self.planner, unlabelled))


async def _add_loop_header(engine_id: str, request: httpx.Request) -> None:
    request.headers[loop_guard.HEADER] = loop_guard.add_own_id(engine_id)


def _annotate(events: Sequence[Event], ignored: tuple[str, ...]) -> Sequence[Event]:
    first, last = events[0], events[-1]
    if ignored and type(first) is Started:
        events = [msgspec.structs.replace(first, ignored=ignored), *events[1:]]
    if type(last) is Finished and last.usage is None:
        events = [*events[:-1], msgspec.structs.replace(last, warnings=(*last.warnings, MISSING_USAGE))]
    return events


def _find_rejected_feature(error: DragomanError, sent: Collection[str]) -> str | None:
    """The feature of the request that the server rejected; None for any other error."""
    answered = error.answered
    if answered is None or answered.status not in REJECTION_STATUSES:
        return None
    if isinstance(error, ContextTooLong | InvalidSchema):
        return None
    names_options = "stream_options" in sent and names_field(error, ["stream_options"])
    if not (isinstance(error, UnsupportedParameter) or REJECTION_PATTERN.search(error.message) or names_options):
        return None
    candidates = [field for field in FEATURE_BY_FIELD if PARENT_FIELDS.get(field, field) in sent]
    param = re.split(r"[.\[]", error.param or "")[0]
    if param in candidates:
        return FEATURE_BY_FIELD[param]
    message = error.message.lower()
    named = [field for field in candidates if field not in COMMON_WORDS and re.search(rf"\b{field}\b", message)]
    # "… is not supported with streaming" is about the other field.
    named.sort(key=lambda field: (FEATURE_BY_FIELD[field] != "stream", len(field)))
    return FEATURE_BY_FIELD[named[-1]] if named else None


def _suspect_features(request: GenerationRequest, error: DragomanError, sent: Collection[str]) -> frozenset[str]:
    """The features that the server may have rejected without naming a field of the request."""
    if is_rejection(error) and "stream" not in sent and STREAM_PATTERN.search(error.message):
        return frozenset({WHOLE_REPLY})
    return OPTIONAL_FEATURES & _used_features(request, sent) if is_unexplained(error, sent) else frozenset()


def _used_features(request: GenerationRequest, sent: Collection[str]) -> frozenset[str]:
    used = {*request_fields.used_fields(request), *(str(asked.feature) for asked in request.asked)}
    if any(isinstance(part, Reasoning) for message in request.messages for part in message.parts):
        used.add("past_reasoning")
    if "stream_options" in sent:
        used.add("stream_options")
    return frozenset(used)


def _adapt_request(
    request: GenerationRequest, protocol: ClientProtocol, rejected: Collection[str]
) -> tuple[GenerationRequest, tuple[str, ...]]:
    """Return the request without unsupported features, and the parameters that are thereby ignored.

    Raise `NotSupported` if an essential feature is among them.
    """
    missing = [name for name in request_fields.used_fields(request) if name not in protocol.supported_fields]
    features = {asked.feature for asked in request.asked}
    lacking = [ESSENTIAL_FIELDS[name] for name in missing if name in ESSENTIAL_FIELDS]
    lacking += [Feature(name) for name in rejected if name in ESSENTIAL_FEATURES & features]
    if lacking:
        raise _unsupported(request, lacking[0])
    omitted = [*missing, *(name for name in rejected if name not in ESSENTIAL_FEATURES)]
    ignored = {"thinking" if name == "thinking_budget" else name for name in omitted if name not in UNREPORTED}
    params = [asked.param for asked in request.asked if asked.feature in ignored]
    labels = [name for name in omitted if name in request.labels or (name == "cache_control" and request.keep_at)]
    for name in omitted:
        request = _remove(request, name)
    return request, tuple(dict.fromkeys([*params, *labels]))


def _unsupported(request: GenerationRequest, feature: str) -> NotSupported:
    param = next((asked.param for asked in request.asked if asked.feature == feature), None)
    return NotSupported(f"the upstream server of this model does not support {str(param or feature)!r}", param=param)


def _remove(request: GenerationRequest, name: str) -> GenerationRequest:
    replace = msgspec.structs.replace
    if name in EMPTY_FIELDS:
        return replace(request, **EMPTY_FIELDS[name])
    if name in Sampling.__struct_fields__:
        return replace(request, sampling=replace(request.sampling, **{name: getattr(Sampling(), name)}))
    if name in request.labels:
        return replace(request, labels={label: value for label, value in request.labels.items() if label != name})
    if name == "thinking_budget":
        return replace(request, thinking=replace(request.thinking, budget_tokens=None))
    if name == "past_reasoning":
        return replace(request, messages=tuple(_without_reasoning(message) for message in request.messages))
    if name == "parallel":
        return replace(request, tool_choice=replace(request.tool_choice, parallel=True))
    if name == "strict_tools":
        return replace(request, tools=tuple(replace(tool, strict=False) for tool in request.tools))
    return request


def _without_reasoning(message: Message) -> Message:
    return msgspec.structs.replace(
        message, parts=tuple(part for part in message.parts if not isinstance(part, Reasoning))
    )
