"""Defines the messages between the parent and a front end, framed like those of a worker.

    parent -> front end   `Begin`, then `ApplyConfig` | `Stopping` | `GracefulStop` | `ForceStop` | `Knock`, answers and
                          `Step`s; the end of the socket ends the front end
    front end -> parent   `Listening`, `ConfigApplied` after every `ApplyConfig`, `Pong` after every `Knock`, and
      per request         [`Enter`] [`Engage` (`Generate` | `Cancel` | `AcquireSlot` | `ReleaseSlot` | `Pause`)*
                          `Leave`] `Ended`
      per relay           `Relay` [`CancelRelay`]
      at any time         `FindResponse` | `FindItems` | `StoreResponse`

`id` is the id of the request, as in its record. `key` is the key of a generation, unique across all front ends.

    `Enter`        -> `Entered` | `Refused`
    `Engage`       -> [`LeaseQueued`] `LeaseGranted` | `Refused`
    `AcquireSlot`  -> `Granted` | `Refused`
    `Generate`     -> `Step`*, until one with the end
    `Relay`        -> `Relayed` | `Refused`
    `FindResponse`, `FindItems`, `StoreResponse` -> `Kept` | `Refused`

An answer that cannot be decoded, because a custom engine describes itself wrongly, is decoded as `Refused`.
"""

import logging
from typing import Any, get_args

import msgspec

from dragoman.config.settings import Settings
from dragoman.core.errors import ConfigError, DragomanError
from dragoman.core.rate_limits import Rate
from dragoman.core.request import GenerationRequest
from dragoman.ipc.worker_messages import HEADER, Failure, Progress
from dragoman.pipeline.event_stream import failed
from dragoman.server.model_lease import Found, Wish
from dragoman.server.telemetry import RequestRecord
from dragoman.storage.base import KeptResponse

log = logging.getLogger("dragoman.fronts")


class Begin(msgspec.Struct, frozen=True, array_like=True, tag=True):
    number: int
    settings: Settings


