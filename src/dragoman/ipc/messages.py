"""Defines the messages between the server, the workers that run its engines, and its front ends.

    parent -> worker   `Start`, then `Generate` | `Cancel` | `MethodCall`; the end of the connection ends the worker
    worker -> parent   `Loading`*, `EngineInfo` | `StartFailed`, then `Step` | `MethodResult`

A `Step` carries everything that became ready since the previous one, for all generations. Front ends and replicas of
Ray Serve pass the same calls on (see `frontends.messages` and `ray.engine`).

Engine output is validated when it is decoded, not when it is encoded. If a step cannot be decoded as a whole, its parts
are decoded one by one, and an invalid part fails only its own request. The value of a `MethodResult` is decoded by its
receiver for the same reason.
"""

import logging
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from dragoman.core.engine import Engine, ModelInfo, list_models
from dragoman.core.errors import (
    DECODE_ERRORS,
    ConfigError,
    ContextTooLong,
    DragomanError,
    ModelFailed,
    engine_failure,
    error_class,
)
from dragoman.core.events import Event
from dragoman.core.request import GenerationRequest
from dragoman.ipc.framing import encode_body

log = logging.getLogger("dragoman.ipc")
T = TypeVar("T")

KEY_BITS = 32
"""Low bits of the key of a call: a counter. The bits above are the number of the process that counts."""
OWN_NUMBER = 1
"""Process number of the worker's parent."""
NIL = msgspec.Raw(b"\xc0")


class ProcessMessage(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass


class Failure(msgspec.Struct, frozen=True):
    """An error in transit to another process."""

    name: str
    message: str
    param: str | None = None
    retry_after: float | None = None
    tokens: int | None = None
    limit: int | None = None
    cause: str | None = None
    """Why a model could not be loaded, for the log."""

    @classmethod
    def of(cls, error: Exception) -> "Failure":
        """Log an unexpected error and hide its message."""
        if not isinstance(error, DragomanError):
            log.error("the engine raised", exc_info=error)
            error = engine_failure(error)
        param = None if error.param is None else _encodable(error.param)
        lengths = (error.tokens, error.limit) if isinstance(error, ContextTooLong) else (None, None)
        cause = _encodable(str(error.__cause__)) if isinstance(error, ModelFailed) and error.__cause__ else None
        return cls(type(error).__name__, _encodable(error.message), param, error.retry_after, *lengths, cause)

    def error(self) -> DragomanError:
        error = error_class(self.name)(self.message, param=self.param)
        error.retry_after = self.retry_after
        if isinstance(error, ContextTooLong):
            error.tokens, error.limit = self.tokens, self.limit
        if self.cause is not None:
            error.__cause__ = ConfigError(self.cause)
        return error


def _encodable(text: str) -> str:
    """Replace lone surrogates, which cannot be encoded."""
    return str(text).encode("utf-8", "replace").decode()


class Start(ProcessMessage, frozen=True):
    engine: str
    name: str
    options: Mapping[str, Any]


class Loading(ProcessMessage, frozen=True):
    """The loaded fraction of the model, from 0 to 1."""

    progress: float


class EngineInfo(ProcessMessage, frozen=True):
    """Describes an engine that is loaded."""

    models: tuple[ModelInfo, ...]
    supports: frozenset[str] = frozenset()
    device: str = "cpu"
    slots: int | None = None
    emits_tool_calls: bool = False
    reads_fields: tuple[str, ...] = ()
    reads_headers: tuple[str, ...] = ()

    @classmethod
    def of(cls, engine: Engine) -> "EngineInfo":
        return cls(
            models=list_models(engine),
            supports=engine.supports(),
            device=engine.device,
            slots=engine.slots,
            emits_tool_calls=engine.emits_tool_calls,
            reads_fields=tuple(engine.reads_fields),
            reads_headers=tuple(engine.reads_headers),
        )


class StartFailed(ProcessMessage, frozen=True):
    """The engine could not be loaded. After a configuration error a retry does not help."""

    reason: str
    is_config_error: bool


class Generate(ProcessMessage, frozen=True, tag="Generate"):
    key: int
    request: GenerationRequest


class RawGenerate(ProcessMessage, frozen=True, tag="Generate"):
    """A `Generate` as a forwarding process reads it, with the request still encoded."""

    key: int
    request: msgspec.Raw


class Cancel(ProcessMessage, frozen=True):
    key: int


class MethodCall(ProcessMessage, frozen=True):
    """A call of a method, answered by one `MethodResult`."""

    key: int
    method: str
    arguments: msgspec.Raw


class MethodResult(ProcessMessage, frozen=True):
    key: int
    value: msgspec.Raw = NIL
    failure: Failure | None = None

    def decode(self, value_type: type[T]) -> T:
        """Return the value or raise the failure."""
        if self.failure is not None:
            raise self.failure.error()
        try:
            return msgspec.msgpack.decode(self.value, type=value_type)
        except DECODE_ERRORS as error:
            raise _decode_failure(error).error() from error


class GenerationProgress(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """New events of one generation; `ended` marks the last message for it."""

    key: int
    events: tuple[Event, ...] = ()
    ended: bool = False
    failure: Failure | None = None


class ProgressHead(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The part of a `GenerationProgress` that a forwarding process decodes."""

    key: int
    events: msgspec.Raw
    ended: bool


class Step(ProcessMessage, frozen=True, tag="Step"):
    progress: tuple[GenerationProgress, ...]
    kv_used: float | None = None


class PackedStep(ProcessMessage, frozen=True, tag="Step"):
    """A `Step` whose parts are encoded, as it is sent and as a forwarding process reads it."""

    progress: tuple[msgspec.Raw, ...]
    kv_used: float | None = None


class Ping(ProcessMessage, frozen=True):
    """Check that the other process still answers."""


class Pong(ProcessMessage, frozen=True):
    pass


Call = Generate | Cancel | MethodCall
ToWorker = Start | Call
ToParent = Loading | EngineInfo | StartFailed | Step | MethodResult
ToForwarder = Loading | EngineInfo | StartFailed | PackedStep | MethodResult

_to_worker: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)
_to_parent: msgspec.msgpack.Decoder[ToParent] = msgspec.msgpack.Decoder(ToParent)
_to_forwarder: msgspec.msgpack.Decoder[ToForwarder] = msgspec.msgpack.Decoder(ToForwarder)
decode_to_worker = _to_worker.decode
decode_to_parent = _to_parent.decode
decode_to_forwarder = _to_forwarder.decode
"""Decodes a message but leaves the parts of a step encoded."""
decode_packed_step = msgspec.msgpack.Decoder(PackedStep).decode
decode_progress_head = msgspec.msgpack.Decoder(ProgressHead).decode
decode_request = msgspec.msgpack.Decoder(GenerationRequest).decode
unpack = msgspec.msgpack.Decoder(GenerationProgress).decode


def pack(value: object) -> msgspec.Raw:
    """Encode a part of a message."""
    return msgspec.Raw(encode_body(value))


def decode_progress(part: msgspec.Raw) -> GenerationProgress:
    """Decode a part; an invalid one becomes the failed end of its generation."""
    try:
        return unpack(part)
    except DECODE_ERRORS as error:
        return GenerationProgress(decode_progress_head(part).key, ended=True, failure=_decode_failure(error))


def _decode_failure(error: Exception) -> Failure:
    log.error("engine output cannot be decoded", exc_info=error)
    return Failure.of(engine_failure(error))
