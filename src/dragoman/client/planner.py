"""Decides which calls to try, how to interpret the responses and when to retry, without I/O.

    Steps := (PlannedCall | Wait | ReadBody)*      a generator that yields the next step and is sent its result

One request may be possible in several ways (`calls`): with different protocols, at different routes. The first route
that the server supports is remembered and used from then on. So is whether it accepts `stream_options`: a server that
rejects a request of `generation_calls` with it, and names no other field, is asked once more without it. Redirects are
not followed, so that the API key goes only to the configured server (`dragoman.core.urls`).
"""

import re
from collections.abc import Awaitable, Callable, Collection, Generator, Mapping, Sequence
from typing import Any, Literal, TypeVar

import httpx
import msgspec

from dragoman.client.call import MAX_BODY_BYTES, ClientCall
from dragoman.core.errors import (
    AnswerTimeout,
    BadAnswer,
    BadRequest,
    ConfigError,
    DragomanError,
    MethodNotAllowed,
    NotFound,
    NotSupported,
    QuotaExhausted,
    Unreachable,
    UnsupportedParameter,
)
from dragoman.core.request import GenerationRequest
from dragoman.core.urls import ServerAddress, parse_address
from dragoman.core.version import __version__
from dragoman.protocols import errors
from dragoman.protocols.registry import CLIENT_PROTOCOLS
from dragoman.protocols.retry import ConnectionFailure, ErrorResponse, Retries

ProtocolName = Literal["auto", "chat", "messages", "responses"]
ACCEPT_ENCODING = "gzip, deflate"
ACCEPT_STREAM = "text/event-stream, application/json"
ANTHROPIC_VERSION = "2023-06-01"
NO_ROUTE = (NotFound, MethodNotAllowed, NotSupported)
MAX_ERROR_BYTES = 1024 * 1024
UNKNOWN_FIELD_STATUSES = (400, 422)


class PlannedCall(msgspec.Struct, frozen=True):
    """An HTTP request to send. The result is an open response or a `FailedAttempt`.

    `route` is the name under which the planner remembers that the server supports it.
    """

    route: str
    method: str
    url: str
    headers: Mapping[str, str]
    body: bytes = b""
    client_call: ClientCall | None = None
    """Reads the response if it is a generated reply."""
    may_lack_options: bool = False
    """Whether it is sent again without `stream_options` if the server may have rejected them."""

    @property
    def is_idempotent(self) -> bool:
        return self.client_call is None


class Wait(msgspec.Struct, frozen=True):
    seconds: float


class ReadBody(msgspec.Struct, frozen=True):
    """Read the body of a response and close it. The result is the body, and why it is incomplete or an empty string."""

    response: httpx.Response
    limit: int


class FailedAttempt(msgspec.Struct, frozen=True):
    """A request without a response."""

    kind: ConnectionFailure
    reason: str
    timed_out: bool = False


T = TypeVar("T")
S = TypeVar("S")
Step = PlannedCall | Wait | ReadBody
Steps = Generator[Step, Any, T]


def run_steps(steps: Generator[S, Any, T], perform: Callable[[S], object]) -> T:
    """Perform each step, send its result to the generator, and return the generator's result."""
    result: object = None
    while True:
        try:
            step = steps.send(result)
        except StopIteration as done:
            value: T = done.value
            return value
        result = perform(step)


async def run_steps_async(steps: Generator[S, Any, T], perform: Callable[[S], Awaitable[object]]) -> T:
    result: object = None
    while True:
        try:
            step = steps.send(result)
        except StopIteration as done:
            value: T = done.value
            return value
        result = await perform(step)


