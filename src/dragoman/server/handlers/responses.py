"""Handlers that create responses. `stored_responses` has those for the responses that exist.

Rules
1. A complete response is stored before its end is sent (see `response_recorder`).
2. The responses and conversations of another principal do not exist for a caller.
3. The size limit of a body applies to the whole conversation, including stored items.
4. A background response is answered at once. The server then sends itself the same request as a job of the caller. The
   id of the job is that of the response; the request that starts it has another one.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from functools import partial

import msgspec

from dragoman.core.errors import (
    BadRequest,
    ContextTooLong,
    NotFound,
    PreviousResponseNotFound,
    TooLarge,
    quote,
)
from dragoman.core.ids import new_id
from dragoman.protocols.json_body import LARGE_BODY
from dragoman.protocols.responses import encoder as wire_encoder
from dragoman.protocols.responses import server as wire
from dragoman.protocols.responses.compact_reply import CompactedEncoding
from dragoman.protocols.responses.items import PREFIX
from dragoman.protocols.responses.websocket import parse_create
from dragoman.server.app import App
from dragoman.server.auth.callers import SavedCaller
from dragoman.server.background import BackgroundRequest
from dragoman.server.base_app import BaseApp
from dragoman.server.handlers.generation import reply_to
from dragoman.server.handlers.stored_responses import send_events
from dragoman.server.handlers.tokens import count_prompt
from dragoman.server.handlers.websocket import warm_up
from dragoman.server.http.bodies import run_in_body_thread
from dragoman.server.http_exchange import HttpExchange
from dragoman.server.response_recorder import MANY_ITEMS, ResponseRecorder
from dragoman.storage.response_values import StoredItem, StoredResponse

STRICT = b"x-dragoman-strict"


async def create(app: BaseApp, exchange: HttpExchange) -> None:
    parse = wire.parse if exchange.response_cache is None else parse_create
    body = await exchange.read_body(app.settings.limits, parse)
    response_request = await _read_request(app, exchange, body)
    try:
        if not body.generates:
            await warm_up(app, exchange, response_request)
        elif response_request.context.is_background and exchange.job is None:
            await _start_background(app, exchange, body, response_request)
        else:
            await _generate(app, exchange, response_request)
    except ContextTooLong as error:
        # The engine does not know the name of this field.
        error.param = "input"
        raise


async def compact(app: BaseApp, exchange: HttpExchange) -> None:
    body = await exchange.read_body(app.settings.limits, wire.parse)
    response_request = await _read_request(app, exchange, body, compacts=True)
    try:
        await reply_to(app, exchange, response_request.request, CompactedEncoding(response_request.context))
    except ContextTooLong as error:
        error.param = "input"
        raise


async def _generate(app: BaseApp, exchange: HttpExchange, response_request: wire.ResponseRequest) -> None:
    context, request = response_request.context, response_request.request
    queued = None
    if context.is_background and exchange.job is not None and not exchange.job.is_batch:
        stored = await app.responses.find(exchange.record.principal, exchange.job.id)
        if stored is None or stored.status != "queued":
            raise NotFound("the response was cancelled or deleted")
        queued = stored.created
    encoding = wire_encoder.ResponseEncoding(context, time.time, queued)
    if not context.should_store and context.conversation is None and exchange.response_cache is None:
        await reply_to(app, exchange, request, encoding)
        return
    if context.must_store:
        await app.responses.check(exchange.record.principal)
    recorder = ResponseRecorder(app, exchange, encoding)
    try:
        await reply_to(app, exchange, request, recorder, recorder.store)
    except asyncio.CancelledError:
        await recorder.abort("cancelled")
        raise
    except Exception as error:
        await recorder.abort("failed", error)
        raise


async def _start_background(
    app: BaseApp, exchange: HttpExchange, body: wire.ParsedRequest, response_request: wire.ResponseRequest
) -> None:
    record, request = exchange.record, response_request.request
    identified = msgspec.structs.replace(request, id=new_id(PREFIX))
    encoding = wire_encoder.ResponseEncoding(response_request.context, time.time)
    response, frames = encoding.encode_queued(identified)
    queued = StoredResponse(
        *(identified.id, record.principal, float(encoding.created), "queued"),
        msgspec.json.encode(response),
        is_background=True,
    )
    again = msgspec.json.encode({**body.parsed, "stream": True})
    strict = exchange.headers.get(STRICT)
    saved = BackgroundRequest(SavedCaller.of(exchange.caller), request.model, again, strict)
    await app.background.start(queued, saved, frames)
    # The job is recorded, with the whole reply.
    exchange.response.recording = None
    if request.delivery.stream:
        await send_events(app, exchange, identified.id, -1)
    else:
        await exchange.response.send_json(response)


async def count(app: App, exchange: HttpExchange) -> None:
    body = await exchange.read_body(app.settings.limits, wire.parse)
    response_request = await _read_request(app, exchange, body)
    tokens = await count_prompt(app, exchange, response_request.request)
    await exchange.response.send_json(wire.encode_count(tokens))


async def _read_request(
    app: BaseApp, exchange: HttpExchange, body: wire.ParsedRequest, compacts: bool = False
) -> wire.ResponseRequest:
    earlier = await _read_history(app, exchange, body)
    referenced = await app.responses.items(exchange.record.principal, body.references)
    # An item that is referenced several times counts each time.
    exchange.weight += sum(len(referenced[item]) for item in body.references if item in referenced)
    exchange.weight += sum(len(item.body) for item in earlier)
    if exchange.weight > app.settings.limits.body_bytes:
        message = f"the conversation, including stored items, is larger than {app.settings.limits.body_bytes} bytes"
        raise TooLarge(message, param="input")
    decode = partial(_decode, body, earlier, referenced, compacts)
    # In a thread, other requests keep streaming.
    is_large = len(earlier) + len(body.items) > MANY_ITEMS or exchange.weight > LARGE_BODY
    return await run_in_body_thread(decode) if is_large else decode()


async def _read_history(app: BaseApp, exchange: HttpExchange, body: wire.ParsedRequest) -> tuple[StoredItem, ...]:
    """The stored items that the request continues."""
    principal = exchange.record.principal
    previous, conversation = body.fields.previous_response_id, body.conversation
    if conversation is not None:
        items = await app.responses.conversation_items(principal, conversation)
        if items is None:
            raise NotFound(f"conversation: {quote(conversation)} is not stored here", param="conversation")
        return items
    if previous is None:
        return ()
    cache = exchange.response_cache
    if cache is not None and (cached := cache.find(principal, previous)) is not None:
        return cached
    found = await app.responses.find_items(principal, previous)
    if found is None:
        message = f"previous_response_id: response {quote(previous)} is not stored; send the whole conversation"
        raise PreviousResponseNotFound(message, param="previous_response_id")
    if found.status not in ("completed", "incomplete"):
        message = f"previous_response_id: response {quote(previous)} is {found.status}, so it cannot be continued"
        raise BadRequest(message, param="previous_response_id")
    return found.input + found.output


def _decode(
    body: wire.ParsedRequest, earlier: Sequence[StoredItem], stored: Mapping[str, bytes], compacts: bool
) -> wire.ResponseRequest:
    referenced = {item: msgspec.json.decode(encoded) for item, encoded in stored.items()}
    return wire.decode(body, [msgspec.json.decode(item.body) for item in earlier], referenced, compacts)
