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
from dragoman.protocols.json_body import LARGE_BODY
from dragoman.protocols.responses import encoder as wire_encoder
from dragoman.protocols.responses import items as wire_items
from dragoman.protocols.responses import server as wire
from dragoman.server.app import App
from dragoman.server.base_app import RESPONSES_PATH, BaseApp, upgrade_required
from dragoman.server.handlers.generation import reply_to
from dragoman.server.handlers.tokens import count_prompt
from dragoman.server.http.bodies import run_in_body_thread
from dragoman.server.http_exchange import HttpExchange
from dragoman.storage.response_store import StoredItem, StoredResponse

INPUT_ITEMS = "input_items"
MANY_ITEMS = 500
"""Above this many items, work is done in a thread, even if they are small."""
T = TypeVar("T")


async def create(app: BaseApp, exchange: HttpExchange) -> None:
    response_request = await _read_request(app, exchange)
    encoder = wire_encoder.ResponseEncoding(response_request.context, time.time)
    store = partial(_store, app, exchange, response_request.context, encoder)
    try:
        await reply_to(app, exchange, response_request.request, encoder, store)
    except ContextTooLong as error:
        # The engine does not know the name of this field.
        error.param = "input"
        raise


async def count(app: App, exchange: HttpExchange) -> None:
    response_request = await _read_request(app, exchange)
    tokens = await count_prompt(app, exchange, response_request.request)
    await exchange.response.send_json(wire_encoder.encode_count(tokens))


async def _read_request(app: BaseApp, exchange: HttpExchange) -> wire.ResponseRequest:
    body = await exchange.read_body(app.settings.limits, wire.parse)
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
    count = len(earlier) + len(body.items)
    return await _run_maybe_in_thread(exchange, count, partial(_decode, body, earlier, referenced))


async def _run_maybe_in_thread(exchange: HttpExchange, items: int, make: Callable[[], T]) -> T:
    """Call `make`, for a large conversation in a thread, so that other requests keep streaming."""
    return await run_in_body_thread(make) if items > MANY_ITEMS or exchange.weight > LARGE_BODY else make()


def _decode(
    body: wire.ParsedRequest, earlier: Sequence[StoredItem], stored: Mapping[str, bytes]
) -> wire.ResponseRequest:
    referenced = {item: msgspec.json.decode(encoded) for item, encoded in stored.items()}
    return wire.decode(body, [msgspec.json.decode(item.body) for item in earlier], referenced)


async def _store(
    app: BaseApp, exchange: HttpExchange, context: wire.ResponseContext, encoder: wire_encoder.ResponseEncoding
) -> None:
    response = encoder.response
    if response is None or not context.should_store:
        return

    def encode() -> StoredResponse:
        return StoredResponse(
            id=response["id"],
            principal=exchange.record.principal,
            body=msgspec.json.encode(response),
            input=_items(wire_items.storable_items(context.items, response["id"])),
            output=_items(response["output"]),
        )

    await app.responses.keep(await _run_maybe_in_thread(exchange, len(context.items), encode))


def _items(items: list[dict[str, Any]]) -> tuple[StoredItem, ...]:
    return tuple(StoredItem(item["id"], msgspec.json.encode(item)) for item in items)


async def show(app: App, exchange: HttpExchange) -> None:
    """Send a stored response, or its input items."""
    stored, below = await _find(app, exchange, "", INPUT_ITEMS)
    if below == INPUT_ITEMS:
        page = wire_items.decode_page(exchange.query())
        await exchange.response.send_json(wire_items.encode_page([(item.id, item.body) for item in stored.input], page))
        return
    if exchange.query().get("stream") == "true":
        raise NotSupported("stream: a stored response cannot be streamed", param="stream")
    await exchange.response.send_json(msgspec.Raw(stored.body))


async def delete(app: App, exchange: HttpExchange) -> None:
    stored, _ = await _find(app, exchange, "")
    await app.responses.delete(stored.principal, stored.id)
    await exchange.response.send_json(wire_encoder.encode_deleted(stored.id))


async def cancel(app: App, exchange: HttpExchange) -> None:
    await _find(app, exchange, "cancel")
    raise BadRequest("only a background response can be cancelled, and this one is complete")


async def _find(app: App, exchange: HttpExchange, *expected: str) -> tuple[StoredResponse, str]:
    """The stored response that the path names, and the rest of the path, which must be one of the expected ones."""
    response_id, _, below = exchange.path.removeprefix(f"{RESPONSES_PATH}/").partition("/")
    if below not in expected:
        raise exchange.not_found_error()
    stored = await app.responses.find(exchange.record.principal, response_id)
    if stored is None:
        raise NotFound(f"response {quote(response_id)} is not stored here")
    return stored, below


async def no_websocket(app: App, exchange: HttpExchange) -> None:
    """Refuse a WebSocket with 426; clients then use HTTP."""
    if exchange.headers.get(b"upgrade", b"").lower() != b"websocket":
        exchange.response.extra_headers.append((b"allow", b"POST"))
        raise MethodNotAllowed(f"{RESPONSES_PATH} takes POST, not {exchange.method}")
    exchange.response.extra_headers.append((b"upgrade", b"HTTP/1.1"))
    raise upgrade_required(RESPONSES_PATH)