class CallPlanner:
    def __init__(
        self,
        url: str,
        *,
        model: str = "",
        api_key: str | None = None,
        protocol: ProtocolName = "auto",
        retries: int | Retries = 2,
        extra_headers: Mapping[str, str] | None = None,
    ) -> None:
        if protocol != "auto" and protocol not in CLIENT_PROTOCOLS:
            raise ConfigError(f"protocol {protocol!r}: expected auto, {', '.join(CLIENT_PROTOCOLS)}")
        self.address = parse_address(url)
        self.model = model
        _check_headers({"api_key": api_key or "", **(extra_headers or {})})
        self._retries = Retries(retries) if isinstance(retries, int) else retries
        self._key = api_key
        self._extra = {name.lower(): value for name, value in (extra_headers or {}).items()}
        self._routes: dict[str, str] = {} if protocol == "auto" else {"generate": protocol}
        """The supported route of each topic."""
        self._accepts_stream_options: bool | None = None
        """None until known."""

    @property
    def protocol(self) -> str | None:
        """The protocol that the server supports; None until that is known."""
        return self._routes.get("generate")

    def generation_calls(self, request: GenerationRequest, *, stream: bool, check_calls: bool) -> list[PlannedCall]:
        """Return a call for each candidate protocol that can express the whole request."""
        calls: list[PlannedCall] = []
        unsupported: UnsupportedParameter | None = None
        for name in self.protocol_names():
            try:
                client_call = ClientCall(CLIENT_PROTOCOLS[name], request, stream=stream, check_calls=check_calls)
            except UnsupportedParameter as error:
                unsupported = unsupported or error
                continue
            if self._accepts_stream_options is False:
                client_call.body.pop("stream_options", None)
            call = self.build_call(name, client_call, stream)
            calls.append(msgspec.structs.replace(call, may_lack_options="stream_options" in client_call.body))
        if not calls and unsupported is not None:
            raise unsupported
        return calls

    def protocol_names(self) -> list[str]:
        """Return the protocols to try, in order."""
        if self.protocol is not None:
            return [self.protocol]
        names = list(CLIENT_PROTOCOLS)
        return sorted(names, key=lambda name: name != "messages") if self._is_anthropic else names

    @property
    def _is_anthropic(self) -> bool:
        return self.address.is_at("anthropic.com")

    def build_call(self, name: str, client_call: ClientCall, stream: bool) -> PlannedCall:
        """Build the HTTP request of a generation."""
        headers = self.headers(name) | ({"accept": ACCEPT_STREAM} if stream else {})
        body = encode_json(_adapt_body(self.address, client_call.body))
        return PlannedCall(name, "POST", self.address.api + client_call.path, headers, body, client_call)

    def headers(self, protocol: str) -> dict[str, str]:
        return request_headers(self.address, self._key, protocol) | self._extra

    def json_call(
        self, route: str, path: str, body: object = None, *, protocol: str = "chat", at_root: bool = False
    ) -> PlannedCall:
        """Build a call whose response is a JSON body."""
        url = (self.address.root if at_root else self.address.api) + path
        headers = self.headers("messages" if self._is_anthropic else protocol)
        if body is None:
            return PlannedCall(route, "GET", url, headers)
        return PlannedCall(route, "POST", url, headers, encode_json(body))

    def open(self, topic: str, calls: Sequence[PlannedCall]) -> Steps[tuple[PlannedCall, httpx.Response]]:
        """Try the calls in order. Return the first one that the server supports and its response."""
        candidates = [call for call in calls if call.route == self._routes.get(topic)] or calls
        missing: DragomanError | None = None
        for call in candidates:
            try:
                response = yield from self._send(call)
            except NO_ROUTE as error:
                if type(error) not in NO_ROUTE or len(candidates) == 1:
                    raise
                missing = missing or error
                continue
            self._routes[topic] = call.route
            return call, response
        assert missing is not None
        tried = ", ".join(call.url.removeprefix(self.address.root) for call in candidates)
        not_found = NotFound(f"{self.address.root} has none of the routes {tried}")
        not_found.answered = missing.answered
        raise not_found

    def fetch(self, topic: str, calls: Sequence[PlannedCall]) -> Steps[bytes]:
        """Return the body of the response to the first call that the server supports."""
        _, response = yield from self.open(topic, calls)
        body: bytes
        body, problem = yield ReadBody(response, MAX_BODY_BYTES)
        if problem:
            raise BadAnswer(f"the response is incomplete: {problem}")
        return body

    def _send(self, call: PlannedCall) -> Steps[httpx.Response]:
        try:
            response = yield from self._send_with_retries(call)
        except DragomanError as error:
            if not call.may_lack_options or not self._may_reject_stream_options(call, error):
                raise
            response = yield from self._send_with_retries(self._without_stream_options(call))
            self._accepts_stream_options = False
            return response
        if call.may_lack_options:
            self._accepts_stream_options = True
        return response

    def _may_reject_stream_options(self, call: PlannedCall, error: DragomanError) -> bool:
        assert call.client_call is not None
        if error.answered is not None and names_field(error, ["stream_options"]):
            return True
        return self._accepts_stream_options is None and is_unexplained(error, call.client_call.body)

    def _without_stream_options(self, call: PlannedCall) -> PlannedCall:
        assert call.client_call is not None
        del call.client_call.body["stream_options"]
        return msgspec.structs.replace(call, body=encode_json(_adapt_body(self.address, call.client_call.body)))

    def _send_with_retries(self, call: PlannedCall) -> Steps[httpx.Response]:
        attempt = 0
        while True:
            attempt += 1
            result: httpx.Response | FailedAttempt = yield call
            if isinstance(result, FailedAttempt):
                error = self._connection_error(result)
                delay = self._retries.delay(result.kind, attempt, call.is_idempotent)
            elif result.is_success:
                return result
            else:
                body, _ = yield ReadBody(result, MAX_ERROR_BYTES)
                error = errors.error_from_response(result.status_code, result.headers, body)
                refusal = ErrorResponse(result.status_code, result.headers, isinstance(error, QuotaExhausted))
                delay = self._retries.delay(refusal, attempt, call.is_idempotent)
            if delay is None:
                raise error
            yield Wait(delay)

    def _connection_error(self, failed: FailedAttempt) -> DragomanError:
        if failed.timed_out:
            return AnswerTimeout(f"timeout waiting for {self.address.root}: {failed.reason}")
        if failed.kind == "unreached":
            return Unreachable(f"cannot connect to {self.address.root}: {failed.reason}")
        return Unreachable(f"{self.address.root} closed the connection before it answered: {failed.reason}")


