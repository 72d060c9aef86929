"""The end after `max_tokens` tokens, for engines that leave it to the server."""

from collections.abc import Sequence

from dragoman.core.events import Event, Finished, ReasoningDelta, TextDelta, ToolCallDelta


class Limit:
    def __init__(self, max_tokens: int) -> None:
        self._left = max_tokens

    def __call__(self, events: Sequence[Event]) -> Sequence[Event]:
        for at, event in enumerate(events):
            if type(event) is Finished:
                return events
            if type(event) is TextDelta or type(event) is ReasoningDelta or type(event) is ToolCallDelta:
                if event.count > self._left:
                    return [*events[:at], Finished("length")]
                self._left -= event.count
                if not self._left:
                    return [*events[: at + 1], Finished("length")]
        return events
