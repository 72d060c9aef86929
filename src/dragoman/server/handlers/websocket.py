"""Handlers for the WebSocket of `/v1/responses`: its handshake, and the requests that generate nothing."""

import time

import msgspec

from dragoman.core.errors import MethodNotAllowed
from dragoman.core.events import Started
from dragoman.protocols.responses.encoder import ResponseEncoder, ResponseEncoding
from dragoman.protocols.responses.items import storable_items
from dragoman.protocols.responses.server import ResponseRequest
from dragoman.server.base_app import RESPONSES_PATH, BaseApp
from dragoman.server.handlers.generation import find_model
from dragoman.server.http_exchange import HttpExchange
from dragoman.server.response_recorder import encode_items


async def connect(app: BaseApp, exchange: HttpExchange) -> None:
    """Accept a WebSocket. Its requests are authenticated again, one by one."""
    if not exchange.is_websocket:
        exchange.response.extra_headers.append((b"allow", b"POST"))
        raise MethodNotAllowed(f"{RESPONSES_PATH} takes POST, not {exchange.method}")
    app.check_origin(exchange, "open WebSockets")
    await exchange.response.switch_protocol()


async def warm_up(app: BaseApp, exchange: HttpExchange, response_request: ResponseRequest) -> None:
    """Load the model, and remember the input for the next request. The response has no output and is not stored."""
    context, request, record = response_request.context, response_request.request, exchange.record
    # There is nothing to play again.
    exchange.response.recording = None
    lease = app.model_lease(exchange)
    try:
        info = await find_model(app, exchange, lease, request.model, request.asked)
        await lease.load()
    finally:
        lease.close()
    identified = msgspec.structs.replace(request, id=record.id, model=info.model)
    encoder = ResponseEncoder(ResponseEncoding(context, time.time), identified)
    frames = encoder.feed(0, [Started()]) + encoder.end()
    items = encode_items(storable_items(context.items, record.id))
    assert exchange.response_cache is not None
    exchange.response_cache.remember(record.principal, record.id, items)
    await exchange.response.write(frames)
    await exchange.response.end(b"")
