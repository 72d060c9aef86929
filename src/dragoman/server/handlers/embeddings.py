"""Handlers for embeddings and reranking.

A long list of inputs goes to the engine in batches, one after the other. So other requests run in between, and a
disconnect stops the work.
"""

import asyncio
import re
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import msgspec

from dragoman.core.embeddings import Embedding, EmbeddingRequest, Input, RerankRequest
from dragoman.core.engine import EmbedFunction
from dragoman.core.errors import BadRequest, EngineFailed, NotSupported
from dragoman.core.events import Usage
from dragoman.models import ServedModel
from dragoman.models.admission import Slots
from dragoman.pipeline.event_stream import call_engine
from dragoman.pipeline.generate import check_features
from dragoman.protocols.embeddings import server as wire_embeddings
from dragoman.protocols.rerank import server as wire_rerank
from dragoman.server.app import App
from dragoman.server.auth.quotas import estimate_text_tokens
from dragoman.server.handlers.generation import stall_error
from dragoman.server.http_exchange import HttpExchange

BATCH_INPUTS = 64
BATCH_SIZE = 8 * 1024
"""Characters or token ids."""
INPUT = re.compile(r"input\[(?P<at>\d+)\]")
"""The name of an input in an engine's error."""


async def embeddings(app: App, exchange: HttpExchange) -> None:
    decoded = await exchange.read_body(app.settings.limits, wire_embeddings.decode)
    model = await app.model(exchange, decoded.model)
    request = msgspec.structs.replace(decoded, model=model.name)
    vectors = await _embed(app, exchange, model, request, partial(wire_embeddings.input_path, request))
    await exchange.response.send_json(await asyncio.to_thread(wire_embeddings.encode_reply, request, vectors))


async def rerank(app: App, exchange: HttpExchange) -> None:
    decoded = await exchange.read_body(app.settings.limits, wire_rerank.decode)
    model = await app.model(exchange, decoded.model)
    request = msgspec.structs.replace(decoded, model=model.name)
    vectors = await _embed(app, exchange, model, request, wire_rerank.input_path)
    request_id = exchange.record.id
    await exchange.response.send_json(await asyncio.to_thread(wire_rerank.encode_reply, request, request_id, vectors))


async def _embed(
    app: App,
    exchange: HttpExchange,
    model: ServedModel,
    request: EmbeddingRequest | RerankRequest,
    field_of: Callable[[int], str],
) -> list[Embedding]:
    """Compute the vectors of all inputs while holding a slot of the model. `field_of` names the field of an input."""
    lease = app.quota_lease_of(exchange)
    if lease is not None:
        lease.reserve(estimate_text_tokens(exchange.weight))
    host = model.host
    engine = None if host.is_known else await host.enter()
    slots = Slots(host.admission, exchange.record.principal)
    vectors: list[Embedding] = []
    try:
        if "embeddings" not in host.supports:
            raise NotSupported(f"model '{model.name}' does not support embeddings", param="model")
        ignored = check_features(model.name, request.asked, host.supports, app.is_strict(exchange))
        if ignored:
            exchange.response.ignore(ignored)
        await slots.acquire_first()
        engine = engine or await host.enter()
        exchange.timer.expect(app.settings.limits.stall_seconds, stall_error)
        for batch in batches(request.inputs):
            with _renamed_fields(field_of, len(vectors)):
                vectors += await _embed_batch(engine.embed_function_for(model.name), batch)
            if isinstance(request, EmbeddingRequest):
                _check_dimensions(request, vectors[0])
            exchange.timer.note_progress()
    finally:
        slots.close()
        if engine is not None:
            host.leave()
    exchange.record.count(Usage(prompt=sum(entry.tokens for entry in vectors)))
    return vectors


@contextmanager
def _renamed_fields(field_of: Callable[[int], str], first: int) -> Generator[None, None, None]:
    """In errors, replace the index within the batch, which starts at `first`, by the field of the request."""
    try:
        yield
    except BadRequest as error:
        match = INPUT.fullmatch(error.param or "")
        if match:
            error.param = field_of(first + int(match["at"]))
        raise


async def _embed_batch(embed: EmbedFunction, inputs: Sequence[Input]) -> Sequence[Embedding]:
    vectors = await call_engine(embed, inputs)
    if len(vectors) != len(inputs) or len({entry.dimensions for entry in vectors}) != 1 or not vectors[0].vector:
        raise EngineFailed("the engine did not return one vector per input")
    return vectors


def _check_dimensions(request: EmbeddingRequest, vector: Embedding) -> None:
    if request.dimensions is not None and request.dimensions > vector.dimensions:
        message = f"dimensions: model '{request.model}' has {vector.dimensions}, fewer than {request.dimensions}"
        raise BadRequest(message, param="dimensions")


def batches(inputs: Sequence[Input]) -> Iterator[Sequence[Input]]:
    """Split the inputs into batches, in order. An input larger than `BATCH_SIZE` is a batch of its own."""
    batch: list[Input] = []
    size = 0
    for entry in inputs:
        if batch and (len(batch) == BATCH_INPUTS or size + len(entry) > BATCH_SIZE):
            yield batch
            batch, size = [], 0
        batch.append(entry)
        size += len(entry)
    yield batch
