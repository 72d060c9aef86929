"""Answers of servers, played to the core without a socket: whole, byte by byte, cut as one likes."""

import itertools
import json
from collections.abc import Callable, Sequence
from typing import Any

from dragoman.client.call import PROTOCOLS, Exchange
from dragoman.core.errors import DragomanError
from dragoman.core.events import Event, Finished, Started
from dragoman.core.reply import Choice, Collection
from dragoman.core.request import GenerationRequest, Message, Part, Text
from tests.support.cuttings import cut_bytes

REQUEST = GenerationRequest(model="m", messages=(Message("user", (Text("hello"),)),))


def numbered() -> Callable[[], str]:
    numbers = itertools.count()
    return lambda: f"made_{next(numbers)}"


def play(
    protocol: str,
    pieces: Sequence[bytes],
    *,
    status: int = 200,
    headers: dict[str, str] | None = None,
    check_calls: bool = True,
) -> list[Event]:
    exchange = Exchange(PROTOCOLS[protocol], REQUEST, stream=True, check_calls=check_calls, make_id=numbered())
    exchange.head(status, headers or {})
    events = [event for piece in pieces for event in exchange.feed(piece)]
    for last in exchange.end():
        events += last
    return events


def outcome(protocol: str, pieces: Sequence[bytes]) -> object:
    """The reply, or the error and its words."""
    try:
        return collected(play(protocol, pieces))
    except DragomanError as error:
        return type(error), error.message


def every_way(protocol: str, data: bytes) -> object:
    """What an answer comes to; the same however it is cut."""
    whole = outcome(protocol, [data])
    assert outcome(protocol, [bytes([byte]) for byte in data]) == whole
    assert outcome(protocol, cut_bytes(data, [len(data) // 3, len(data) // 2])) == whole
    return whole


def collected(events: Sequence[Event]) -> Choice:
    assert isinstance(events[0], Started)
    assert isinstance(events[-1], Finished)
    assert sum(isinstance(event, Started | Finished) for event in events) == 2
    collection = Collection()
    for event in events:
        collection.add(0, [event])
    return collection.reply().choices[0]


def parts(protocol: str, data: bytes) -> tuple[Part, ...]:
    choice = every_way(protocol, data)
    assert isinstance(choice, Choice), choice
    return choice.parts


def frames(*payloads: Any) -> bytes:
    texts = (payload if isinstance(payload, str) else json.dumps(payload) for payload in payloads)
    return "".join(f"data: {text}\n\n" for text in texts).encode()


def delta(**fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields}]}


def ending(reason: str = "stop", **fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {}, "finish_reason": reason}], **fields}


def calling(*pieces: dict[str, Any]) -> dict[str, Any]:
    return delta(tool_calls=list(pieces))


def piece(arguments: Any = None, name: str | None = None, **fields: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {**fields, "function": {key: value for key, value in function.items() if value is not None}}