def names_field(error: DragomanError, fields: Collection[str]) -> bool:
    """Whether the error names one of the fields, as its parameter or in its message."""
    param = re.split(r"[.\[]", error.param or "")[0]
    return param in fields or any(re.search(rf"\b{re.escape(field)}\b", error.message) for field in fields)


def is_rejection(error: DragomanError) -> bool:
    """Whether the server may have rejected a field of the request."""
    answered = error.answered
    has_status = answered is not None and answered.status in UNKNOWN_FIELD_STATUSES
    return has_status and type(error) in (BadRequest, UnsupportedParameter)


def is_unexplained(error: DragomanError, sent_fields: Collection[str]) -> bool:
    """Whether the server rejected the request without naming a field of it: perhaps because of an unknown field."""
    return is_rejection(error) and not names_field(error, sent_fields)


def request_headers(address: ServerAddress, key: str | None, protocol: str) -> dict[str, str]:
    """Return the headers of a request. Anthropic reads the key only from `x-api-key`; other servers may read either."""
    headers = {
        "content-type": "application/json",
        "accept-encoding": ACCEPT_ENCODING,
        "user-agent": f"dragoman/{__version__}",
    }
    if protocol == "messages":
        headers["anthropic-version"] = ANTHROPIC_VERSION
    if key is not None and (protocol == "messages" or address.is_at("anthropic.com")):
        headers["x-api-key"] = key
    if key is not None and not address.is_at("anthropic.com"):
        headers["authorization"] = f"Bearer {key}"
    if address.login is not None:
        headers["authorization"] = address.login
    return headers


def _adapt_body(address: ServerAddress, body: Mapping[str, object]) -> dict[str, object]:
    """Rename `max_tokens` for OpenAI's own servers, whose newer models accept only `max_completion_tokens`."""
    adapted = dict(body)
    if "max_tokens" in body and "messages" in body and (address.is_at("openai.com") or address.is_at("azure.com")):
        adapted["max_completion_tokens"] = adapted.pop("max_tokens")
    return adapted


def _check_headers(headers: Mapping[str, str]) -> None:
    for name, value in headers.items():
        if not (value.isascii() and value.isprintable()):
            raise ConfigError(f"{name}: a header value must be printable ASCII")


def encode_json(body: object) -> bytes:
    try:
        return msgspec.json.encode(body)
    except UnicodeEncodeError as error:
        raise BadRequest("a text contains a lone surrogate, which cannot be sent as UTF-8") from error
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise BadRequest(f"the request cannot be encoded as JSON: {error}") from error
