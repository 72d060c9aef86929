"""The routes that make vectors: embeddings, and documents ranked by how alike they are to a query.

A long list of texts goes to the engine in parts: one after the other, so that others have their turns in between, and
a client that leaves stops the work.
"""

import asyncio
import re
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import msgspec

from dragoman.core.embeddings import Embedding, EmbeddingRequest, Input, RerankRequest
from dragoman.core.engine import MakeVectors
from dragoman.core.errors import BadRequest, EngineFailed, NotSupported
from dragoman.core.events import Usage
from dragoman.models import Model
from dragoman.models.admission import Slots
from dragoman.pipeline.event_stream import call
from dragoman.pipeline.generate import check
from dragoman.protocols.embeddings import server as wire_embeddings
from dragoman.protocols.rerank import server as wire_rerank
from dragoman.server.app import App
from dragoman.server.auth.token_estimate import estimated_text
from dragoman.server.handlers.generation import silent_engine
from dragoman.server.http_exchange import Exchange

PART_INPUTS = 64
PART_SIZE = 8 * 1024
"""Characters or token ids."""
INPUT = re.compile(r"input\[(?P<at>\d+)\]")
"""As an engine names one."""


async def embeddings(app: App, exchange: Exchange) -> None:
    decoded = await exchange.decoded(app.settings.limits, wire_embeddings.decode)
    model = await app.model(exchange, decoded.model)
    request = msgspec.structs.replace(decoded, model=model.name)
    made = await _embed(app, exchange, model, request, partial(wire_embeddings.place, request))
    await exchange.reply_json(await asyncio.to_thread(wire_embeddings.encode_reply, request, made))


async def rerank(app: App, exchange: Exchange) -> None:
    decoded = await exchange.decoded(app.settings.limits, wire_rerank.decode)
    model = await app.model(exchange, decoded.model)
    request = msgspec.structs.replace(decoded, model=model.name)
    made = await _embed(app, exchange, model, request, wire_rerank.place)
    request_id = exchange.record.id
    await exchange.reply_json(await asyncio.to_thread(wire_rerank.encode_reply, request, request_id, made))


async def _embed(
    app: App,
    exchange: Exchange,
    model: Model,
    request: EmbeddingRequest | RerankRequest,
    place: Callable[[int], str],
) -> list[Embedding]:
    """The vectors of all inputs; the request holds a slot of its model meanwhile, as a generation does. `place` tells
    where an input stands in the request."""
    lease = app.lease_of(exchange)
    if lease is not None:
        lease.reserve(estimated_text(exchange.weight))
    host = model.host
    engine = None if host.is_known else await host.enter()
    slots = Slots(host.admission, exchange.record.principal)
    made: list[Embedding] = []
    try:
        if "embeddings" not in host.supports:
            raise NotSupported(f"model '{model.name}' makes no embeddings", param="model")
        ignored = check(model.name, request.asked, host.supports, app.is_strict(exchange))
        if ignored:
            exchange.ignore(ignored)
        await slots.first()
        engine = engine or await host.enter()
        exchange.expect(app.settings.limits.stall_seconds, silent_engine)
        for part in parts(request.inputs):
            with _placed(place, len(made)):
                made += await _made(engine.vectors_of(model.name), part)
            if isinstance(request, EmbeddingRequest):
                _check_dimensions(request, made[0])
            exchange.note_progress()
    finally:
        slots.close()
        if engine is not None:
            host.leave()
    exchange.record.count(Usage(prompt=sum(entry.tokens for entry in made)))
    return made


@contextmanager
def _placed(place: Callable[[int], str], begin: int) -> Generator[None, None, None]:
    """An engine counts what it was given; the caller knows all that was sent."""
    try:
        yield
    except BadRequest as error:
        told = INPUT.fullmatch(error.param or "")
        if told:
            error.param = place(begin + int(told["at"]))
        raise


async def _made(make: MakeVectors, inputs: Sequence[Input]) -> Sequence[Embedding]:
    made = await call(make, inputs)
    if len(made) != len(inputs) or len({entry.dimensions for entry in made}) != 1 or not made[0].vector:
        raise EngineFailed("the engine made something else than one vector for each input")
    return made


def _check_dimensions(request: EmbeddingRequest, made: Embedding) -> None:
    if request.dimensions is not None and request.dimensions > made.dimensions:
        words = f"dimensions: the vectors of model '{request.model}' have {made.dimensions}, not {request.dimensions}"
        raise BadRequest(words, param="dimensions")


def parts(inputs: Sequence[Input]) -> Iterator[Sequence[Input]]:
    """The inputs in their order, a few at a time; one that is large by itself is a part of its own."""
    part: list[Input] = []
    size = 0
    for entry in inputs:
        if part and (len(part) == PART_INPUTS or size + len(entry) > PART_SIZE):
            yield part
            part, size = [], 0
        part.append(entry)
        size += len(entry)
    yield part
