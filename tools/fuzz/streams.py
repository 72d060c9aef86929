"""Streams of events: whether they begin, proceed and end as their protocol says.

chat, completions  chunks, then [DONE]; one `finish_reason` for each choice
messages           message_start, blocks one after the other, message_delta, message_stop
responses          response.created first, sequence numbers without a gap, response.completed or .incomplete last
any of them        or one error frame, and nothing after it
"""

import functools
from collections.abc import Sequence
from typing import Any, Literal, get_args

import msgspec
import pydantic
from anthropic.types.beta import BetaRawMessageStreamEvent
from openai.types.chat import ChatCompletionChunk
from openai.types.responses import ResponseStreamEvent

from tools.fuzz.shapes import Wrong, check_error, first_error, sdk_types

Frame = tuple[bytes, bytes]
"""The name of the event, which may be empty, and its data."""


def frames(body: bytes) -> list[Frame]:
    """The events. Comments say nothing."""
    if body and not body.endswith(b"\n\n"):
        raise Wrong(f"the stream ends inside a frame: {body[-80:]!r}")
    found: list[Frame] = []
    for block in body.split(b"\n\n")[:-1]:
        lines = block.split(b"\n")
        event, data = b"", None
        for line in lines:
            name, colon, value = line.partition(b": ")
            if line.startswith(b":"):
                continue
            if name == b"event" and not event:
                event = value
            elif name == b"data" and data is None and colon:
                data = value
            else:
                raise Wrong(f"not a line of an event: {line[:80]!r}")
        if data is not None:
            found.append((event, data))
        elif event:
            raise Wrong(f"an event without data: {event[:80]!r}")
    return found


def check_stream(kind: str, body: bytes, choices: int | None) -> bool:
    """Raise Wrong. False: it is well formed, and ended by an error frame."""
    found = frames(body)
    if not found:
        raise Wrong("the stream is empty")
    if kind in ("chat", "completions"):
        return _check_chunks(found, kind, choices)
    return _check_messages(found) if kind == "messages" else _check_responses(found)


class CompletionChoice(msgspec.Struct, frozen=True):
    text: str
    index: int
    finish_reason: str | None
    logprobs: dict[str, Any] | None = None


class CompletionChunk(msgspec.Struct, frozen=True):
    """Not the SDK's type: that one has no chunk without a finish reason."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]


def _chunk(kind: str, data: bytes) -> Any:
    try:
        if kind == "chat":
            return ChatCompletionChunk.model_validate_json(data)
        return msgspec.json.decode(data, type=CompletionChunk)
    except pydantic.ValidationError as error:
        raise Wrong(f"not a chunk: {first_error(error)}: {data[:200]!r}") from error
    except msgspec.MsgspecError as error:
        raise Wrong(f"not a chunk: {error}: {data[:200]!r}") from error


def _check_chunks(found: Sequence[Frame], kind: str, choices: int | None) -> bool:
    *chunks, (event, last) = found
    if any(name for name, _ in chunks) or event:
        raise Wrong("a chunk has an event name")
    is_failed = last != b"[DONE]"
    if is_failed:
        check_error("openai", _parsed(last), None)
    finished: set[int] = set()
    for _, data in chunks:
        for choice in _chunk(kind, data).choices:
            if choice.index in finished:
                raise Wrong(f"choice {choice.index} goes on after its end: {data[:200]!r}")
            if choice.finish_reason is not None:
                finished.add(choice.index)
    if not is_failed and (not finished or finished != set(range(len(finished)))):
        raise Wrong(f"choices that ended: {sorted(finished)}")
    if not is_failed and choices is not None and len(finished) != choices:
        raise Wrong(f"{len(finished)} choices ended, not {choices}")
    return not is_failed


@functools.cache
def _adapters(union: Any) -> dict[str, pydantic.TypeAdapter[Any]]:
    """The SDK's type of each event, by its name."""
    members = get_args(get_args(union)[0]) if hasattr(union, "__metadata__") else get_args(union)
    found = {}
    for member in members:
        for name in get_args(member.model_fields["type"].annotation):
            found[name] = pydantic.TypeAdapter(member)
    return found


