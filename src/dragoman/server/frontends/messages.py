"""Defines the messages between the parent and a front end, framed like those of a worker.

    parent -> front end
        start     `StartFrontEnd`
        commands  `ApplyConfig` | `ShutdownNotice` | `GracefulStop` | `ForceStop` | `Ping`
        requests  answers, and `ProgressBatch` with the events of generations
    front end -> parent
        start     `Listening`
        commands  `ConfigApplied` after every `ApplyConfig`, `Pong` after every `Ping`
        requests  [`EnterQuota`] [`AcquireLease` in-lease* `ReleaseLease`] `RequestEnded`
        in-lease  `StartGeneration` | `CancelGeneration` | `Pause` | `AcquireSlot` | `ReleaseSlot`
        relays    `Relay` [`CancelRelay`]
        storage   `FindResponse` | `FindItems` | `StoreResponse`

The end of the socket ends the front end. `id` is the id of the request, as in its record. `key` is the key of a
generation, unique across all front ends.

    `EnterQuota` -> `QuotaEntered` | `ErrorReply`
    `AcquireLease` -> [`LeaseQueued`] `LeaseGranted` | `ErrorReply`
    `AcquireSlot` -> `SlotGranted` | `ErrorReply`
    `StartGeneration` -> `ProgressBatch`*, until one with the end
    `Relay` -> `RelayReply` | `ErrorReply`
    `FindResponse`, `FindItems`, `StoreResponse` -> `StoreReply` | `ErrorReply`

An answer that cannot be decoded, because a custom engine describes itself wrongly, is decoded as `ErrorReply`.
"""

import logging
from typing import Any, get_args

import msgspec

from dragoman.config.settings import Settings
from dragoman.core.errors import ConfigError, DragomanError
from dragoman.core.rate_limits import RateLimitState
from dragoman.core.request import GenerationRequest
from dragoman.ipc.worker_messages import HEADER, Failure, GenerationProgress
from dragoman.pipeline.event_stream import engine_failure
from dragoman.server.model_lease import LeaseInfo, LeaseRequest
from dragoman.server.telemetry import RequestRecord
from dragoman.storage.base import StoredResponse

log = logging.getLogger("dragoman.fronts")


