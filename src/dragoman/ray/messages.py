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
    emits_tool_calls: bool

    @classmethod
    def of(cls, engine: Engine) -> "EngineInfo":
        return cls(tuple(engine.models()), engine.supports(), engine.device, engine.emits_tool_calls)


encode = msgspec.msgpack.Encoder().encode
_question: msgspec.msgpack.Decoder[Question] = msgspec.msgpack.Decoder(Question)
decode_question = _question.decode
decode_request = msgspec.msgpack.Decoder(GenerationRequest).decode
decode_event_batch = msgspec.msgpack.Decoder(EventBatch).decode
decode_answer = msgspec.msgpack.Decoder(Answer).decode
decode_engine_info = msgspec.msgpack.Decoder(EngineInfo).decode
