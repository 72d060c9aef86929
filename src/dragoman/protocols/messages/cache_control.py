"""How long a prompt is to be kept, as `cache_control` says it.

    cache_control := {type: ephemeral, ttl?: 5m | 1h}        of the request, a tool, or a block of system or messages

Where one stands would say up to where to keep; here the whole prompt is, for the longest time that is asked for
anywhere. For other servers it is remembered in which of the three one stands. It is a wish and asks nothing of a reply:
whoever cannot fulfil it answers all the same. One that is written wrongly is refused, since nobody would notice that it
does nothing.
"""

from collections.abc import Iterator
from typing import Any, Literal

import msgspec

from dragoman.core.errors import BadRequest
from dragoman.protocols import json_body

SHORT_SECONDS, LONG_SECONDS = 300.0, 3600.0
Place = Literal["tools", "system", "messages"]
TIMES = {"5m": SHORT_SECONDS, "1h": LONG_SECONDS}


class Control(msgspec.Struct, frozen=True):
    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


def keep_seconds(parsed: dict[str, Any]) -> float:
    """0 where nobody wishes anything."""
    return max((_seconds(entry.get("cache_control"), path) for path, entry in _entries(parsed)), default=0.0)


def keep_at(parsed: dict[str, Any]) -> tuple[Place, ...]:
    """Which parts of a prompt have a mark; one of the whole request is one after the messages."""
    found: dict[Place, bool] = {
        "tools": _has_mark(_blocks(parsed.get("tools"), "tools")),
        "system": _has_mark(_blocks(parsed.get("system"), "system")),
        "messages": _has_mark(iter([("", parsed)])) or _has_mark(_said(parsed)),
    }
    return tuple(place for place, has_mark in found.items() if has_mark)


def _has_mark(entries: Iterator[tuple[str, dict[str, Any]]]) -> bool:
    return any(_seconds(entry.get("cache_control"), path) for path, entry in entries)


def _entries(parsed: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Everything that may have a wish, with its path; that it has the right form is for others to say."""
    yield "", parsed
    yield from _blocks(parsed.get("tools"), "tools")
    yield from _blocks(parsed.get("system"), "system")
    yield from _said(parsed)


def _said(parsed: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for outer, message in _blocks(parsed.get("messages"), "messages"):
        for path, block in _blocks(message.get("content"), f"{outer}.content"):
            yield path, block
            yield from _blocks(block.get("content"), f"{path}.content")


def _blocks(found: Any, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    if isinstance(found, list):
        yield from ((f"{path}[{at}]", entry) for at, entry in enumerate(found) if isinstance(entry, dict))


def _seconds(control: Any, path: str) -> float:
    if control is None:
        return 0.0
    where = f"{path}.cache_control".lstrip(".")
    if not isinstance(control, dict):
        raise BadRequest(f'{where}: expected an object such as {{"type": "ephemeral"}}', param=where)
    return TIMES[json_body.convert(control, Control, where).ttl or "5m"]
