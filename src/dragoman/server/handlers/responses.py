"""Handlers for the Responses API: create responses, and read, delete and cancel stored ones.

Rules
1. A complete response is stored before its end is sent. A failed one is not stored.
2. The responses of another principal do not exist for a caller.
3. The size limit of a body applies to the whole conversation, including stored items.
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
from dragoman.server.base_app import BaseApp
from dragoman.server.handlers.generation import reply_to
from dragoman.server.handlers.tokens import count_prompt
from dragoman.server.http.bodies import run_in_body_thread
from dragoman.server.http_exchange import HttpExchange
from dragoman.server.routing import RESPONSES_PATH, not_found_error, upgrade_required
from dragoman.storage.base import StoredItem, StoredResponse

INPUT_ITEMS, CANCEL = "input_items", "cancel"
MANY_ITEMS = 500
"""Above this many items, work is done in a thread, even if they are small."""
T = TypeVar("T")


async def create(app: BaseApp, exchange: HttpExchange) -> None:
    question = await _read_question(app, exchange)
    encoder = responses.ResponseEncoding(question.context, time.time)
    store = partial(_store, app, exchange, question.context, encoder)
    try:
        await reply_to(app, exchange, question.request, encoder, store)
    except ContextTooLong as error:
        # The engine does not know the name of this field.
        error.param = "input"
        raise


async def count(app: App, exchange: HttpExchange) -> None:
    question = await _read_question(app, exchange)
    await exchange.response.send_json(responses.encode_count(await count_prompt(app, exchange, question.request)))


async def _read_question(app: BaseApp, exchange: HttpExchange) -> responses.ResponseRequest:
    body = await exchange.read_body(app.settings.limits, responses.parse)
    principal = exchange.record.principal
    earlier: tuple[StoredItem, ...] = ()
    previous = body.fields.previous_response_id
    if previous is not None:
        stored = await app.responses.find(principal, previous)
        if stored is None:
            message = f"previous_response_id: response {quote(previous)} is not stored; send the whole conversation"
            raise PreviousResponseNotFound(message, param="previous_response_id")
        earlier = stored.items
    referenced = await app.responses.items(principal, body.references)
    # An item that is referenced several times counts each time.
    exchange.weight += sum(len(referenced[item]) for item in body.references if item in referenced)
    exchange.weight += sum(len(item.body) for item in earlier)
    if exchange.weight > app.settings.limits.body_bytes:
        message = f"the conversation, including stored items, is larger than {app.settings.limits.body_bytes} bytes"
        raise TooLarge(message, param="input")
    sent = body.fields.input
    count = len(earlier) + (len(sent) if isinstance(sent, list) else 1)
    return await _run_maybe_in_thread(exchange, count, partial(_decode, body, earlier, referenced))


async def _run_maybe_in_thread(exchange: HttpExchange, items: int, make: Callable[[], T]) -> T:
    """Call `make`, for a large conversation in a thread, so that other requests keep streaming."""
    return await run_in_body_thread(make) if items > MANY_ITEMS or exchange.weight > LARGE_BODY else make()


def _decode(
    body: responses.ParsedRequest, earlier: Sequence[StoredItem], stored: Mapping[str, bytes]
) -> responses.ResponseRequest:
    referenced = {item: msgspec.json.decode(encoded) for item, encoded in stored.items()}
    return responses.decode(body, [msgspec.json.decode(item.body) for item in earlier], referenced)


async def _store(
    app: BaseApp, exchange: HttpExchange, context: responses.ResponseContext, encoder: responses.ResponseEncoding
) -> None:
    response = encoder.response
    if response is None or not context.should_store:
        return
    make = partial(_stored_response, response, context, exchange.record.principal)
    await app.responses.keep(await _run_maybe_in_thread(exchange, len(context.items), make))


def _stored_response(response: dict[str, Any], context: responses.ResponseContext, principal: str) -> StoredResponse:
    return StoredResponse(
        id=response["id"],
        principal=principal,
        body=msgspec.json.encode(response),
        input=_items(responses.storable_items(context.items, response["id"])),
        output=_items(response["output"]),
    )


def _items(items: list[dict[str, Any]]) -> tuple[StoredItem, ...]:
    return tuple(StoredItem(item["id"], msgspec.json.encode(item)) for item in items)


async def show(app: App, exchange: HttpExchange) -> None:
    """Send a stored response, or its input items."""
    response_id, below = _parse_path(exchange)
    if below not in ("", INPUT_ITEMS):
        raise not_found_error(exchange)
    stored = await _find(app, exchange, response_id)
    if below == INPUT_ITEMS:
        page = responses.decode_page(exchange.query())
        await exchange.response.send_json(responses.encode_page([(item.id, item.body) for item in stored.input], page))
        return
    if exchange.query().get("stream") == "true":
        raise NotSupported("stream: a stored response cannot be streamed", param="stream")
    await exchange.response.send_json(msgspec.Raw(stored.body))


async def delete(app: App, exchange: HttpExchange) -> None:
    response_id, below = _parse_path(exchange)
    if below:
        raise not_found_error(exchange)
    await _find(app, exchange, response_id)
    await app.responses.delete(exchange.record.principal, response_id)
    await exchange.response.send_json(responses.encode_deleted(response_id))


async def cancel(app: App, exchange: HttpExchange) -> None:
    response_id, below = _parse_path(exchange)
    if below != CANCEL:
        raise not_found_error(exchange)
    await _find(app, exchange, response_id)
    raise BadRequest("only a background response can be cancelled, and this one is complete")


def _parse_path(exchange: HttpExchange) -> tuple[str, str]:
    """The response id, and the rest of the path."""
    response_id, _, below = exchange.path.removeprefix(f"{RESPONSES_PATH}/").partition("/")
    return response_id, below


async def _find(app: App, exchange: HttpExchange, response_id: str) -> StoredResponse:
    stored = await app.responses.find(exchange.record.principal, response_id)
    if stored is None:
        raise NotFound(f"response {quote(response_id)} is not stored here")
    return stored


async def no_websocket(app: App, exchange: HttpExchange) -> None:
    """Refuse a WebSocket with 426; clients then use HTTP."""
    if exchange.headers.get(b"upgrade", b"").lower() != b"websocket":
        exchange.response.extra_headers.append((b"allow", b"POST"))
        raise MethodNotAllowed(f"{RESPONSES_PATH} takes POST, not {exchange.method}")
    exchange.response.extra_headers.append((b"upgrade", b"HTTP/1.1"))
    raise upgrade_required(RESPONSES_PATH)
