"""The routes of responses: those that answer look up and keep, the others show what was kept.

Rules
1. A response is kept when it is complete, before the caller hears that it is; one that failed is not.
2. What belongs to another principal is not there.
3. A conversation is no larger than a body may be, whether it was sent or kept.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import msgspec

from dragoman.core.errors import (
    BadRequest,
    ContextTooLong,
    MethodNotAllowed,
    NotFound,
    NotSupported,
    PreviousResponseNotFound,
    TooLarge,
    quote,
)
from dragoman.protocols import responses
from dragoman.protocols.json_body import LARGE_BODY
from dragoman.server.app import App
from dragoman.server.base_app import Door
from dragoman.server.handlers.generation import reply_to
from dragoman.server.handlers.prompts import count_prompt
from dragoman.server.http.bodies import run_in_body_thread
from dragoman.server.http.websocket import RESPONSES_PATH, upgrade_required
from dragoman.server.http_exchange import Exchange
from dragoman.storage.base import KeptItem, KeptResponse

INPUT_ITEMS, CANCEL = "input_items", "cancel"
MANY_ITEMS = 500
"""Small items take longer than their bytes tell."""
T = TypeVar("T")


async def create(door: Door, exchange: Exchange) -> None:
    question = await _question(door, exchange)
    telling = responses.Telling(question.shown, time.time)
    settle = partial(_settle, door, exchange, question.shown, telling)
    try:
        await reply_to(door, exchange, question.request, telling, settle)
    except ContextTooLong as error:
        # An engine cannot know what the conversation is called here.
        error.param = "input"
        raise


async def count(app: App, exchange: Exchange) -> None:
    question = await _question(app, exchange)
    await exchange.reply_json(responses.encode_count(await count_prompt(app, exchange, question.request)))


async def _question(door: Door, exchange: Exchange) -> responses.Question:
    asking = await exchange.decoded(door.settings.limits, responses.read)
    principal = exchange.record.principal
    earlier: tuple[KeptItem, ...] = ()
    previous = asking.fields.previous_response_id
    if previous is not None:
        kept = await door.responses.find(principal, previous)
        if kept is None:
            words = f"previous_response_id: no response {quote(previous)} is kept here; send the whole conversation"
            raise PreviousResponseNotFound(words, param="previous_response_id")
        earlier = kept.items
    found = await door.responses.items(principal, asking.references)
    # One item may be referred to many times, and is there as many times then.
    exchange.weight += sum(len(found[item]) for item in asking.references if item in found)
    exchange.weight += sum(len(item.body) for item in earlier)
    if exchange.weight > door.settings.limits.body_bytes:
        words = f"the conversation, with what it refers to, is larger than {door.settings.limits.body_bytes} bytes"
        raise TooLarge(words, param="input")
    given = asking.fields.input
    count = len(earlier) + (len(given) if isinstance(given, list) else 1)
    return await _made(exchange, count, partial(_decoded, asking, earlier, found))


async def _made(exchange: Exchange, items: int, make: Callable[[], T]) -> T:
    """What is made of a large conversation is made in a thread, so that meanwhile others stream."""
    return await run_in_body_thread(make) if items > MANY_ITEMS or exchange.weight > LARGE_BODY else make()


def _decoded(asking: responses.Asking, earlier: Sequence[KeptItem], found: Mapping[str, bytes]) -> responses.Question:
    referenced = {item: msgspec.json.decode(body) for item, body in found.items()}
    return responses.decode(asking, [msgspec.json.decode(item.body) for item in earlier], referenced)


async def _settle(door: Door, exchange: Exchange, shown: responses.Shown, telling: responses.Telling) -> None:
    response = telling.response
    if response is None or not shown.keep:
        return
    make = partial(_to_keep, response, shown, exchange.record.principal)
    await door.responses.keep(await _made(exchange, len(shown.items), make))


def _to_keep(response: dict[str, Any], shown: responses.Shown, principal: str) -> KeptResponse:
    return KeptResponse(
        id=response["id"],
        principal=principal,
        body=msgspec.json.encode(response),
        input=_items(responses.kept_items(shown.items, response["id"])),
        output=_items(response["output"]),
    )


def _items(items: list[dict[str, Any]]) -> tuple[KeptItem, ...]:
    return tuple(KeptItem(item["id"], msgspec.json.encode(item)) for item in items)


async def show(app: App, exchange: Exchange) -> None:
    """A response, or what it answered."""
    response_id, below = _named(exchange)
    if below not in ("", INPUT_ITEMS):
        raise NotFound(f"there is nothing at {exchange.path[:100]}")
    kept = await _kept(app, exchange, response_id)
    if below == INPUT_ITEMS:
        page = responses.decode_page(exchange.query())
        await exchange.reply_json(responses.encode_page([(item.id, item.body) for item in kept.input], page))
        return
    if exchange.query().get("stream") == "true":
        raise NotSupported("stream: a response that was kept is shown whole", param="stream")
    await exchange.reply_json(msgspec.Raw(kept.body))


async def delete(app: App, exchange: Exchange) -> None:
    response_id, below = _named(exchange)
    if below:
        raise NotFound(f"there is nothing at {exchange.path[:100]}")
    await _kept(app, exchange, response_id)
    await app.responses.delete(exchange.record.principal, response_id)
    await exchange.reply_json(responses.encode_deleted(response_id))


async def cancel(app: App, exchange: Exchange) -> None:
    response_id, below = _named(exchange)
    if below != CANCEL:
        raise NotFound(f"there is nothing at {exchange.path[:100]}")
    await _kept(app, exchange, response_id)
    raise BadRequest("only a background response can be cancelled, and this one is complete")


def _named(exchange: Exchange) -> tuple[str, str]:
    """The id in the path, and what follows it."""
    response_id, _, below = exchange.path.removeprefix(f"{RESPONSES_PATH}/").partition("/")
    return response_id, below


async def _kept(app: App, exchange: Exchange, response_id: str) -> KeptResponse:
    kept = await app.responses.find(exchange.record.principal, response_id)
    if kept is None:
        raise NotFound(f"no response {quote(response_id)} is kept here")
    return kept


async def no_websocket(app: App, exchange: Exchange) -> None:
    """A client that would rather talk through a WebSocket turns to HTTP when it hears this."""
    if exchange.headers.get(b"upgrade", b"").lower() != b"websocket":
        exchange.extra_headers.append((b"allow", b"POST"))
        raise MethodNotAllowed(f"{RESPONSES_PATH} takes POST, not {exchange.method}")
    exchange.extra_headers.append((b"upgrade", b"HTTP/1.1"))
    raise upgrade_required(RESPONSES_PATH)
