"""Handlers for stored responses: show, stream, list input items, delete and cancel.

Rules
1. The responses of another principal do not exist for a caller.
2. A stream of events can be read again while it runs and afterwards, from any event on. It ends with the last event of
   the response, or without one if the response was deleted.
3. Only background responses can be cancelled. The reply to `cancel` is the response, also if it had ended before.
"""

import msgspec

from dragoman.core.errors import BadRequest, NotFound, UnsupportedParameter, quote
from dragoman.protocols.responses import items as wire_items
from dragoman.protocols.responses import stored as wire
from dragoman.server.app import App
from dragoman.server.base_app import RESPONSES_PATH, BaseApp
from dragoman.server.http_exchange import HttpExchange
from dragoman.storage.response_values import StoredResponse

INPUT_ITEMS, CANCEL = "input_items", "cancel"
CANCELLED = "the response was cancelled"


async def show(app: BaseApp, exchange: HttpExchange) -> None:
    """Send a response, the events of its stream, or its input items."""
    response_id, below = _split(exchange)
    included = read_included(app, exchange)
    if below == INPUT_ITEMS:
        page = wire_items.decode_page(exchange.query())
        found = await app.responses.find_items(exchange.record.principal, response_id)
        if found is None:
            raise _not_found(response_id)
        items = [(item.id, wire.include_in_item(item.body, included)) for item in found.input]
        await exchange.response.send_json(wire_items.encode_page(items, page))
        return
    if below:
        raise exchange.not_found_error()
    query = wire.decode_response_query(exchange.query())
    if query.stream and exchange.method == "GET":
        exchange.skip_body()
        await send_events(app, exchange, response_id, query.after)
        return
    stored = await _find(app, exchange, response_id)
    await exchange.response.send_json(msgspec.Raw(wire.include_in_response(stored.body, included)))


def read_included(app: BaseApp, exchange: HttpExchange) -> list[str]:
    """The parameter `include` of the query string."""
    included = exchange.query_list("include")
    unknown = wire.unknown_includes(included)
    if unknown and app.is_strict(exchange):
        raise UnsupportedParameter(f"{unknown[0]}: unknown value", param=unknown[0])
    exchange.response.ignore(unknown)
    return included


async def send_events(app: BaseApp, exchange: HttpExchange, response_id: str, after: int) -> None:
    """Stream the events of a response that come after this sequence number."""
    principal, response = exchange.record.principal, exchange.response
    page = await app.responses.read_events(principal, response_id, after)
    if page is None:
        raise _not_found(response_id)
    if page.has_ended and page.last < 0:
        message = "stream: the response has no events, because it was created without stream or background"
        raise BadRequest(message, param="stream")
    response.is_streaming = True
    while page is not None:
        if page.frames or not response.is_started:
            await response.write(page.frames)
        if page.has_ended:
            break
        page = await app.responses.read_events(principal, response_id, page.last)
    await response.end(b"")


async def delete(app: App, exchange: HttpExchange) -> None:
    response_id, below = _split(exchange)
    if below:
        raise exchange.not_found_error()
    if not await app.responses.delete(exchange.record.principal, response_id):
        raise _not_found(response_id)
    await app.background.cancel(response_id)
    await exchange.response.send_json(wire.encode_deleted(response_id))


async def cancel(app: App, exchange: HttpExchange) -> None:
    response_id, below = _split(exchange)
    if below != CANCEL:
        raise exchange.not_found_error()
    stored = await _find(app, exchange, response_id)
    if not stored.is_background:
        raise BadRequest("only a background response can be cancelled; close the connection of any other one")
    if stored.is_running:
        await app.background.cancel(response_id)
        # Another server may run it, or its end could not be stored.
        await app.responses.end_early(response_id, "cancelled", "", CANCELLED)
        stored = await _find(app, exchange, response_id)
    await exchange.response.send_json(msgspec.Raw(stored.body))


async def _find(app: BaseApp, exchange: HttpExchange, response_id: str) -> StoredResponse:
    stored = await app.responses.find(exchange.record.principal, response_id)
    if stored is None:
        raise _not_found(response_id)
    return stored


def _split(exchange: HttpExchange) -> tuple[str, str]:
    """The id of the response, and the rest of the path."""
    response_id, _, below = exchange.path.removeprefix(f"{RESPONSES_PATH}/").partition("/")
    return response_id, below


def _not_found(response_id: str) -> NotFound:
    return NotFound(f"response {quote(response_id)} is not stored here")
