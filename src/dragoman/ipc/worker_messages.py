"""Defines the messages between the server and a worker: four bytes of length, then MessagePack.

    parent -> worker   `Start`, then `Generate` | `CancelRequest` | `Question`; the end of the pipe ends the worker
    worker -> parent   `Loading`*, `Ready` | `StartFailed`, then `Step` | `Answer`

A `Step` carries everything that became ready since the previous one, for all requests.

Engine output is validated when it is decoded, not when it is encoded. If a message cannot be decoded as a whole, its
parts are decoded one by one, and an invalid part fails only its own request.
"""

import logging
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from dragoman.core.embeddings import Embedding, Input
from dragoman.core.engine import ModelInfo, RenderedPrompt
from dragoman.core.errors import DECODE_ERRORS, ContextTooLong, DragomanError, error_class
from dragoman.core.events import Event
from dragoman.core.request import GenerationRequest
from dragoman.engines.step_delivery import RequestUpdate
from dragoman.pipeline.event_stream import engine_failure

log = logging.getLogger("dragoman.ipc")

HEADER = struct.Struct("<I")
KEY_BITS = 32
"""Low bits of a generation key: a counter. The bits above are the number of the process that counts."""
OWN_NUMBER = 1
"""Process number of the worker's parent."""


class Start(msgspec.Struct, frozen=True, tag=True):
    engine: str
    name: str
    options: Mapping[str, Any]


class Generate(msgspec.Struct, frozen=True, tag="Generate"):
    id: int
    request: GenerationRequest


class RawGenerate(msgspec.Struct, frozen=True, tag="Generate"):
    """A `Generate` of a front end, with the request already encoded."""

    id: int
    request: msgspec.Raw


class CancelRequest(msgspec.Struct, frozen=True, tag=True):
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
    """The loaded fraction of the model, from 0 to 1."""

    progress: float


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The engine is loaded; describes it."""

    models: tuple[ModelInfo, ...]
    supports: frozenset[str]
    device: str
    slots: int | None


class StartFailed(msgspec.Struct, frozen=True, tag=True):
    """The engine could not be loaded. After a configuration error a retry does not help."""

    reason: str
    is_config_error: bool


class Failure(msgspec.Struct, frozen=True):
    """An error in transit to another process."""

    name: str
    message: str
    param: str | None = None
    retry_after: float | None = None
    tokens: int | None = None
    limit: int | None = None

    @classmethod
    def of(cls, error: DragomanError) -> "Failure":
        param = None if error.param is None else _encodable(error.param)
        lengths = (error.tokens, error.limit) if isinstance(error, ContextTooLong) else ()
        return cls(type(error).__name__, _encodable(error.message), param, error.retry_after, *lengths)

    def error(self) -> DragomanError:
        error = error_class(self.name)(self.message, param=self.param)
        error.retry_after = self.retry_after
        if isinstance(error, ContextTooLong):
            error.tokens, error.limit = self.tokens, self.limit
        return error


class GenerationProgress(msgspec.Struct, frozen=True, array_like=True):
    """New events of one request; `ended` marks the last message for it."""

    id: int
    events: tuple[Event, ...] = ()
    ended: bool = False
    failure: Failure | None = None


class ProgressHead(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The part of a `GenerationProgress` that a forwarding process decodes."""

    id: int
    events: msgspec.Raw
    ended: bool


class Step(msgspec.Struct, frozen=True, tag="Step"):
    progress: tuple[GenerationProgress, ...]
    kv_used: float | None = None


class PackedStep(msgspec.Struct, frozen=True, tag="Step"):
    """A `Step` whose parts are encoded, as the worker sends it and as a forwarding parent reads it."""

    progress: tuple[msgspec.Raw, ...]
    kv_used: float | None = None


class UnpackedStep(msgspec.Struct, frozen=True, tag="Step"):
    """A `Step` with the unencoded output of an engine that works in steps."""

    progress: Sequence[RequestUpdate | GenerationProgress]
    kv_used: float | None = None


class Answer(msgspec.Struct, frozen=True, tag="Answer"):
    id: int
    tokens: tuple[int, ...] | None = None
    text: str | None = None
    rendered: RenderedPrompt | None = None
    count: int | None = None
    embeddings: tuple[Embedding, ...] | None = None
    failure: Failure | None = None


class AnswerHead(msgspec.Struct, frozen=True, tag="Answer"):
    """The request id of an `Answer` that cannot be decoded as a whole."""

    id: int


Question = Render | CountTokens | Tokenize | Detokenize | Embed
"""A message that gets one `Answer`."""
ToWorker = Start | Generate | CancelRequest | Question
ToParent = Loading | Ready | StartFailed | Step | Answer
ToForwarder = Loading | Ready | StartFailed | PackedStep | Answer

_encoder = msgspec.msgpack.Encoder()
_to_child: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)
_to_parent: msgspec.msgpack.Decoder[ToParent] = msgspec.msgpack.Decoder(ToParent)
_to_forwarder: msgspec.msgpack.Decoder[ToForwarder] = msgspec.msgpack.Decoder(ToForwarder)
_parts: msgspec.msgpack.Decoder[PackedStep | AnswerHead] = msgspec.msgpack.Decoder(PackedStep | AnswerHead)
decode_to_worker = _to_child.decode
decode_to_parent = _to_parent.decode
decode_to_forwarder = _to_forwarder.decode
"""Decodes a message but leaves the parts of a step encoded."""
decode_progress_head = msgspec.msgpack.Decoder(ProgressHead).decode
unpack = msgspec.msgpack.Decoder(GenerationProgress).decode


def encode(message: ToWorker | ToParent | PackedStep | UnpackedStep | RawGenerate) -> bytes:
    body = _encoder.encode(message)
    return HEADER.pack(len(body)) + body


def pack(progress: RequestUpdate | GenerationProgress) -> msgspec.Raw:
    return msgspec.Raw(_encoder.encode(progress))


def decode_progress(progress: msgspec.Raw) -> GenerationProgress:
    """Decode a part; an invalid one becomes the failed end of its generation."""
    try:
        return unpack(progress)
    except DECODE_ERRORS as error:
        return GenerationProgress(decode_progress_head(progress).id, ended=True, failure=_decode_failure(error))


def _decode_failure(error: Exception) -> Failure:
    log.error("engine output cannot be decoded", exc_info=error)
    return Failure.of(engine_failure(error))


def _encodable(text: str) -> str:
    """Replace lone surrogates, which cannot be encoded."""
    return str(text).encode("utf-8", "replace").decode()


def decode_in_parts(body: bytes, error: Exception) -> PackedStep | Answer:
    """Decode a message that failed to decode as a whole with `error`."""
    message = _parts.decode(body)
    return message if isinstance(message, PackedStep) else Answer(message.id, failure=_decode_failure(error))
