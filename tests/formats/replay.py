"""Runs recorded output through stages and joins the events."""

from collections.abc import Iterable, Sequence

import msgspec

from dragoman.core.events import (
    Event,
    Finished,
    FinishReason,
    ReasoningDelta,
    Started,
    TextDelta,
    ToolCallDelta,
    ToolCallStart,
)
from dragoman.core.reply import Choice, ReplyBuilder
from dragoman.core.request import Part, Reasoning, Text, Tool, ToolCall
from dragoman.formats import FORMATS
from dragoman.pipeline import Stage
from dragoman.pipeline.split import SplitStage
from tests.formats.cases import TOOLS


class Joined(msgspec.Struct, frozen=True):
    """The joined events of a reply. Calls have no ids."""

    parts: tuple[Part, ...]
    reason: FinishReason
    warnings: tuple[str, ...]


def play(
    name: str,
    pieces: Sequence[str],
    *,
    tools: Sequence[Tool] = TOOLS,
    thinking: bool = False,
    reason: FinishReason = "stop",
    parallel: bool = True,
    shaped: bool = False,
    prefill: str = "",
) -> list[Event]:
    """Return the events for these pieces, each of which is one token, after the prefill."""
    stage = SplitStage(FORMATS[name], tools, parallel=parallel, shaped=shaped, prefill=(prefill, "messages[1]"))
    return run([Started(thinking=thinking), *map(TextDelta, pieces), Finished(reason)], stage)


def run(events: Iterable[Event], *stages: Stage) -> list[Event]:
    """Pass the events through the stages one by one, until the reply is finished."""
    out: list[Event] = []
    for event in events:
        ready: Sequence[Event] = [event]
        for stage in stages:
            ready = stage(ready)
        out += ready
        if out and isinstance(out[-1], Finished):
            break
    return out


def joined(events: Sequence[Event]) -> Joined:
    """Join the events and check their order."""
    parts: list[Part] = []
    assert isinstance(events[0], Started)
    last = events[-1]
    assert isinstance(last, Finished)
    for event in events[1:-1]:
        assert isinstance(event, TextDelta | ReasoningDelta | ToolCallStart | ToolCallDelta)
        before = parts[-1] if parts else None
        if isinstance(event, ToolCallStart):
            assert event.id.startswith("call_")
            parts.append(ToolCall("", event.name, ""))
        elif isinstance(event, ToolCallDelta):
            assert isinstance(before, ToolCall)
            parts[-1] = ToolCall("", before.name, before.arguments + event.arguments)
        elif event.text:
            kind = Text if isinstance(event, TextDelta) else Reasoning
            if isinstance(before, Text | Reasoning) and type(before) is kind:
                parts[-1] = kind(before.text + event.text)
            else:
                parts.append(kind(event.text))
    return Joined(tuple(parts), last.reason, last.warnings)


def count_tokens(events: Sequence[Event]) -> int:
    deltas = (event for event in events if isinstance(event, TextDelta | ReasoningDelta | ToolCallDelta))
    return sum(event.count for event in deltas)


def with_parsed_arguments(parts: Sequence[Part]) -> list[object]:
    """Return the parts with parsed arguments, for formats that write the same values differently."""
    return [(part.name, msgspec.json.decode(part.arguments)) if isinstance(part, ToolCall) else part for part in parts]


def without_ids(parts: Sequence[Part]) -> tuple[Part, ...]:
    return tuple(msgspec.structs.replace(part, id="") if isinstance(part, ToolCall) else part for part in parts)


def collected(events: Sequence[Event]) -> Choice:
    """Return the reply as a non-streaming caller gets it."""
    builder = ReplyBuilder()
    for event in events:
        builder.add(0, [event])
    return builder.reply().choices[0]
