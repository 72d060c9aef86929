"""Decodes `cache_control`, which sets how long a prompt stays cached.

    cache_control := {type: ephemeral, ttl?: 5m | 1h}        of the request, a tool, or a block of system or messages

Rules
1. The whole prompt is cached, for the longest time that any `cache_control` requests.
2. For upstream servers, the parts of the prompt that have a `cache_control` are recorded.
3. It is a hint: an engine without a cache answers all the same. A malformed one is an error.
"""

from collections.abc import Iterator
from typing import Any, Literal

import msgspec

from dragoman.core.errors import BadRequest
from dragoman.protocols import json_body

SHORT_SECONDS, LONG_SECONDS = 300.0, 3600.0
PromptPart = Literal["tools", "system", "messages"]
TTL_SECONDS = {"5m": SHORT_SECONDS, "1h": LONG_SECONDS}


class CacheControl(msgspec.Struct, frozen=True):
    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


def keep_seconds(parsed: dict[str, Any]) -> float:
    """Return 0 if there is no `cache_control`."""
    return max((_seconds(entry.get("cache_control"), path) for path, entry in _entries(parsed)), default=0.0)


def keep_at(parsed: dict[str, Any]) -> tuple[PromptPart, ...]:
    """Return the parts of the prompt with a `cache_control`; that of the request belongs to the messages."""
    marked: dict[PromptPart, bool] = {
        "tools": _is_marked(_blocks(parsed.get("tools"), "tools")),
        "system": _is_marked(_blocks(parsed.get("system"), "system")),
        "messages": _is_marked(iter([("", parsed)])) or _is_marked(_message_blocks(parsed)),
    }
    return tuple(part for part, is_marked in marked.items() if is_marked)


def _is_marked(entries: Iterator[tuple[str, dict[str, Any]]]) -> bool:
    return any(_seconds(entry.get("cache_control"), path) for path, entry in entries)


def _entries(parsed: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield everything that may have a `cache_control`, with its path. Malformed entries are skipped."""
    yield "", parsed
    yield from _blocks(parsed.get("tools"), "tools")
    yield from _blocks(parsed.get("system"), "system")
    yield from _message_blocks(parsed)


def _message_blocks(parsed: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for outer, message in _blocks(parsed.get("messages"), "messages"):
        for path, block in _blocks(message.get("content"), f"{outer}.content"):
            yield path, block
            yield from _blocks(block.get("content"), f"{path}.content")


def _blocks(content: Any, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    if isinstance(content, list):
        yield from ((f"{path}[{at}]", entry) for at, entry in enumerate(content) if isinstance(entry, dict))


def _seconds(control: Any, path: str) -> float:
    if control is None:
        return 0.0
    where = f"{path}.cache_control".lstrip(".")
    if not isinstance(control, dict):
        raise BadRequest(f'{where}: expected an object such as {{"type": "ephemeral"}}', param=where)
    return TTL_SECONDS[json_body.convert(control, CacheControl, where).ttl or "5m"]