def build_types() -> None:
    """It takes seconds, in which no connection would be served."""
    sdk_types()
    _adapters(BetaRawMessageStreamEvent)
    _adapters(ResponseStreamEvent)


def _events(found: Sequence[Frame], union: Any) -> list[tuple[str, dict[str, Any]]]:
    events = []
    for name, data in found:
        event = _parsed(data)
        kind = event.get("type")
        if not isinstance(kind, str) or name.decode() != kind:
            raise Wrong(f"the event {name!r} has the type {kind!r}")
        if kind not in ("error", "ping"):
            adapter = _adapters(union).get(kind)
            if adapter is None:
                raise Wrong(f"unknown event {kind}")
            try:
                adapter.validate_json(data)
            except pydantic.ValidationError as error:
                if first := first_error(error):
                    raise Wrong(f"not a {kind}: {first}: {data[:200]!r}") from error
        events.append((kind, event))
    return events


def _check_messages(found: Sequence[Frame]) -> bool:
    events = _events(found, BetaRawMessageStreamEvent)
    is_failed = events[-1][0] == "error"
    if is_failed:
        check_error("anthropic", events.pop()[1], None)
    kinds = [kind for kind, _ in events if kind != "ping"]
    if not is_failed and kinds[-2:] != ["message_delta", "message_stop"]:
        raise Wrong(f"the stream ends with {kinds[-2:]}")
    if kinds[:1] != ["message_start"] and not (is_failed and not kinds):
        raise Wrong(f"the stream begins with {kinds[:1]}")
    middle = kinds[1:] if is_failed else kinds[1:-2]
    indexes = [event["index"] for kind, event in events if kind == "content_block_start"]
    if indexes != list(range(len(indexes))):
        raise Wrong(f"blocks are numbered {indexes[:20]}")
    is_open, at = False, -1
    for kind, event in [(kind, event) for kind, event in events if kind != "ping"][1 : 1 + len(middle)]:
        if kind == "content_block_start":
            is_open, at = not is_open or _out_of_order(kind), event["index"]
        elif kind in ("content_block_delta", "content_block_stop") and is_open and event["index"] == at:
            is_open = kind == "content_block_delta"
        else:
            _out_of_order(kind)
    if is_open and not is_failed:
        raise Wrong("a block does not end")
    return not is_failed


def _out_of_order(kind: str) -> bool:
    raise Wrong(f"{kind} is out of order")


def _check_responses(found: Sequence[Frame]) -> bool:
    events = _events(found, ResponseStreamEvent)
    numbers = [event.get("sequence_number") for _, event in events]
    if numbers != list(range(len(events))):
        raise Wrong(f"sequence numbers are {numbers[:20]}")
    kinds = [kind for kind, _ in events]
    if kinds[-1] == "response.failed":
        if "error" not in kinds:
            raise Wrong("response.failed without an error")
        return False
    # Only a background response is queued.
    begin = [kind for kind in kinds[:3] if kind != "response.queued"][:2]
    if kinds[-1] not in ("response.completed", "response.incomplete") or begin != [
        "response.created",
        "response.in_progress",
    ]:
        raise Wrong(f"the stream begins with {kinds[:2]} and ends with {kinds[-1]}")
    added = [event["output_index"] for kind, event in events if kind == "response.output_item.added"]
    done = [event["output_index"] for kind, event in events if kind == "response.output_item.done"]
    # Calls of MCP servers end after the generation that made them.
    order = sorted(done) if any(kind.startswith("response.mcp_call.") for kind in kinds) else done
    if added != order or added != list(range(len(added))):
        raise Wrong(f"items added {added[:20]}, done {done[:20]}")
    if len(events[-1][1]["response"]["output"]) != len(done):
        raise Wrong("the last event has other items than the stream")
    return True


def _parsed(data: bytes) -> dict[str, Any]:
    try:
        parsed = msgspec.json.decode(data)
    except msgspec.DecodeError as error:
        raise Wrong(f"not JSON: {data[:200]!r}") from error
    if not isinstance(parsed, dict):
        raise Wrong(f"not an object: {data[:200]!r}")
    return parsed
