"""Handlers for embeddings and reranking.

A long list of inputs goes to the engine in batches, one after the other. So other requests run in between, and a
disconnect stops the work.
"""

import asyncio
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeVar

import msgspec

from dragoman.core.embeddings import Embedding, EmbeddingRequest, Input, RerankRequest
from dragoman.core.engine import EmbedFunction, call_engine
from dragoman.core.errors import BadRequest, EngineFailed, NotSupported
from dragoman.core.events import Usage
from dragoman.core.features import Feature
from dragoman.protocols import embeddings as wire_embeddings
from dragoman.protocols import rerank as wire_rerank
from dragoman.server.app import App
from dragoman.server.auth.callers import Estimate, estimate_text_tokens
from dragoman.server.handlers.generation import find_model
from dragoman.server.http_exchange import HttpExchange
from dragoman.server.request_timer import stall_error

RequestT = TypeVar("RequestT", EmbeddingRequest, RerankRequest)
BATCH_INPUTS = 64
BATCH_SIZE = 8 * 1024
"""Characters or token ids."""
INPUT = re.compile(r"input\[(?P<at>\d+)\]")
"""The name of an input in an engine's error."""


async def embeddings(app: App, exchange: HttpExchange) -> None:
    decoded = await exchange.read_body(app.settings.limits, wire_embeddings.decode)
    request, vectors = await _embed(app, exchange, decoded, partial(wire_embeddings.input_path, decoded))
    await exchange.response.send_json(await asyncio.to_thread(wire_embeddings.encode_reply, request, vectors))


async def rerank(app: App, exchange: HttpExchange) -> None:
    decoded = await exchange.read_body(app.settings.limits, wire_rerank.decode)
    request, vectors = await _embed(app, exchange, decoded, wire_rerank.input_path)
    request_id = exchange.record.id
    await exchange.response.send_json(await asyncio.to_thread(wire_rerank.encode_reply, request, request_id, vectors))


async def _embed(
    app: App, exchange: HttpExchange, decoded: RequestT, field_of: Callable[[int], str]
) -> tuple[RequestT, list[Embedding]]:
    """The request with the name of its model, and the vectors of all inputs. `field_of` names the field of an input."""
    lease = app.model_lease(exchange)
    vectors: list[Embedding] = []
    try:
        estimate = Estimate(estimate_text_tokens(exchange.weight), choices=0, reply=None)
        info = await find_model(app, exchange, lease, decoded.model, decoded.asked, estimate)
        if Feature.EMBEDDINGS not in lease.supports:
            raise NotSupported(f"model '{info.model}' does not support embeddings", param="model")
        request = msgspec.structs.replace(decoded, model=info.model)
        embed = (await lease.start()).embed_function_for(info.model)
        exchange.timer.expect(app.settings.limits.stall_seconds, stall_error)
        for batch in batches(request.inputs):
            embedded = await _embed_batch(embed, batch, len(vectors), field_of)
            exchange.record.count(Usage(prompt=sum(entry.tokens for entry in embedded)))
            vectors += embedded
            if isinstance(request, EmbeddingRequest):
                _check_dimensions(request, vectors[0])
            exchange.timer.note_progress()
    finally:
        lease.close()
    return request, vectors


async def _embed_batch(
    embed: EmbedFunction, inputs: Sequence[Input], first: int, field_of: Callable[[int], str]
) -> Sequence[Embedding]:
    try:
        vectors = await call_engine(embed, inputs)
    except BadRequest as error:
        # The engine names an input by its index in the batch, which starts at `first`.
        match = INPUT.fullmatch(error.param or "")
        if match:
            error.param = field_of(first + int(match["at"]))
        raise
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
