"""What both clients do, without a socket: which calls to try, what to make of what comes back, when to try again.

    opening := (Send | Wait)*         a generator: it says what to do and is sent what came of it

A question may be asked in several ways (`calls`): by another protocol, at another route. The first way that the server
has is remembered, and no other is tried again.
"""

from collections.abc import Generator, Mapping, Sequence
from typing import Any, Generic, Literal, TypeVar

import msgspec

from dragoman.client.call import PROTOCOLS, Exchange
from dragoman.client.headers import adapted, headers
from dragoman.core.errors import (
    AnswerTimeout,
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
from dragoman.core.urls import site
from dragoman.protocols.client import error_classifier
from dragoman.protocols.client.retry import Refused, Retries, Trouble

ProtocolName = Literal["auto", "chat", "messages", "responses"]
STREAM = "text/event-stream, application/json"


class Call(msgspec.Struct, frozen=True):
    """`way` is the name by which it is remembered that the server takes calls of this kind."""

    way: str
    method: str
    url: str
    headers: Mapping[str, str]
    body: bytes = b""
    harmless: bool = True
    exchange: Exchange | None = None
    """Reads the answer, where that is a reply."""


class Send(msgspec.Struct, frozen=True):
    call: Call


class Wait(msgspec.Struct, frozen=True):
    seconds: float


R = TypeVar("R")


class Arrived(msgspec.Struct, Generic[R], frozen=True):
    """The head of an answer. Of an error all of it: then `response` has been closed."""

    status: int
    headers: Mapping[str, str]
    response: R
    body: bytes = b""

    @property
    def is_success(self) -> bool:
        return 200 <= self.status < 300


class Missed(msgspec.Struct, frozen=True):
    """No answer came."""

    trouble: Trouble
    why: str
    timed_out: bool = False


Opening = Generator[Send | Wait, Any, tuple[Call, Arrived[R]]]


class Talk:
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
        if protocol != "auto" and protocol not in PROTOCOLS:
            raise ConfigError(f"protocol {protocol!r}: expected auto, {', '.join(PROTOCOLS)}")
        self.site = site(url)
        self.model = model
        _check_headers({"api_key": api_key or "", **(extra_headers or {})})
        self.retries = Retries(retries) if isinstance(retries, int) else retries
        self._key = api_key
        self._extra = {name.lower(): value for name, value in (extra_headers or {}).items()}
        self._ways: dict[str, str] = {} if protocol == "auto" else {"generate": protocol}

    @property
    def protocol(self) -> str | None:
        """The one that the server has, once that is known."""
        return self._ways.get("generate")

    def questions(self, request: GenerationRequest, *, stream: bool, check_calls: bool) -> list[Call]:
        """The ways to ask for this reply, of the protocols that have words for all of it."""
        calls: list[Call] = []
        unsaid: UnsupportedParameter | None = None
        for name in self.names():
            try:
                exchange = Exchange(PROTOCOLS[name], request, stream=stream, check_calls=check_calls)
            except UnsupportedParameter as error:
                unsaid = unsaid or error
                continue
            calls.append(self.question(name, exchange, stream))
        if not calls and unsaid is not None:
            raise unsaid
        return calls

    def names(self) -> list[str]:
        """The protocols to try, in their order."""
        known = self.protocol
        if known is not None:
            return [known]
        return sorted(PROTOCOLS, key=lambda name: name != "messages") if self._is_anthropic else list(PROTOCOLS)

    @property
    def _is_anthropic(self) -> bool:
        return self.site.is_at("anthropic.com")

    def question(self, name: str, exchange: Exchange, stream: bool) -> Call:
        told = self.headers(name) | ({"accept": STREAM} if stream else {})
        body = encoded(adapted(self.site, exchange.body))
        return Call(name, "POST", self.site.api + exchange.path, told, body, harmless=False, exchange=exchange)

    def headers(self, protocol: str) -> dict[str, str]:
        return headers(self.site, self._key, protocol) | self._extra

    def plain(self, way: str, path: str, body: object = None, *, protocol: str = "chat", at_root: bool = False) -> Call:
        """A call that is answered by a JSON body."""
        url = (self.site.root if at_root else self.site.api) + path
        told = self.headers("messages" if self._is_anthropic else protocol)
        if body is None:
            return Call(way, "GET", url, told)
        return Call(way, "POST", url, told, encoded(body))

    def opening(self, topic: str, calls: Sequence[Call]) -> Opening[R]:
        """The first of the calls that the server takes, and its answer."""
        known = [call for call in calls if call.way == self._ways.get(topic)] or calls
        missing: DragomanError | None = None
        for call in known:
            try:
                arrived: Arrived[R] = yield from self._tried(call)
            except (NotFound, MethodNotAllowed, NotSupported) as error:
                if type(error) not in (NotFound, MethodNotAllowed, NotSupported) or len(known) == 1:
                    raise
                missing = missing or error
                continue
            self._ways[topic] = call.way
            return call, arrived
        assert missing is not None
        tried = ", ".join(call.url.removeprefix(self.site.root) for call in known)
        nothing = NotFound(f"{self.site.root} has none of {tried}")
        nothing.answered = missing.answered
        raise nothing

    def _tried(self, call: Call) -> Generator[Send | Wait, Any, Arrived[R]]:
        attempt = 0
        while True:
            attempt += 1
            came: Arrived[R] | Missed = yield Send(call)
            if isinstance(came, Missed):
                error, trouble = self._missed(came), came.trouble
                wait = self.retries.wait(trouble, attempt, call.harmless)
            elif came.is_success:
                return came
            else:
                error = error_classifier.of_response(came.status, came.headers, came.body)
                is_final = isinstance(error, QuotaExhausted)
                wait = self.retries.wait(Refused(came.status, came.headers, is_final), attempt, call.harmless)
            if wait is None:
                raise error
            yield Wait(wait)

    def _missed(self, missed: Missed) -> DragomanError:
        if missed.timed_out:
            return AnswerTimeout(f"no answer from {self.site.root} in time: {missed.why}")
        if missed.trouble == "unreached":
            return Unreachable(f"nobody answers at {self.site.root}: {missed.why}")
        return Unreachable(f"{self.site.root} hung up before it answered: {missed.why}")


def _check_headers(headers: Mapping[str, str]) -> None:
    for name, value in headers.items():
        if not (value.isascii() and value.isprintable()):
            raise ConfigError(f"{name}: a header takes only printable ASCII")


def encoded(body: object) -> bytes:
    try:
        return msgspec.json.encode(body)
    except UnicodeEncodeError as error:
        raise BadRequest("a text has half a character (a lone surrogate), which cannot be sent") from error
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise BadRequest(f"this cannot be sent as JSON: {error}") from error
