"""The messages between the server and a worker: a length of four bytes, then MessagePack.

    parent -> child   Start, then Generate | Cancel | Question; the end of the pipe means: end
    child -> parent   Loading*, Ready | Broken, then Step | Answer

A `Step` carries everything that became ready since the last one, of all requests.

What an engine tells is not checked where it is made, but where it is read. A message that cannot be read as a whole is
read part by part, and what is wrong with it is the trouble of the request that it belongs to.
"""

import logging
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from dragoman.core.embeddings import Embedding, Input
from dragoman.core.engine import ModelInfo, Rendered
from dragoman.core.errors import DECODE_ERRORS, ContextTooLong, DragomanError, by_name
from dragoman.core.events import Event
from dragoman.core.request import GenerationRequest
from dragoman.engines.step_delivery import Portion
from dragoman.pipeline.event_stream import failed

log = logging.getLogger("dragoman.ipc")

HEADER = struct.Struct("<I")
KEY_BITS = 32
"""Of the number of a request; above them is that of the process that counts them."""
OWN_NUMBER = 1
"""Of the worker's parent."""


class Start(msgspec.Struct, frozen=True, tag=True):
    engine: str
    name: str
    options: Mapping[str, Any]


class Generate(msgspec.Struct, frozen=True, tag=True):
    id: int
    request: GenerationRequest


class PassedGenerate(msgspec.Struct, frozen=True, tag="Generate"):
    """A `Generate` of somebody else's, whose request is encoded already."""

    id: int
    request: msgspec.Raw


class Cancel(msgspec.Struct, frozen=True, tag=True):
    id: int


class Render(msgspec.Struct, frozen=True, tag=True):
    id: int
    request: GenerationRequest


class CountTokens(msgspec.Struct, frozen=True, tag=True):
    id: int
    request: GenerationRequest


class Tokenize(msgspec.Struct, frozen=True, tag=True):
    id: int
    text: str
    special: bool


class Detokenize(msgspec.Struct, frozen=True, tag=True):
    id: int
    tokens: tuple[int, ...]


class Embed(msgspec.Struct, frozen=True, tag=True):
    id: int
    inputs: tuple[Input, ...]


class Loading(msgspec.Struct, frozen=True, tag=True):
    """How much of the model has been loaded, from 0 to 1."""

    progress: float


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The engine has loaded: what it said of itself."""

    models: tuple[ModelInfo, ...]
    supports: frozenset[str]
    device: str
    slots: int | None


class Broken(msgspec.Struct, frozen=True, tag=True):
    """The engine could not be loaded, and why. `mistake`: the operator can mend it; another try would not help."""

    reason: str
    mistake: bool


class Failure(msgspec.Struct, frozen=True):
    """An error on its way to the other process."""

    name: str
    message: str
    param: str | None = None
    retry_after: float | None = None
    tokens: int | None = None
    limit: int | None = None

    @classmethod
    def of(cls, error: DragomanError) -> "Failure":
        param = None if error.param is None else _sendable(error.param)
        lengths = (error.tokens, error.limit) if isinstance(error, ContextTooLong) else ()
        return cls(type(error).__name__, _sendable(error.message), param, error.retry_after, *lengths)

    def error(self) -> DragomanError:
        error = by_name(self.name)(self.message, param=self.param)
        error.retry_after = self.retry_after
        if isinstance(error, ContextTooLong):
            error.tokens, error.limit = self.tokens, self.limit
        return error


class Progress(msgspec.Struct, frozen=True, array_like=True):
    """What one request has new. `ended`: nothing more will come for it."""

    id: int
    events: tuple[Event, ...] = ()
    ended: bool = False
    failure: Failure | None = None


class Head(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What one who passes a `Progress` on has to know of it."""

    id: int
    events: msgspec.Raw
    ended: bool


class Step(msgspec.Struct, frozen=True, tag=True):
    progress: tuple[Progress, ...]
    kv_used: float | None = None


class PackedStep(msgspec.Struct, frozen=True, tag="Step"):
    """A `Step` as the child sends it, and as a parent reads it who passes most of it on: each part is encoded."""

    progress: tuple[msgspec.Raw, ...]
    kv_used: float | None = None


class WholeStep(msgspec.Struct, frozen=True, tag="Step"):
    """A `Step` as an engine made it, for all requests at once."""

    progress: Sequence[Portion | Progress]
    kv_used: float | None = None


class Answer(msgspec.Struct, frozen=True, tag=True):
    id: int
    tokens: tuple[int, ...] | None = None
    text: str | None = None
    rendered: Rendered | None = None
    count: int | None = None
    embeddings: tuple[Embedding, ...] | None = None
    failure: Failure | None = None


class AnswerHead(msgspec.Struct, frozen=True, tag="Answer"):
    """Whose an `Answer` is."""

    id: int


Question = Render | CountTokens | Tokenize | Detokenize | Embed
"""What gets one `Answer`."""
ToChild = Start | Generate | Cancel | Question
ToParent = Loading | Ready | Broken | Step | Answer
ToPasser = Loading | Ready | Broken | PackedStep | Answer

_encoder = msgspec.msgpack.Encoder()
_to_child = msgspec.msgpack.Decoder(ToChild)
_to_parent = msgspec.msgpack.Decoder(ToParent)
_to_passer = msgspec.msgpack.Decoder(ToPasser)
_progress = msgspec.msgpack.Decoder(Progress)
_head = msgspec.msgpack.Decoder(Head)
_parts = msgspec.msgpack.Decoder(PackedStep | AnswerHead)


def encode(message: ToChild | ToParent | PackedStep | WholeStep | PassedGenerate) -> bytes:
    body = _encoder.encode(message)
    return HEADER.pack(len(body)) + body


def pack(progress: Portion | Progress) -> msgspec.Raw:
    return msgspec.Raw(_encoder.encode(progress))


def unpack(progress: msgspec.Raw) -> Progress:
    return _progress.decode(progress)


def readable(progress: msgspec.Raw) -> Progress:
    """The same; where it cannot be read, the end of its generation."""
    try:
        return unpack(progress)
    except DECODE_ERRORS as error:
        return Progress(head_of(progress).id, ended=True, failure=_unreadable(error))


def head_of(progress: msgspec.Raw) -> Head:
    return _head.decode(progress)


def _unreadable(error: Exception) -> Failure:
    log.error("what the engine told cannot be read", exc_info=error)
    return Failure.of(failed(error))


def _sendable(text: str) -> str:
    """Half characters, which a request may have brought, cannot be encoded."""
    return str(text).encode("utf-8", "replace").decode()


def decode_to_child(body: bytes) -> ToChild:
    message: ToChild = _to_child.decode(body)
    return message


def decode_to_parent(body: bytes) -> ToParent:
    message: ToParent = _to_parent.decode(body)
    return message


def decode_to_passer(body: bytes) -> ToPasser:
    """The same without looking into the parts of a step."""
    message: ToPasser = _to_passer.decode(body)
    return message


def decode_in_parts(body: bytes, error: Exception) -> PackedStep | Answer:
    """What could not be decoded as a whole, because of an error."""
    message: PackedStep | AnswerHead = _parts.decode(body)
    return message if isinstance(message, PackedStep) else Answer(message.id, failure=_unreadable(error))
