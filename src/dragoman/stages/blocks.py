"""Where blocks begin and end: neighbouring deltas of one kind are a block, each tool call is one of its own."""

from collections.abc import Sequence

from dragoman.events import (
    BlockEnd,
    BlockKind,
    BlockStart,
    Event,
    Finished,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    ToolCallStart,
)

KINDS: dict[type, BlockKind] = {
    TextDelta: "text",
    ReasoningDelta: "reasoning",
    ToolCallStart: "tool_call",
    ToolCallDelta: "tool_call",
}


class Blocks:
    def __init__(self) -> None:
        self._index = -1
        self._open: BlockKind | None = None

    def __call__(self, events: Sequence[Event]) -> Sequence[Event]:
        out: list[Event] = []
        for event in events:
            kind = KINDS.get(type(event))
            if kind is None:
                if type(event) is Finished:
                    self._close(out)
            elif (kind != self._open or type(event) is ToolCallStart) and _visible(event):
                self._close(out)
                self._index += 1
                self._open = kind
                out.append(BlockStart(self._index, kind))
            out.append(event)
        return out

    def _close(self, out: list[Event]) -> None:
        if self._open is not None:
            out.append(BlockEnd(self._index, self._open))
            self._open = None


def _visible(event: Event) -> bool:
    """A delta without text opens no block: its characters are still to come, maybe in another one."""
    return not isinstance(event, TextDelta | ReasoningDelta) or bool(event.text)
