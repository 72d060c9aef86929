"""Handlers for conversations, as in OpenAI's API.

    /v1/conversations                   POST creates one
    /v1/conversations/{id}              GET, POST (its metadata), DELETE
    /v1/conversations/{id}/items        GET lists items, POST adds some
    /v1/conversations/{id}/items/{id}   GET, DELETE

Conversations of another principal do not exist for a caller.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from dragoman.core.errors import NotFound, UnsupportedParameter, quote
from dragoman.core.ids import new_id
from dragoman.protocols.responses import items as wire_items
from dragoman.protocols.responses import stored as wire
from dragoman.server.app import App
from dragoman.server.handlers.stored_responses import read_included
from dragoman.server.http_exchange import HttpExchange
from dragoman.storage.conversation_sql import StoredConversation
from dragoman.storage.response_values import StoredItem

PATH = "/v1/conversations"
ITEMS = "items"
T = TypeVar("T")


async def create(app: App, exchange: HttpExchange) -> None:
    decoded = await exchange.read_body(app.settings.limits, wire.decode_conversation)
    _ignore(app, exchange, decoded.unknown)
    metadata = msgspec.json.encode(decoded.metadata)
    made = await app.conversations.create(exchange.record.principal, metadata, _storable(decoded.items))
    await _send(exchange, made)


async def show(app: App, exchange: HttpExchange) -> None:
    """Send a conversation, a page of its items, or one of them."""
    conversation_id, below, item_id = _split(exchange)
    principal = exchange.record.principal
    if not below:
        await _send(exchange, _found(conversation_id, await app.conversations.find(principal, conversation_id)))
        return
    included = read_included(app, exchange)
    if not item_id:
        page = wire_items.decode_page(exchange.query())
        found = await app.conversations.page(principal, conversation_id, page.limit, page.order, page.after)
        listed, has_more = _found(conversation_id, found)
        items = [(item.id, wire.include_in_item(item.body, included)) for item in listed]
        await exchange.response.send_json(wire_items.encode_listed(items, has_more))
        return
    _found(conversation_id, await app.conversations.find(principal, conversation_id))
    body = await app.conversations.item(conversation_id, item_id)
    if body is None:
        raise _item_not_found(item_id)
    await exchange.response.send_json(msgspec.Raw(wire.include_in_item(body, included)))


async def change(app: App, exchange: HttpExchange) -> None:
    """Replace the metadata of a conversation, or add items."""
    conversation_id, below, item_id = _split(exchange)
    if item_id:
        raise exchange.not_found_error()
    await (_add_items if below else _set_metadata)(app, exchange, conversation_id)


async def _set_metadata(app: App, exchange: HttpExchange, conversation_id: str) -> None:
    decoded = await exchange.read_body(app.settings.limits, wire.decode_changes)
    _ignore(app, exchange, decoded.unknown)
    metadata = msgspec.json.encode(decoded.metadata)
    changed = await app.conversations.set_metadata(exchange.record.principal, conversation_id, metadata)
    await _send(exchange, _found(conversation_id, changed))


async def _add_items(app: App, exchange: HttpExchange, conversation_id: str) -> None:
    decoded = await exchange.read_body(app.settings.limits, wire.decode_new_items)
    _ignore(app, exchange, decoded.unknown)
    included = read_included(app, exchange)
    sent = _storable(decoded.items)
    added = _found(conversation_id, await app.conversations.append(exchange.record.principal, conversation_id, sent))
    items = [(item.id, wire.include_in_item(item.body, included)) for item in added]
    page = wire_items.PageFields(len(items), "asc")
    await exchange.response.send_json(wire_items.encode_page(items, page))


async def delete(app: App, exchange: HttpExchange) -> None:
    """Delete a conversation or one of its items."""
    conversation_id, below, item_id = _split(exchange)
    principal = exchange.record.principal
    if item_id:
        conversation = _found(conversation_id, await app.conversations.find(principal, conversation_id))
        if not await app.conversations.delete_item(principal, conversation_id, item_id):
            raise _item_not_found(item_id)
        await _send(exchange, conversation)
        return
    if below:
        raise exchange.not_found_error()
    if not await app.conversations.delete(principal, conversation_id):
        raise _not_found(conversation_id)
    await exchange.response.send_json(wire.encode_deleted_conversation(conversation_id))


def _split(exchange: HttpExchange) -> tuple[str, str, str]:
    """The ids of the conversation and of the item, and `items` between them, as far as the path has them."""
    conversation_id, _, rest = exchange.path.removeprefix(f"{PATH}/").partition("/")
    below, _, item_id = rest.partition("/")
    if below not in ("", ITEMS) or (item_id and not below) or rest.endswith("/"):
        raise exchange.not_found_error()
    return conversation_id, below, item_id


def _storable(items: Sequence[Mapping[str, Any]]) -> list[StoredItem]:
    complete = wire_items.storable_items(items, new_id(wire_items.PREFIX))
    return [StoredItem(item["id"], msgspec.json.encode(item)) for item in complete]


def _ignore(app: App, exchange: HttpExchange, unknown: Sequence[str]) -> None:
    if unknown and app.is_strict(exchange):
        raise UnsupportedParameter(f"{quote(unknown[0])}: unknown field", param=unknown[0])
    exchange.response.ignore(unknown)


async def _send(exchange: HttpExchange, conversation: StoredConversation) -> None:
    encoded = wire.encode_conversation(conversation.id, conversation.created, conversation.metadata)
    await exchange.response.send_json(encoded)


def _found(conversation_id: str, found: T | None) -> T:
    if found is None:
        raise _not_found(conversation_id)
    return found


def _not_found(conversation_id: str) -> NotFound:
    return NotFound(f"conversation {quote(conversation_id)} is not stored here")


def _item_not_found(item_id: str) -> NotFound:
    return NotFound(f"the conversation has no item {quote(item_id)}")
