"""What goes between the app and a replica: MessagePack, as between the server and a worker (see `worker.messages`).

    app -> replica   a GenerationRequest, answered by a stream of `Told`
                     a Question, answered by an `Answer`
                     nothing, answered by the `Facts`

Errors go as a `Failure`: as Ray would carry them, they would lose what they say.
"""

from collections.abc import Sequence

import msgspec

from dragoman.core.engine import Engine, ModelInfo
from dragoman.core.events import Event
from dragoman.core.request import GenerationRequest
from dragoman.ipc.worker_messages import Answer, Failure, Question


class Told(msgspec.Struct, frozen=True, array_like=True):
    """What became ready together. A failure is the last thing that is told."""

    events: Sequence[Event] = ()
    failure: Failure | None = None


class Facts(msgspec.Struct, frozen=True):
    """What an engine says of itself."""

    models: tuple[ModelInfo, ...]
    supports: frozenset[str]
    device: str
    tells_calls: bool

    @classmethod
    def of(cls, engine: Engine) -> "Facts":
        return cls(tuple(engine.models()), engine.supports(), engine.device, engine.tells_calls)


encode = msgspec.msgpack.Encoder().encode
_request = msgspec.msgpack.Decoder(GenerationRequest)
_question: msgspec.msgpack.Decoder[Question] = msgspec.msgpack.Decoder(Question)
_told = msgspec.msgpack.Decoder(Told)
_answer = msgspec.msgpack.Decoder(Answer)
_facts = msgspec.msgpack.Decoder(Facts)


def decode_request(body: bytes) -> GenerationRequest:
    return _request.decode(body)


def decode_question(body: bytes) -> Question:
    return _question.decode(body)


def decode_told(body: bytes) -> Told:
    return _told.decode(body)


def decode_answer(body: bytes) -> Answer:
    return _answer.decode(body)


def decode_facts(body: bytes) -> Facts:
    return _facts.decode(body)
