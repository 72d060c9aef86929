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
Entry = tuple[str, dict[str, Any]]
"""A path and an object that may have a `cache_control`."""
TTL_SECONDS = {"5m": SHORT_SECONDS, "1h": LONG_SECONDS}


class CacheControl(msgspec.Struct, frozen=True):
    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


def decode(parsed: dict[str, Any]) -> tuple[float, tuple[PromptPart, ...]]:
    """Return how many seconds to cache the prompt, and the parts of the prompt with a `cache_control`.

    The `cache_control` of the request itself belongs to the messages. Blocks that are not objects are skipped.
    """
    entries: dict[PromptPart, list[Entry]] = {
        "tools": [*_blocks(parsed.get("tools"), "tools")],
        "system": [*_blocks(parsed.get("system"), "system")],
        "messages": [("", parsed), *_message_blocks(parsed)],
    }
    seconds = {
        part: max([_seconds(entry.get("cache_control"), path) for path, entry in found], default=0.0)
        for part, found in entries.items()
    }
    return max(seconds.values()), tuple(part for part in seconds if seconds[part])


def _message_blocks(parsed: dict[str, Any]) -> Iterator[Entry]:
    for outer, message in _blocks(parsed.get("messages"), "messages"):
        for path, block in _blocks(message.get("content"), f"{outer}.content"):
            yield path, block
            yield from _blocks(block.get("content"), f"{path}.content")


def _blocks(content: Any, path: str) -> Iterator[Entry]:
    if isinstance(content, list):
        yield from ((f"{path}[{at}]", entry) for at, entry in enumerate(content) if isinstance(entry, dict))


def _seconds(control: Any, path: str) -> float:
    if control is None:
        return 0.0
    where = f"{path}.cache_control".lstrip(".")
    if not isinstance(control, dict):
        raise BadRequest(f'{where}: expected an object such as {{"type": "ephemeral"}}', param=where)
    return TTL_SECONDS[json_body.convert(control, CacheControl, where).ttl or "5m"]
