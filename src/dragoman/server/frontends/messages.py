"""Defines the messages between the parent and a front end, framed like those of a worker.

    parent -> front end
        start     `Begin`
        commands  `ApplyConfig` | `Stopping` | `GracefulStop` | `ForceStop` | `Knock`
        requests  answers, and `Step` with the events of generations
    front end -> parent
        start     `Listening`
        commands  `ConfigApplied` after every `ApplyConfig`, `Pong` after every `Knock`
        requests  [`Enter`] [`Engage` in-lease* `Leave`] `Ended`
        in-lease  `Generate` | `Cancel` | `Pause` | `AcquireSlot` | `ReleaseSlot`
        relays    `Relay` [`CancelRelay`]
        storage   `FindResponse` | `FindItems` | `StoreResponse`

The end of the socket ends the front end. `id` is the id of the request, as in its record. `key` is the key of a
generation, unique across all front ends.

    `Enter` -> `Entered` | `Refused`
    `Engage` -> [`LeaseQueued`] `LeaseGranted` | `Refused`
    `AcquireSlot` -> `Granted` | `Refused`
    `Generate` -> `Step`*, until one with the end
    `Relay` -> `Relayed` | `Refused`
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


class FrontEndMessage(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass


class RequestMessage(FrontEndMessage, frozen=True):
    id: str


class Begin(FrontEndMessage, frozen=True):
    number: int
    settings: Settings


class ApplyConfig(FrontEndMessage, frozen=True):
    """New settings; those that can change at run time are applied."""

    settings: Settings


class ConfigApplied(FrontEndMessage, frozen=True):
    pass


class Stopping(FrontEndMessage, frozen=True):
    """The server will stop: requests cancelled from now on get that as the reason."""


class GracefulStop(FrontEndMessage, frozen=True):
    """Accept no new requests; running ones have the grace time."""


class ForceStop(FrontEndMessage, frozen=True):
    """Stop without the grace time; running requests are cancelled now."""


class Knock(FrontEndMessage, frozen=True):
    """Check that the front end still answers."""


class Pong(FrontEndMessage, frozen=True):
    pass


class Listening(FrontEndMessage, frozen=True):
    pass


class Enter(RequestMessage, frozen=True):
    """Count a request against the quota of its key, which the parent holds."""

    authorization: bytes
    api_key: bytes


class Entered(RequestMessage, frozen=True):
    rates: tuple[Rate, ...]


class Refused(RequestMessage, frozen=True):
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


class Engage(RequestMessage, frozen=True):
    """`models` and `within` limit the models that the caller may use (see `scopes`); None: all. `via` is the header
    that detects loops (see `loop_guard`)."""

    principal: str
    models: tuple[str, ...] | None
    wish: Wish
    within: tuple[str, ...] | None
    via: bytes | None


class LeaseQueued(RequestMessage, frozen=True):
    """The request is valid and waits for a slot."""

    found: Found
    rates: tuple[Rate, ...] = ()


class LeaseGranted(RequestMessage, frozen=True):
    """Describes the engine as far as the pipeline needs it."""

    found: Found
    format: str
    staged: frozenset[str]
    tells_calls: bool
    queue_us: int
    rates: tuple[Rate, ...] = ()


class Generate(RequestMessage, frozen=True, tag="Generate"):
    key: int
    request: GenerationRequest


class PassedGenerate(RequestMessage, frozen=True, tag="Generate"):
    """A `Generate` as the parent reads it, with the request still encoded for the worker."""

    key: int
    request: msgspec.Raw


class Cancel(RequestMessage, frozen=True):
    key: int


class Pause(RequestMessage, frozen=True):
    """Pause or resume the engine of a generation whose reader lags behind, if the engine can wait."""

    key: int
    is_paused: bool


class AcquireSlot(RequestMessage, frozen=True):
    pass


class Granted(RequestMessage, frozen=True):
    pass


class ReleaseSlot(RequestMessage, frozen=True):
    pass


class Leave(RequestMessage, frozen=True):
    """Release everything that the request holds of its model. A finished reply had `tokens` in `seconds`."""

    tokens: int = 0
    seconds: float = 0.0


class TokenGaps(msgspec.Struct, frozen=True, array_like=True):
    """Histogram of the times between tokens since the last report."""

    counts: tuple[int, ...]
    total: float


class Ended(FrontEndMessage, frozen=True):
    record: RequestRecord
    gaps: TokenGaps | None = None

    @property
    def id(self) -> str:
        return self.record.id


class Relay(RequestMessage, frozen=True):
    """An unchanged request for the parent to answer."""

    scope: dict[str, Any]
    body: bytes


class Relayed(RequestMessage, frozen=True):
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
    response: KeptResponse


class Kept(RequestMessage, frozen=True):
    response: KeptResponse | None = None
    items: dict[str, bytes] = {}


class Step(FrontEndMessage, frozen=True, tag="Step"):
    progress: tuple[Progress, ...]


class RawProgressBatch(FrontEndMessage, frozen=True, tag="Step"):
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
_to_front: msgspec.msgpack.Decoder[ToFront] = msgspec.msgpack.Decoder(ToFront)
_to_parent: msgspec.msgpack.Decoder[ToParent] = msgspec.msgpack.Decoder(ToParent)
_decode_raw_batch = msgspec.msgpack.Decoder(RawProgressBatch).decode
_decode_head = msgspec.msgpack.Decoder(MessageHead).decode
decode_to_front = _to_front.decode
decode_to_parent = _to_parent.decode
decode_request = msgspec.msgpack.Decoder(GenerationRequest).decode


def encode(message: ToFront | ToParent | Generate | RawProgressBatch) -> bytes:
    body = _encoder.encode(message)
    return HEADER.pack(len(body)) + body


def decode_in_parts(body: memoryview, error: Exception) -> RawProgressBatch | Refused:
    """Decode a message that failed to decode as a whole with `error`."""
    head = _decode_head(body)
    if head.tag not in ANSWERS:
        return _decode_raw_batch(body)
    log.error("the engine's description of itself cannot be decoded", exc_info=error)
    return Refused(msgspec.msgpack.decode(head.first, type=str), Failure.of(failed(error)))
