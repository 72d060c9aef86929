"""Requests about stored responses and conversations, and the replies to them."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from dragoman.core.errors import BadRequest, quote
from dragoman.core.request import Asked
from dragoman.protocols import json_body
from dragoman.protocols.responses import items, tools
from dragoman.protocols.responses.server import ENCRYPTED, INCLUDED, Metadata, check_metadata
from dragoman.protocols.sealed import Seal

MAX_DIGITS = 12


class ResponseQuery(msgspec.Struct, frozen=True):
    """The query string of `GET /v1/responses/{id}`. `after` is the sequence number of the last known event."""

    stream: bool = False
    after: int = -1


def decode_response_query(query: Mapping[str, str]) -> ResponseQuery:
    stream = query.get("stream", "false")
    if stream.lower() not in ("true", "false"):
        raise BadRequest("stream: expected true or false", param="stream")
    after = query.get("starting_after")
    if after is None:
        return ResponseQuery(stream.lower() == "true")
    if not (after.isascii() and after.isdigit() and len(after) <= MAX_DIGITS):
        raise BadRequest("starting_after: expected the sequence number of an event", param="starting_after")
    if stream.lower() != "true":
        raise BadRequest("starting_after: only with stream=true", param="starting_after")
    return ResponseQuery(stream=True, after=int(after))


def unknown_includes(included: Sequence[str]) -> list[str]:
    """The parameters that name nothing that can be included."""
    return [f"include[{at}]" for at, name in enumerate(included) if name not in INCLUDED]


def include_in_item(body: bytes, included: Sequence[str]) -> bytes:
    """The JSON of an item with what was asked for besides. What was not stored cannot be included."""
    if ENCRYPTED not in included:
        return body
    item = msgspec.json.decode(body)
    return msgspec.json.encode(item) if _encrypt(item) else body


def include_in_response(body: bytes, included: Sequence[str]) -> bytes:
    if ENCRYPTED not in included:
        return body
    response = msgspec.json.decode(body)
    # All items, not only up to the first one.
    changes = [_encrypt(item) for item in response["output"]]
    return msgspec.json.encode(response) if any(changes) else body


def _encrypt(item: dict[str, Any]) -> bool:
    """Add the encrypted content of an item of reasoning; return whether there was something to add."""
    if item.get("type") != "reasoning" or item.get("encrypted_content"):
        return False
    item["encrypted_content"] = Seal.REASONING.seal("".join([part["text"] for part in item.get("content") or ()]))
    return True


class ConversationFields(msgspec.Struct, frozen=True):
    items: list[dict[str, Any]] | None = None
    metadata: Metadata | None = None


class ConversationChanges(msgspec.Struct, frozen=True):
    metadata: Metadata


class NewItems(msgspec.Struct, frozen=True):
    items: list[dict[str, Any]]


class DecodedConversation(msgspec.Struct, frozen=True):
    """Its `items` are those of the request."""

    metadata: Mapping[str, str]
    items: Sequence[Mapping[str, Any]]
    unknown: Sequence[str]
    """Fields that have no effect."""


def decode_conversation(body: bytes) -> DecodedConversation:
    """Decode the request to create a conversation. Its body may be empty."""
    parsed = json_body.parse(body or b"{}")
    fields = json_body.convert(parsed, ConversationFields)
    metadata = fields.metadata or {}
    check_metadata(metadata)
    return DecodedConversation(
        metadata, _check_items(fields.items or ()), json_body.unknown_fields(parsed, ConversationFields)
    )


def decode_changes(body: bytes) -> DecodedConversation:
    parsed = json_body.parse(body)
    fields = json_body.convert(parsed, ConversationChanges)
    check_metadata(fields.metadata)
    return DecodedConversation(fields.metadata, (), json_body.unknown_fields(parsed, ConversationChanges))


def decode_new_items(body: bytes) -> DecodedConversation:
    parsed = json_body.parse(body)
    fields = json_body.convert(parsed, NewItems)
    if not fields.items:
        raise BadRequest("items: at least one item is required", param="items")
    return DecodedConversation({}, _check_items(fields.items), json_body.unknown_fields(parsed, NewItems))


def _check_items(sent: Iterable[dict[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Check items as they are checked in a request, so that a conversation can always be continued."""
    located = items.locate(list(sent), "items")
    for path, kind, _ in located:
        if kind == "item_reference":
            raise BadRequest(f"{path}: send the item itself, not a reference", param=f"{path}.type")
        if not items.is_known(kind):
            raise BadRequest(f"{path}.type: unknown type {quote(kind)} of an item", param=f"{path}.type")
    asked: list[Asked] = []
    items.decode(items.window(located), tools.decode((), items.tools_of(located), asked), asked)
    return [item for _, _, item in located]


def encode_conversation(conversation_id: str, created: float, metadata: bytes) -> dict[str, Any]:
    return {
        "id": conversation_id,
        "object": "conversation",
        "created_at": int(created),
        "metadata": msgspec.Raw(metadata),
    }


def encode_deleted_conversation(conversation_id: str) -> dict[str, Any]:
    return {"id": conversation_id, "object": "conversation.deleted", "deleted": True}


def encode_deleted(response_id: str) -> dict[str, Any]:
    return {"id": response_id, "object": "response", "deleted": True}