class FrontEndMessage(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass


class RequestMessage(FrontEndMessage, frozen=True):
    id: str


class StartFrontEnd(FrontEndMessage, frozen=True):
    number: int
    settings: Settings


class ApplyConfig(FrontEndMessage, frozen=True):
    """New settings; those that can change at run time are applied."""

    settings: Settings


class ConfigApplied(FrontEndMessage, frozen=True):
    pass


class ShutdownNotice(FrontEndMessage, frozen=True):
    """The server will stop: requests cancelled from now on get that as the reason."""


class GracefulStop(FrontEndMessage, frozen=True):
    """Accept no new requests; running ones have the grace time."""


class ForceStop(FrontEndMessage, frozen=True):
    """Stop without the grace time; running requests are cancelled now."""


class Ping(FrontEndMessage, frozen=True):
    """Check that the front end still answers."""


class Pong(FrontEndMessage, frozen=True):
    pass


class Listening(FrontEndMessage, frozen=True):
    pass


class EnterQuota(RequestMessage, frozen=True):
    """Count a request against the quota of its key, which the parent holds."""

    authorization: bytes
    api_key: bytes


class QuotaEntered(RequestMessage, frozen=True):
    rates: tuple[RateLimitState, ...]


class ErrorReply(RequestMessage, frozen=True):
    failure: Failure
    label: str | None = None
    fallbacks: tuple[str, ...] = ()
    rates: tuple[RateLimitState, ...] = ()
    cause: str | None = None
    """The underlying error, for the log."""

    def error(self) -> DragomanError:
        error = self.failure.error()
        if self.cause is not None:
            error.__cause__ = ConfigError(self.cause)
        return error


class AcquireLease(RequestMessage, frozen=True):
    """`models` and `within` limit the models that the caller may use (see `scopes`); None: all. `via` is the header
    that detects loops (see `loop_guard`)."""

    principal: str
    models: tuple[str, ...] | None
    wish: LeaseRequest
    within: tuple[str, ...] | None
    via: bytes | None


class LeaseQueued(RequestMessage, frozen=True):
    """The request is valid and waits for a slot."""

    found: LeaseInfo
    rates: tuple[RateLimitState, ...] = ()


class LeaseGranted(RequestMessage, frozen=True):
    """Describes the engine as far as the pipeline needs it."""

    found: LeaseInfo
    format: str
    staged: frozenset[str]
    emits_tool_calls: bool
    queue_us: int
    rates: tuple[RateLimitState, ...] = ()


class StartGeneration(RequestMessage, frozen=True, tag="StartGeneration"):
    key: int
    request: GenerationRequest


class RawStartGeneration(RequestMessage, frozen=True, tag="StartGeneration"):
    """A `StartGeneration` as the parent reads it, with the request still encoded for the worker."""

    key: int
    request: msgspec.Raw


class CancelGeneration(RequestMessage, frozen=True):
    key: int


class Pause(RequestMessage, frozen=True):
    """Pause or resume the engine of a generation whose reader lags behind, if the engine can wait."""

    key: int
    is_paused: bool


class AcquireSlot(RequestMessage, frozen=True):
    pass


class SlotGranted(RequestMessage, frozen=True):
    pass


class ReleaseSlot(RequestMessage, frozen=True):
    pass


class ReleaseLease(RequestMessage, frozen=True):
    """Release everything that the request holds of its model. A finished reply had `tokens` in `seconds`."""

    tokens: int = 0
    seconds: float = 0.0


class TokenGaps(msgspec.Struct, frozen=True, array_like=True):
    """Histogram of the times between tokens since the last report."""

    counts: tuple[int, ...]
    total: float


class RequestEnded(FrontEndMessage, frozen=True):
    record: RequestRecord
    gaps: TokenGaps | None = None

    @property
    def id(self) -> str:
        return self.record.id


class Relay(RequestMessage, frozen=True):
    """An unchanged request for the parent to answer."""

    scope: dict[str, Any]
    body: bytes


class RelayReply(RequestMessage, frozen=True):
    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes


class CancelRelay(RequestMessage, frozen=True):
    """The client has gone."""


class FindResponse(RequestMessage, frozen=True):
    principal: str
    response: str


class FindItems(RequestMessage, frozen=True):
    principal: str
    items: tuple[str, ...]


class StoreResponse(RequestMessage, frozen=True):
    response: StoredResponse


class StoreReply(RequestMessage, frozen=True):
    response: StoredResponse | None = None
    items: dict[str, bytes] = {}


class ProgressBatch(FrontEndMessage, frozen=True, tag="ProgressBatch"):
    progress: tuple[GenerationProgress, ...]


class RawProgressBatch(FrontEndMessage, frozen=True, tag="ProgressBatch"):
    """A `ProgressBatch` as the parent sends it, with encoded parts."""

    progress: tuple[msgspec.Raw, ...]


class MessageHead(msgspec.Struct, frozen=True, array_like=True):
    """The tag and the first field of any message with fields."""

    tag: str
    first: msgspec.Raw


StoreQuery = FindResponse | FindItems | StoreResponse
ToParent = (
    Listening
    | ConfigApplied
    | Pong
    | EnterQuota
    | AcquireLease
    | RawStartGeneration
    | CancelGeneration
    | Pause
    | AcquireSlot
    | ReleaseSlot
    | ReleaseLease
    | RequestEnded
    | Relay
    | CancelRelay
    | StoreQuery
)
Answer = QuotaEntered | LeaseQueued | LeaseGranted | ErrorReply | SlotGranted | RelayReply | StoreReply
ANSWERS = frozenset(message.__name__ for message in get_args(Answer))
ToFrontEnd = StartFrontEnd | ApplyConfig | ShutdownNotice | GracefulStop | ForceStop | Ping | Answer | ProgressBatch

_encoder = msgspec.msgpack.Encoder()
_to_front: msgspec.msgpack.Decoder[ToFrontEnd] = msgspec.msgpack.Decoder(ToFrontEnd)
_to_parent: msgspec.msgpack.Decoder[ToParent] = msgspec.msgpack.Decoder(ToParent)
_decode_raw_batch = msgspec.msgpack.Decoder(RawProgressBatch).decode
_decode_head = msgspec.msgpack.Decoder(MessageHead).decode
decode_to_frontend = _to_front.decode
decode_to_parent = _to_parent.decode
decode_request = msgspec.msgpack.Decoder(GenerationRequest).decode


def encode(message: ToFrontEnd | ToParent | StartGeneration | RawProgressBatch) -> bytes:
    body = _encoder.encode(message)
    return HEADER.pack(len(body)) + body


def decode_in_parts(body: memoryview, error: Exception) -> RawProgressBatch | ErrorReply:
    """Decode a message that failed to decode as a whole with `error`."""
    head = _decode_head(body)
    if head.tag not in ANSWERS:
        return _decode_raw_batch(body)
    log.error("the engine's description of itself cannot be decoded", exc_info=error)
    return ErrorReply(msgspec.msgpack.decode(head.first, type=str), Failure.of(engine_failure(error)))
