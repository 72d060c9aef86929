"""How many tokens a conversation would begin with, without answering it."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from dragoman.conversation import GenerationRequest
from dragoman.engines.interface import Engine
from dragoman.engines.run import call
from dragoman.errors import NotSupported
from dragoman.generate import check
from dragoman.protocols import messages
from dragoman.server.exchange import Exchange
from dragoman.server.respond import silent_engine

if TYPE_CHECKING:
    from dragoman.server.app import App


async def messages_count(app: "App", exchange: Exchange) -> None:
    await exchange.reply_json(messages.encode_count(await count(app, exchange, messages.decode_count)))


async def count(app: "App", exchange: Exchange, decode: Callable[[bytes], GenerationRequest]) -> int:
    """The tokens of the prompt of the request in the body, which is checked as it would be to be answered."""
    return await count_prompt(app, exchange, await exchange.decoded(app.settings.limits, decode))


async def count_prompt(app: "App", exchange: Exchange, decoded: GenerationRequest) -> int:
    model = app.catalog.resolve(decoded.model)
    exchange.record.model = model.name
    request = msgspec.structs.replace(decoded, id=exchange.record.id, model=model.name)
    engine = await model.host.ready()
    ignored = check(request, model.host.supports, app.is_strict(exchange))
    if ignored:
        exchange.ignore(ignored)
    exchange.expect(app.settings.limits.stall_seconds, silent_engine)
    return await prompt_tokens(engine, model.host.supports, request)


async def prompt_tokens(engine: Engine, supports: frozenset[str], request: GenerationRequest) -> int:
    if "count_tokens" in supports:
        return await call(engine.count_tokens, request)
    if "render" in supports:
        return len((await call(engine.render, request)).tokens)
    raise NotSupported(f"model '{request.model}' does not count its tokens")
