"""Completes items for storage and encodes pages of stored items.

stored := the item as it was sent, with a type, an id and a status, its content as parts
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from dragoman.core.errors import BadRequest, NotFound, quote
from dragoman.protocols.openai import decode_limit
from dragoman.protocols.responses.calls import PREFIXES
from dragoman.protocols.responses.encode import PREFIX
from dragoman.protocols.responses.items import CALLS, kind_of

MAX_LIMIT, DEFAULT_LIMIT = 100, 20
ID_PREFIXES = {kind: PREFIXES[call] for kind, call in CALLS.items()} | {
    "message": "msg_",
    "reasoning": "rs_",
    "function_call_output": "fco_",
    "custom_tool_call_output": "ctco_",
}
WITHOUT_STATUS = ("reasoning", "additional_tools", "compaction")


def storable_items(items: Iterable[Mapping[str, Any]], response_id: str) -> list[dict[str, Any]]:
    suffix = response_id.removeprefix(PREFIX)
    return [_stored_item(item, f"{suffix}_i{at}") for at, item in enumerate(items)]


def _stored_item(item: Mapping[str, Any], suffix: str) -> dict[str, Any]:
    kind = kind_of(item, "input")
    stored = {**item, "type": kind, "id": item.get("id") or ID_PREFIXES.get(kind, "item_") + suffix}
    if kind not in WITHOUT_STATUS:
        stored["status"] = item.get("status") or "completed"
    if kind == "reasoning":
        stored["summary"] = item.get("summary") or []
    if kind == "message":
        stored["content"] = _content(item)
    return stored


def _content(message: Mapping[str, Any]) -> list[Any]:
    content = message.get("content")
    if isinstance(content, list):
        return content
    if message.get("role") == "assistant":
        return [{"type": "output_text", "text": content or "", "annotations": [], "logprobs": []}]
    return [{"type": "input_text", "text": content or ""}]


class PageFields(msgspec.Struct, frozen=True):
    limit: int = DEFAULT_LIMIT
    order: Literal["asc", "desc"] = "desc"
    after: str | None = None


def decode_page(query: Mapping[str, str]) -> PageFields:
    limit, order = decode_limit(query, DEFAULT_LIMIT, MAX_LIMIT), query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise BadRequest("order: expected asc or desc", param="order")
    return PageFields(limit, "asc" if order == "asc" else "desc", query.get("after"))


def encode_page(items: Sequence[tuple[str, bytes]], page: PageFields) -> dict[str, Any]:
    """Encode a page of items, given as pairs of id and JSON."""
    ordered = list(items if page.order == "asc" else reversed(items))
    if page.after is not None:
        start = next((at for at, (item, _) in enumerate(ordered, 1) if item == page.after), None)
        if start is None:
            raise NotFound(f"after: the response has no item {quote(page.after)}", param="after")
        ordered = ordered[start:]
    listed = ordered[: page.limit]
    return {
        "object": "list",
        "data": [msgspec.Raw(body) for _, body in listed],
        "first_id": listed[0][0] if listed else "",
        "last_id": listed[-1][0] if listed else "",
        "has_more": len(ordered) > len(listed),
    }
