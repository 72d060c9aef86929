"""The base class of wire protocols that the server answers in.

Subclass `WireProtocol` to serve another protocol; `docs/own-protocol.md` has an example. The built-in protocols are
subclasses too (see `registry`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

from dragoman.core.edits import ContextEvent
from dragoman.core.errors import DragomanError
from dragoman.core.events import Event
from dragoman.core.reply import RateLimitState, Reply
from dragoman.core.request import GenerationRequest
from dragoman.core.types import RouteScope
from dragoman.protocols import errors, openai

EVENT_STREAM = "text/event-stream; charset=utf-8"


class Encoder(Protocol):
    """Encodes the events of one stream as bytes."""

    def feed(self, choice: int, events: Sequence[Event]) -> bytes:
        """Encode events of the choice with this index. `Started` and `Finished` are among them, once per choice.

        Events of several choices are interleaved. The result may be empty.
        """

    def end(self) -> bytes:
        """Encode the end of a complete stream. Called once, after the `Finished` of all choices."""

    def fail(self, error: DragomanError) -> bytes:
        """Encode the error of a failed stream. Called once, instead of `end`."""


class ContextEncoder(Encoder, Protocol):
    """The encoder of a protocol whose requests may have `edits`."""

    def feed_context(self, event: ContextEvent) -> bytes:
        """Encode what the edits of the request did. Called before `feed`, or not at all."""


@dataclass(frozen=True)
class Family:
    """What the protocols of one vendor share: errors, rate limit headers, and a second header for the request id."""

    encode_error: Callable[[DragomanError, str], dict[str, Any]]
    status: Callable[[DragomanError], int]
    rate_header: str
    format_reset: Callable[[float], str]
    id_header: bytes | None = None

    def rate_headers(self, rates: Sequence[RateLimitState]) -> list[tuple[bytes, bytes]]:
        headers = []
        for rate in rates:
            values = {"limit": rate.limit, "remaining": rate.remaining, "reset": self.format_reset(rate.reset)}
            for name, value in values.items():
                headers.append((self.rate_header.format(name=name, what=rate.what).encode(), str(value).encode()))
        return headers


OPENAI = Family(
    lambda error, request_id: errors.encode_openai_error(error),
    lambda error: error.status,
    "x-ratelimit-{name}-{what}",
    openai.format_reset,
)


class WireProtocol:
    """Serves generations with POST at each of `paths`.

    The path decides nothing else: what a request means is in its body. `created` is the time of the request, in seconds
    since 1970.
    """

    paths: ClassVar[tuple[str, ...]]
    id_prefix: ClassVar[str] = "req-"
    """How the ids of requests begin."""
    scope: ClassVar[RouteScope] = "chat"
    """What a key must be allowed to use."""
    family: ClassVar[Family] = OPENAI
    """The rate limit headers, and the format of errors unless `encode_error` and `error_status` are overridden."""
    stream_type: ClassVar[str] = EVENT_STREAM
    """The content type of streams. Only event streams get comments while they are silent."""

    def decode(self, body: bytes) -> GenerationRequest:
        """Parse and validate a body, or raise a `BadRequest` that names the field.

        Every requested feature must be listed in `GenerationRequest.asked`: one that is missing there is not checked
        against the engine.
        """
        raise NotImplementedError

    def encode_reply(self, request: GenerationRequest, created: int, reply: Reply) -> object:
        """Return the body of a whole reply, as an object for JSON."""
        raise NotImplementedError

    def encode_stream(self, request: GenerationRequest, created: int) -> Encoder:
        """Return the encoder of one stream."""
        raise NotImplementedError

    def encode_error(self, error: DragomanError, request_id: str) -> dict[str, Any]:
        return self.family.encode_error(error, request_id)

    def error_status(self, error: DragomanError) -> int:
        return self.family.status(error)

    def own_family(self) -> Family:
        """The family, with the errors of this protocol."""
        return replace(self.family, encode_error=self.encode_error, status=self.error_status)
