"""Handlers that render prompts, count tokens, tokenize and detokenize."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec

from dragoman.core.engine import Engine
from dragoman.core.errors import NotSupported
from dragoman.core.request import GenerationRequest
from dragoman.models import ServedModel
from dragoman.pipeline.event_stream import call_engine
from dragoman.pipeline.generate import check_features
from dragoman.protocols import messages
from dragoman.protocols import tokenize as wire_tokens
from dragoman.protocols.registry import PROTOCOLS
from dragoman.protocols.tokenize import encode_prompt
from dragoman.server.app import App
from dragoman.server.handlers.generation import stall_error
from dragoman.server.http_exchange import HttpExchange


async def render(app: App, exchange: HttpExchange) -> None:
    decoded = await exchange.read_body(app.settings.limits, PROTOCOLS["chat"].decode)
    async with _prepare(app, exchange, decoded) as (engine, supports, request):
        if "render" not in supports:
            raise NotSupported(f"model '{request.model}' cannot show its prompts")
        shown = await call_engine(engine.render, request)
    await exchange.response.send_json(encode_prompt(request.model, shown.text, shown.tokens, shown.format))


async def messages_count(app: App, exchange: HttpExchange) -> None:
    decoded = await exchange.read_body(app.settings.limits, messages.decode_count)
    await exchange.response.send_json(messages.encode_count(await count_prompt(app, exchange, decoded)))


async def count_prompt(app: App, exchange: HttpExchange, decoded: GenerationRequest) -> int:
    async with _prepare(app, exchange, decoded) as (engine, supports, request):
        if "count_tokens" in supports:
            return await call_engine(engine.count_tokens, request)
        if "render" in supports:
            return len((await call_engine(engine.render, request)).tokens)
        raise NotSupported(f"model '{request.model}' does not count its tokens")


@asynccontextmanager
async def _prepare(
    app: App, exchange: HttpExchange, decoded: GenerationRequest
) -> AsyncIterator[tuple[Engine, frozenset[str], GenerationRequest]]:
    """The engine, its features and the request, checked as for a generation."""
    model = await app.model(exchange, decoded.model)
    request = msgspec.structs.replace(decoded, id=exchange.record.id, model=model.name)
    async with model.host.use_engine() as engine:
        ignored = check_features(model.name, request.asked, model.host.supports, app.is_strict(exchange))
        if ignored:
            exchange.response.ignore(ignored)
        exchange.timer.expect(app.settings.limits.stall_seconds, stall_error)
        yield engine, model.host.supports, request


async def tokenize(app: App, exchange: HttpExchange) -> None:
    decoded = await exchange.read_body(app.settings.limits, wire_tokens.decode_tokenize)
    async with _tokenizer(app, exchange, decoded.model) as (model, engine):
        tokens = await call_engine(engine.tokenize, decoded.text, decoded.special)
        context = model.info.context
    await exchange.response.send_json(wire_tokens.encode_tokens(tokens, context))


async def detokenize(app: App, exchange: HttpExchange) -> None:
    decoded = await exchange.read_body(app.settings.limits, wire_tokens.decode_detokenize)
    async with _tokenizer(app, exchange, decoded.model) as (_, engine):
        text = await call_engine(engine.detokenize, decoded.tokens)
    await exchange.response.send_json(wire_tokens.encode_text(text))


@asynccontextmanager
async def _tokenizer(app: App, exchange: HttpExchange, name: str) -> AsyncIterator[tuple[ServedModel, Engine]]:
    """The model and its engine, if it can tokenize, with a running stall timer."""
    model = await app.model(exchange, name)
    async with model.host.use_engine() as engine:
        if "tokenize" not in model.host.supports:
            raise NotSupported(f"model '{model.name}' cannot tokenize")
        exchange.timer.expect(app.settings.limits.stall_seconds, stall_error)
        yield model, engine
