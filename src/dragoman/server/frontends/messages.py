"""The messages between the parent and a front end: framed as those of a worker.

    parent -> front   Begin, then Configured | Stopping | Stop | Hurry | Knock, answers and steps;
                      the end of the socket means: end
    front -> parent   Listening, Adopted after every Configured, Here after every Knock, and
                      [Enter] [Engage (Generate | Cancel | Another | GiveBack | Hold)* Leave] Ended   for a request
                      Relay [Drop]                                                                   for one passed on
                      FindResponse | FindItems | KeepResponse                                        in between

`id` is the request's, as it is in its record; `key` is a generation's, and no other front end ever has it.

    Enter     -> Entered | Refused
    Engage    -> [Waiting] Engaged | Refused     Waiting: nothing is wrong with it, only its turn has not come
    Another   -> Granted | Refused
    Generate  -> Step*, until one has its end
    Relay     -> Relayed | Refused
    Find...   -> Kept | Refused

An answer that cannot be read, because of what an engine of one's own says of itself, is read as `Refused`.
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


class Configured(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A new configuration, for what may change while the server runs."""

    settings: Settings


class Adopted(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """What was configured holds."""


class Stopping(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Soon: requests that are cancelled from now on are so because the server ends."""


class Stop(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Now: nothing new is taken, what runs has its time to finish."""


class Hurry(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The same without the time to finish: what runs is told now."""


class Knock(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Whether anybody is there."""


class Here(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass


class Listening(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass


class Enter(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Somebody whose key has limits. What tells who it is goes along: quotas are the parent's."""

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
    """What is behind it, for the log."""

    def error(self) -> DragomanError:
        error = self.failure.error()
        if self.cause is not None:
            error.__cause__ = ConfigError(self.cause)
        return error


class Engage(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """`models` and `within` are those that the caller may ask (see `scopes`); None: all. `via`: by whom the request
    came (see `hops`)."""

    id: str
    principal: str
    models: tuple[str, ...] | None
    wish: Wish
    within: tuple[str, ...] | None
    via: bytes | None


class Waiting(msgspec.Struct, frozen=True, array_like=True, tag=True):
    id: str
    found: Found
    rates: tuple[Rate, ...] = ()


class Engaged(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Of the engine only what the stages must know."""

    id: str
    found: Found
    format: str
    staged: frozenset[str]
    tells_calls: bool
    queue_us: int
    rates: tuple[Rate, ...] = ()


class Generate(msgspec.Struct, frozen=True, array_like=True, tag=True):
    id: str
    key: int
    request: GenerationRequest


class PassedGenerate(msgspec.Struct, frozen=True, array_like=True, tag="Generate"):
    """A `Generate` as the parent reads it: the request is mostly another process's to read."""

    id: str
    key: int
    request: msgspec.Raw


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag=True):
    id: str
    key: int


class Hold(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The reader of a generation cannot keep up, or can again: an engine that can wait for it should."""

    id: str
    key: int
    held: bool


class Another(msgspec.Struct, frozen=True, array_like=True, tag=True):
    id: str


class Granted(msgspec.Struct, frozen=True, array_like=True, tag=True):
    id: str


class GiveBack(msgspec.Struct, frozen=True, array_like=True, tag=True):
    id: str


class Leave(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Everything that the request held of its model is given back. `tokens` in `seconds`: how fast it was, where it
    came to its end."""

    id: str
    tokens: int = 0
    seconds: float = 0.0


class Gaps(msgspec.Struct, frozen=True, array_like=True):
    """Times between tokens, as they were counted since the last were told."""

    counts: tuple[int, ...]
    total: float


class Ended(msgspec.Struct, frozen=True, array_like=True, tag=True):
    record: RequestRecord
    gaps: Gaps | None = None

    @property
    def id(self) -> str:
        return self.record.id


class Relay(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A request as it came, for the parent to answer."""

    id: str
    scope: dict[str, Any]
    body: bytes


class Relayed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    id: str
    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes


class Drop(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Nobody waits for the answer any more."""

    id: str


class FindResponse(msgspec.Struct, frozen=True, array_like=True, tag=True):
    id: str
    principal: str
    response: str


class FindItems(msgspec.Struct, frozen=True, array_like=True, tag=True):
    id: str
    principal: str
    items: tuple[str, ...]


class KeepResponse(msgspec.Struct, frozen=True, array_like=True, tag=True):
    id: str
    response: KeptResponse


class Kept(msgspec.Struct, frozen=True, array_like=True, tag=True):
    id: str
    response: KeptResponse | None = None
    items: dict[str, bytes] = {}


class Step(msgspec.Struct, frozen=True, array_like=True, tag=True):
    progress: tuple[Progress, ...]


class PassedStep(msgspec.Struct, frozen=True, array_like=True, tag="Step"):
    """A `Step` as the parent sends it."""

    progress: tuple[msgspec.Raw, ...]


class Head(msgspec.Struct, frozen=True, array_like=True):
    """How any message with something in it begins."""

    tag: str
    first: msgspec.Raw


Question = FindResponse | FindItems | KeepResponse
ToParent = (
    Listening
    | Adopted
    | Here
    | Enter
    | Engage
    | PassedGenerate
    | Cancel
    | Hold
    | Another
    | GiveBack
    | Leave
    | Ended
    | Relay
    | Drop
    | Question
)
Answer = Entered | Waiting | Engaged | Refused | Granted | Relayed | Kept
ANSWERS = frozenset(one.__name__ for one in get_args(Answer))
ToFront = Begin | Configured | Stopping | Stop | Hurry | Knock | Answer | Step

_encoder = msgspec.msgpack.Encoder()
_to_front = msgspec.msgpack.Decoder(ToFront)
_to_parent = msgspec.msgpack.Decoder(ToParent)
_passed_step = msgspec.msgpack.Decoder(PassedStep)
_head = msgspec.msgpack.Decoder(Head)
_request = msgspec.msgpack.Decoder(GenerationRequest)


def encode(message: ToFront | ToParent | Generate | PassedStep) -> bytes:
    body = _encoder.encode(message)
    return HEADER.pack(len(body)) + body


def decode_to_front(body: memoryview) -> ToFront:
    message: ToFront = _to_front.decode(body)
    return message


def decode_in_parts(body: memoryview, error: Exception) -> PassedStep | Refused:
    """What could not be decoded as a whole, because of an error."""
    head = _head.decode(body)
    if head.tag not in ANSWERS:
        return _passed_step.decode(body)
    log.error("what the engine says of itself cannot be read", exc_info=error)
    return Refused(msgspec.msgpack.decode(head.first, type=str), Failure.of(failed(error)))


def decode_to_parent(body: memoryview) -> ToParent:
    message: ToParent = _to_parent.decode(body)
    return message


def decode_request(request: msgspec.Raw) -> GenerationRequest:
    return _request.decode(request)