class ApplyConfig(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """New settings; those that can change at run time are applied."""

    settings: Settings


class ConfigApplied(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass


class Stopping(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The server will stop: requests cancelled from now on get that as the reason."""


class GracefulStop(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Accept no new requests; running ones have the grace time."""


class ForceStop(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Stop without the grace time; running requests are cancelled now."""


class Knock(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Check that the front end still answers."""


class Pong(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass


class Listening(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass


class Enter(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Count a request against the quota of its key, which the parent holds."""

    id: str
    authorization: bytes
    api_key: bytes


class Entered(msgspec.Struct, frozen=True, array_like=True, tag=True):
    id: str
    rates: tuple[Rate, ...]


class Refused(msgspec.Struct, frozen=True, array_like=True, tag=True):
    id: str
    failure: Failure
    label: str | None = None
    fallbacks: tuple[str, ...] = ()
    rates: tuple[Rate, ...] = ()
    cause: str | None = None
    """The underlying error, for the log."""

    def error(self) -> DragomanError:
        error = self.failure.error()
        if self.cause is not None:
            error.__cause__ = ConfigError(self.cause)
        return error


class Engage(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """`models` and `within` limit the models that the caller may use (see `scopes`); None: all. `via` is the header
    that detects loops (see `loop_guard`)."""

    id: str
    principal: str
    models: tuple[str, ...] | None
    wish: Wish
    within: tuple[str, ...] | None
    via: bytes | None


class LeaseQueued(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The request is valid and waits for a slot."""

    id: str
    found: Found
    rates: tuple[Rate, ...] = ()


class LeaseGranted(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Describes the engine as far as the pipeline needs it."""

    id: str
    found: Found
    format: str
    staged: frozenset[str]
    tells_calls: bool
    queue_us: int
    rates: tuple[Rate, ...] = ()


class Generate(msgspec.Struct, frozen=True, array_like=True, tag="Generate"):
    id: str
    key: int
    request: GenerationRequest


class PassedGenerate(msgspec.Struct, frozen=True, array_like=True, tag="Generate"):
    """A `Generate` as the parent reads it, with the request still encoded for the worker."""

    id: str
    key: int
    request: msgspec.Raw


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag=True):
    id: str
    key: int


class Pause(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Pause or resume the engine of a generation whose reader lags behind, if the engine can wait."""

    id: str
    key: int
    is_paused: bool


class AcquireSlot(msgspec.Struct, frozen=True, array_like=True, tag=True):
    id: str


class Granted(msgspec.Struct, frozen=True, array_like=True, tag=True):
    id: str


class ReleaseSlot(msgspec.Struct, frozen=True, array_like=True, tag=True):
    id: str


class Leave(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Release everything that the request holds of its model. A finished reply had `tokens` in `seconds`."""

    id: str
    tokens: int = 0
    seconds: float = 0.0


class TokenGaps(msgspec.Struct, frozen=True, array_like=True):
    """Histogram of the times between tokens since the last report."""

    counts: tuple[int, ...]
    total: float


class Ended(msgspec.Struct, frozen=True, array_like=True, tag=True):
    record: RequestRecord
    gaps: TokenGaps | None = None

    @property
    def id(self) -> str:
        return self.record.id


class Relay(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """An unchanged request for the parent to answer."""

    id: str
    scope: dict[str, Any]
    body: bytes


class Relayed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    id: str
    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes


class CancelRelay(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The client has gone."""

    id: str


class FindResponse(msgspec.Struct, frozen=True, array_like=True, tag=True):
    id: str
    principal: str
    response: str


class FindItems(msgspec.Struct, frozen=True, array_like=True, tag=True):
    id: str
    principal: str
    items: tuple[str, ...]


class StoreResponse(msgspec.Struct, frozen=True, array_like=True, tag=True):
    id: str
    response: KeptResponse


class Kept(msgspec.Struct, frozen=True, array_like=True, tag=True):
    id: str
    response: KeptResponse | None = None
    items: dict[str, bytes] = {}


class Step(msgspec.Struct, frozen=True, array_like=True, tag="Step"):
    progress: tuple[Progress, ...]


class RawProgressBatch(msgspec.Struct, frozen=True, array_like=True, tag="Step"):
    """A `Step` as the parent sends it, with encoded parts."""

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
    | Enter
    | Engage
    | PassedGenerate
    | Cancel
    | Pause
    | AcquireSlot
    | ReleaseSlot
    | Leave
    | Ended
    | Relay
    | CancelRelay
    | StoreQuery
)
Answer = Entered | LeaseQueued | LeaseGranted | Refused | Granted | Relayed | Kept
ANSWERS = frozenset(message.__name__ for message in get_args(Answer))
ToFront = Begin | ApplyConfig | Stopping | GracefulStop | ForceStop | Knock | Answer | Step

_encoder = msgspec.msgpack.Encoder()
_to_front = msgspec.msgpack.Decoder(ToFront)
_to_parent = msgspec.msgpack.Decoder(ToParent)
_passed_step = msgspec.msgpack.Decoder(RawProgressBatch)
_head = msgspec.msgpack.Decoder(MessageHead)
_request = msgspec.msgpack.Decoder(GenerationRequest)


def encode(message: ToFront | ToParent | Generate | RawProgressBatch) -> bytes:
    body = _encoder.encode(message)
    return HEADER.pack(len(body)) + body


def decode_to_front(body: memoryview) -> ToFront:
    message: ToFront = _to_front.decode(body)
    return message


def decode_in_parts(body: memoryview, error: Exception) -> RawProgressBatch | Refused:
    """Decode a message that failed to decode as a whole with `error`."""
    head = _head.decode(body)
    if head.tag not in ANSWERS:
        return _passed_step.decode(body)
    log.error("the engine's description of itself cannot be decoded", exc_info=error)
    return Refused(msgspec.msgpack.decode(head.first, type=str), Failure.of(failed(error)))


def decode_to_parent(body: memoryview) -> ToParent:
    message: ToParent = _to_parent.decode(body)
    return message


def decode_request(request: msgspec.Raw) -> GenerationRequest:
    return _request.decode(request)
