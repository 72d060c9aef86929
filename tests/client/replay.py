"""Feeds recorded server responses to the client without sockets: whole, byte by byte, split anywhere."""

import itertools
import json
from collections.abc import Callable, Sequence
from typing import Any

from dragoman.client.call import ClientCall
from dragoman.core.errors import DragomanError
from dragoman.core.events import Event, Finished, Started
from dragoman.core.reply import Choice, ReplyBuilder
from dragoman.core.request import GenerationRequest, Message, Part, Text
from dragoman.protocols.registry import CLIENT_PROTOCOLS
from tests.support.text_splits import cut_bytes

REQUEST = GenerationRequest(model="m", messages=(Message("user", (Text("hello"),)),))


def sequential_ids() -> Callable[[], str]:
    numbers = itertools.count()
    return lambda: f"made_{next(numbers)}"


def replay(protocol: str, pieces: Sequence[bytes], *, check_calls: bool = True) -> list[Event]:
    client_call = ClientCall(
        CLIENT_PROTOCOLS[protocol], REQUEST, stream=True, check_calls=check_calls, make_id=sequential_ids()
    )
    events = [event for piece in pieces for event in client_call.feed(piece)]
    for last in client_call.end():
        events += last
    return events


def outcome(protocol: str, pieces: Sequence[bytes]) -> object:
    """Return the reply, or the class and message of the error."""
    try:
        return collect(replay(protocol, pieces))
    except DragomanError as error:
        return type(error), error.message


def outcome_for_any_split(protocol: str, data: bytes) -> Any:
    """Check that the outcome does not depend on how the bytes are split, and return it."""
    whole = outcome(protocol, [data])
    assert outcome(protocol, [bytes([byte]) for byte in data]) == whole
    assert outcome(protocol, cut_bytes(data, [len(data) // 3, len(data) // 2])) == whole
    return whole


def collect(events: Sequence[Event]) -> Choice:
    assert isinstance(events[0], Started)
    assert isinstance(events[-1], Finished)
    assert sum(isinstance(event, Started | Finished) for event in events) == 2
    builder = ReplyBuilder()
    for event in events:
        builder.add(0, [event])
    return builder.reply().choices[0]


def read_choice(protocol: str, data: bytes) -> Choice:
    choice = outcome_for_any_split(protocol, data)
    assert isinstance(choice, Choice), choice
    return choice


def read_error(protocol: str, data: bytes) -> type[DragomanError]:
    """Return the class of the error."""
    kind, _ = outcome_for_any_split(protocol, data)
    return kind  # type: ignore[no-any-return]


def parts(protocol: str, data: bytes) -> tuple[Part, ...]:
    return read_choice(protocol, data).parts


def events(*payloads: dict[str, Any]) -> bytes:
    """A stream of named events."""
    return "".join(f"event: {payload['type']}\ndata: {json.dumps(payload)}\n\n" for payload in payloads).encode()


def frames(*payloads: Any) -> bytes:
    texts = (payload if isinstance(payload, str) else json.dumps(payload) for payload in payloads)
    return "".join(f"data: {text}\n\n" for text in texts).encode()


def delta(**fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields}]}


def end_chunk(reason: str = "stop", **fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {}, "finish_reason": reason}], **fields}


def calls_delta(*pieces: dict[str, Any]) -> dict[str, Any]:
    return delta(tool_calls=list(pieces))


def piece(arguments: Any = None, name: str | None = None, **fields: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {**fields, "function": {key: value for key, value in function.items() if value is not None}}
