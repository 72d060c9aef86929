"""Defines the messages between the app and a replica, in MessagePack like those of a worker (see `worker_messages`).

    app -> replica   a GenerationRequest, answered by a stream of `EventBatch`
                     a Question, answered by an `Answer`
                     an empty message, answered by `EngineInfo`

Errors travel as a `Failure`, because Ray would lose their fields.
"""

from collections.abc import Sequence

import msgspec

from dragoman.core.engine import Engine, ModelInfo
from dragoman.core.events import Event
from dragoman.core.request import GenerationRequest
from dragoman.ipc.worker_messages import Answer, Failure, Question


class EventBatch(msgspec.Struct, frozen=True, array_like=True):
    """Events that became ready together; a failure ends the stream."""

    events: Sequence[Event] = ()
    failure: Failure | None = None


class EngineInfo(msgspec.Struct, frozen=True):
    """Describes an engine."""

    models: tuple[ModelInfo, ...]
    supports: frozenset[str]
    device: str
    tells_calls: bool

    @classmethod
    def of(cls, engine: Engine) -> "EngineInfo":
        return cls(tuple(engine.models()), engine.supports(), engine.device, engine.tells_calls)


encode = msgspec.msgpack.Encoder().encode
_request = msgspec.msgpack.Decoder(GenerationRequest)
_question: msgspec.msgpack.Decoder[Question] = msgspec.msgpack.Decoder(Question)
_event_batch = msgspec.msgpack.Decoder(EventBatch)
_answer = msgspec.msgpack.Decoder(Answer)
_engine_info = msgspec.msgpack.Decoder(EngineInfo)


def decode_request(body: bytes) -> GenerationRequest:
    return _request.decode(body)


def decode_question(body: bytes) -> Question:
    return _question.decode(body)


def decode_event_batch(body: bytes) -> EventBatch:
    return _event_batch.decode(body)


def decode_answer(body: bytes) -> Answer:
    return _answer.decode(body)


def decode_engine_info(body: bytes) -> EngineInfo:
    return _engine_info.decode(body)
