"""Runs a request without a server."""

from collections.abc import Sequence

import msgspec

from dragoman.core.engine import Engine
from dragoman.core.events import Event, Finished, Started, TextDelta, TokenLogprob
from dragoman.core.reply import Reply, ReplyBuilder
from dragoman.core.request import GenerationRequest
from dragoman.models.admission import Admission, Slots
from dragoman.pipeline.generate import generate


async def whole(engine: Engine, request: GenerationRequest, admission: Admission | None = None) -> Reply:
    slots = Slots(admission or Admission(None, 0, 1), "alice")
    await slots.acquire_first()
    builder = ReplyBuilder()
    try:
        await generate(engine, request, slots, builder.add)
    finally:
        slots.close()
    return builder.reply()


class Collected(msgspec.Struct, frozen=True):
    """The events of one generation."""

    started: Started
    deltas: tuple[TextDelta, ...]
    finished: Finished

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(token for delta in self.deltas for token in delta.tokens)

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...]:
        return tuple(logprob for delta in self.deltas for logprob in delta.logprobs)


async def collect(engine: Engine, request: GenerationRequest) -> Collected:
    batches: list[Sequence[Event]] = []
    await engine.deliver(request, batches.append)
    assert all(batches)
    started, *deltas, finished = [event for batch in batches for event in batch]
    assert isinstance(started, Started)
    assert isinstance(finished, Finished)
    texts = tuple(delta for delta in deltas if isinstance(delta, TextDelta))
    assert len(texts) == len(deltas)
    return Collected(started, texts, finished)
