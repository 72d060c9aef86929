"""What a conversation would begin with, without answering it: its prompt, or how many tokens that has."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec

from dragoman.core.engine import Engine
from dragoman.core.errors import NotSupported
from dragoman.core.request import GenerationRequest
from dragoman.pipeline.event_stream import call
from dragoman.pipeline.generate import check
from dragoman.protocols import messages
from dragoman.protocols.registry import PROTOCOLS
from dragoman.protocols.tokenize import encode_prompt
from dragoman.server.app import App
from dragoman.server.handlers.generation import silent_engine
from dragoman.server.http_exchange import Exchange


async def render(app: App, exchange: Exchange) -> None:
    decoded = await exchange.decoded(app.settings.limits, PROTOCOLS["chat"].decode)
    async with _prepared(app, exchange, decoded) as (engine, supports, request):
        if "render" not in supports:
            raise NotSupported(f"model '{request.model}' does not tell its prompts")
        shown = await call(engine.render, request)
    await exchange.reply_json(encode_prompt(request.model, shown.text, shown.tokens, shown.format))


async def messages_count(app: App, exchange: Exchange) -> None:
    decoded = await exchange.decoded(app.settings.limits, messages.decode_count)
    await exchange.reply_json(messages.encode_count(await count_prompt(app, exchange, decoded)))


async def count_prompt(app: App, exchange: Exchange, decoded: GenerationRequest) -> int:
    async with _prepared(app, exchange, decoded) as (engine, supports, request):
        if "count_tokens" in supports:
            return await call(engine.count_tokens, request)
        if "render" in supports:
            return len((await call(engine.render, request)).tokens)
        raise NotSupported(f"model '{request.model}' does not count its tokens")


@asynccontextmanager
async def _prepared(
    app: App, exchange: Exchange, decoded: GenerationRequest
) -> AsyncIterator[tuple[Engine, frozenset[str], GenerationRequest]]:
    """The engine, what it supports and what it is asked, checked as it would be to be answered."""
    model = await app.model(exchange, decoded.model)
    request = msgspec.structs.replace(decoded, id=exchange.record.id, model=model.name)
    async with model.host.engaged() as engine:
        ignored = check(model.name, request.asked, model.host.supports, app.is_strict(exchange))
        if ignored:
            exchange.ignore(ignored)
        exchange.expect(app.settings.limits.stall_seconds, silent_engine)
        yield engine, model.host.supports, request
