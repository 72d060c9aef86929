"""Items as they are kept, and lists of them.

kept := the item as it was sent, with a type, an id and a status, its content as parts
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from dragoman.core.errors import BadRequest, NotFound, quote
from dragoman.protocols.openai import decode_limit
from dragoman.protocols.responses.calls import PREFIXES
from dragoman.protocols.responses.encode import PREFIX
from dragoman.protocols.responses.items import CALLS, kind_of

MOST, USUAL = 100, 20
IDS = {kind: PREFIXES[call] for kind, call in CALLS.items()} | {
    "message": "msg_",
    "reasoning": "rs_",
    "function_call_output": "fco_",
    "custom_tool_call_output": "ctco_",
}
WITHOUT_STATUS = ("reasoning", "additional_tools", "compaction")


def kept_items(items: Iterable[Mapping[str, Any]], response_id: str) -> list[dict[str, Any]]:
    end = response_id.removeprefix(PREFIX)
    return [_kept(item, f"{end}_i{at}") for at, item in enumerate(items)]


def _kept(item: Mapping[str, Any], end: str) -> dict[str, Any]:
    kind = kind_of(item, "input")
    kept = {**item, "type": kind, "id": item.get("id") or IDS.get(kind, "item_") + end}
    if kind not in WITHOUT_STATUS:
        kept["status"] = item.get("status") or "completed"
    if kind == "reasoning":
        kept["summary"] = item.get("summary") or []
    if kind == "message":
        kept["content"] = _content(item)
    return kept


def _content(message: Mapping[str, Any]) -> list[Any]:
    content = message.get("content")
    if isinstance(content, list):
        return content
    if message.get("role") == "assistant":
        return [{"type": "output_text", "text": content or "", "annotations": [], "logprobs": []}]
    return [{"type": "input_text", "text": content or ""}]


class PageFields(msgspec.Struct, frozen=True):
    limit: int = USUAL
    order: Literal["asc", "desc"] = "desc"
    after: str | None = None


def decode_page(query: Mapping[str, str]) -> PageFields:
    limit, order = decode_limit(query, USUAL, MOST), query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise BadRequest("order: asc or desc", param="order")
    return PageFields(limit, "asc" if order == "asc" else "desc", query.get("after"))


def encode_page(items: Sequence[tuple[str, bytes]], page: PageFields) -> dict[str, Any]:
    """A page of items, each with its id."""
    ordered = list(items if page.order == "asc" else reversed(items))
    if page.after is not None:
        places = [at for at, (item, _) in enumerate(ordered) if item == page.after]
        if not places:
            raise NotFound(f"after: the response has no item {quote(page.after)}", param="after")
        ordered = ordered[places[0] + 1 :]
    shown = ordered[: page.limit]
    return {
        "object": "list",
        "data": [msgspec.Raw(body) for _, body in shown],
        "first_id": shown[0][0] if shown else "",
        "last_id": shown[-1][0] if shown else "",
        "has_more": len(ordered) > len(shown),
    }
