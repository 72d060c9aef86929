"""How long a prompt is to be kept, as `cache_control` says it.

    cache_control := {type: ephemeral, ttl?: 5m | 1h}        of the request, a tool, or a block of system or messages

Where one stands would say up to where to keep; here the whole prompt is, for the longest time that is asked for
anywhere. For other servers it is remembered in which of the three one stands. It is a wish and asks nothing of a reply:
whoever cannot fulfil it answers all the same.
"""

from collections.abc import Iterator
from typing import Any, Literal

SHORT_SECONDS, LONG_SECONDS = 300.0, 3600.0
Place = Literal["tools", "system", "messages"]
TIMES = {"5m": SHORT_SECONDS, "1h": LONG_SECONDS}


def keep_seconds(parsed: dict[str, Any]) -> float:
    wishes = (_seconds(entry.get("cache_control")) for entry in _entries(parsed))
    return max(wishes, default=0.0)


def keep_at(parsed: dict[str, Any]) -> tuple[Place, ...]:
    """Which parts of a prompt have a mark; one of the whole request is one after the messages."""
    found: dict[Place, bool] = {
        "tools": _has_mark(_blocks(parsed.get("tools"))),
        "system": _has_mark(_blocks(parsed.get("system"))),
        "messages": _has_mark(iter([parsed])) or _has_mark(_said(parsed)),
    }
    return tuple(place for place, has_mark in found.items() if has_mark)


def _has_mark(entries: Iterator[dict[str, Any]]) -> bool:
    return any(_seconds(entry.get("cache_control")) for entry in entries)


def _entries(parsed: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Everything that may have a wish; that it has the right form is for others to say."""
    yield parsed
    yield from _blocks(parsed.get("tools"))
    yield from _blocks(parsed.get("system"))
    yield from _said(parsed)


def _said(parsed: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for message in _blocks(parsed.get("messages")):
        for block in _blocks(message.get("content")):
            yield block
            yield from _blocks(block.get("content"))


def _blocks(found: Any) -> Iterator[dict[str, Any]]:
    return (entry for entry in found if isinstance(entry, dict)) if isinstance(found, list) else iter(())


def _seconds(control: Any) -> float:
    if not isinstance(control, dict) or control.get("type") != "ephemeral":
        return 0.0
    ttl = control.get("ttl")
    return TIMES.get(ttl, SHORT_SECONDS) if isinstance(ttl, str) else SHORT_SECONDS
