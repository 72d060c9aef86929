"""Handlers that render prompts, count tokens, tokenize and detokenize. They need the engine, but no slot."""

from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager

import msgspec

from dragoman.core.engine import Engine, RenderedPrompt, call_engine
from dragoman.core.errors import NotSupported
from dragoman.core.features import Feature
from dragoman.core.request import Asked, GenerationRequest
from dragoman.pipeline.context_edits import clear_context
from dragoman.pipeline.token_counter import TokenCounter
from dragoman.protocols import tokenize as wire_tokens
from dragoman.protocols.messages import server as messages
from dragoman.protocols.registry import PROTOCOLS
from dragoman.server.app import App
from dragoman.server.handlers.generation import find_model, http_fields, ignore
from dragoman.server.http_exchange import HttpExchange
from dragoman.server.model_lease import LeaseInfo
from dragoman.server.request_timer import stall_error
from dragoman.server.request_tools import RequestTools


async def render(app: App, exchange: HttpExchange) -> None:
    decoded = await exchange.read_body(app.settings.limits, PROTOCOLS["chat"].decode)
    async with _engine(app, exchange, decoded.model, decoded.asked, decoded.extra) as (engine, info):
        shown = await _render(app, exchange, engine, _complete(decoded, exchange, info))
    await exchange.response.send_json(wire_tokens.encode_prompt(info.model, shown.text, shown.tokens, shown.format))


async def _render(app: App, exchange: HttpExchange, engine: Engine, request: GenerationRequest) -> RenderedPrompt:
    if Feature.RENDER not in engine.supports():
        raise NotSupported(f"model '{request.model}' cannot show its prompts")
    rendered = await call_engine(engine.render, request)
    if rendered.ignored:
        ignore(app, exchange, rendered.ignored)
    return rendered


async def chat_count(app: App, exchange: HttpExchange) -> None:
    decoded = await exchange.read_body(app.settings.limits, PROTOCOLS["chat"].decode)
    await exchange.response.send_json(messages.encode_count(await count_prompt(app, exchange, decoded)))


async def messages_count(app: App, exchange: HttpExchange) -> None:
    """Count the prompt as it would be after the edits, except for compactions: those need the model."""
    decoded = await exchange.read_body(app.settings.limits, messages.decode_count)
    async with _engine(app, exchange, decoded.model, decoded.asked, decoded.extra) as (engine, info):
        request = _complete(decoded, exchange, info)
        tokens = await _count(app, exchange, engine, request)
        if not decoded.edits:
            await exchange.response.send_json(messages.encode_count(tokens))
            return
        long = msgspec.structs.replace(request, edits=decoded.edits)
        edited, applied = await clear_context(long, TokenCounter(engine, info.model))
        remaining = await _count(app, exchange, engine, edited) if applied else tokens
    await exchange.response.send_json(messages.encode_count(remaining, tokens))


async def count_prompt(app: App, exchange: HttpExchange, decoded: GenerationRequest) -> int:
    if decoded.tool_servers:
        tools = RequestTools(app.tool_servers, decoded, exchange.record.id, exchange.record.principal)
        await tools.list_tools()
        decoded = tools.complete(decoded)
    async with _engine(app, exchange, decoded.model, decoded.asked, decoded.extra) as (engine, info):
        return await _count(app, exchange, engine, _complete(decoded, exchange, info))


async def _count(app: App, exchange: HttpExchange, engine: Engine, request: GenerationRequest) -> int:
    if Feature.RENDER in engine.supports():
        return len((await _render(app, exchange, engine, request)).tokens)
    if Feature.COUNT_TOKENS in engine.supports():
        return await call_engine(engine.count_tokens, request)
    raise NotSupported(f"model '{request.model}' does not count its tokens")


def _complete(decoded: GenerationRequest, exchange: HttpExchange, info: LeaseInfo) -> GenerationRequest:
    return msgspec.structs.replace(decoded, **http_fields(exchange, decoded, info), model=info.model, edits=())


async def tokenize(app: App, exchange: HttpExchange) -> None:
    decoded = await exchange.read_body(app.settings.limits, wire_tokens.decode_tokenize)
    async with _engine(app, exchange, decoded.fields.model or "", decoded.asked) as (engine, info):
        tokens = await _tokenize(app, exchange, engine, info, decoded)
        wants_texts = decoded.asks_for(Feature.TOKEN_TEXTS) and Feature.TOKEN_TEXTS in engine.supports()
        texts = await call_engine(engine.token_texts, tokens) if wants_texts else None
        context = engine.model_info(info.model).context
    await exchange.response.send_json(wire_tokens.encode_tokens(decoded, tokens, context, texts))


async def _tokenize(
    app: App, exchange: HttpExchange, engine: Engine, info: LeaseInfo, decoded: wire_tokens.TokenizeRequest
) -> Sequence[int]:
    if decoded.chat is not None:
        return (await _render(app, exchange, engine, _complete(decoded.chat, exchange, info))).tokens
    _check_tokenizer(engine, info.model)
    adds_special = decoded.asks_for(Feature.ADD_SPECIAL) and Feature.ADD_SPECIAL in engine.supports()
    method = engine.tokenize_text if adds_special else engine.tokenize
    return await call_engine(method, decoded.text, bool(decoded.fields.parse_special))


async def detokenize(app: App, exchange: HttpExchange) -> None:
    decoded = await exchange.read_body(app.settings.limits, wire_tokens.decode_detokenize)
    async with _engine(app, exchange, decoded.model or "") as (engine, info):
        _check_tokenizer(engine, info.model)
        text = await call_engine(engine.detokenize, decoded.tokens)
    await exchange.response.send_json(wire_tokens.encode_text(text))


def _check_tokenizer(engine: Engine, model: str) -> None:
    if Feature.TOKENIZE not in engine.supports():
        raise NotSupported(f"model '{model}' cannot tokenize")


@asynccontextmanager
async def _engine(
    app: App, exchange: HttpExchange, name: str, asked: tuple[Asked, ...] = (), extra: Iterable[str] = ()
) -> AsyncIterator[tuple[Engine, LeaseInfo]]:
    """The engine and the model, with a running stall timer."""
    lease = app.model_lease(exchange)
    try:
        info = await find_model(app, exchange, lease, name, asked, extra=extra)
        engine = await lease.start_without_slot()
        exchange.timer.expect(app.settings.limits.stall_seconds, stall_error)
        yield engine, info
    finally:
        lease.close()
