"""Counts the engine's tokens as they pass, so that a generation has a usage even if it is cut short or its engine does
not tell one; and those of thoughts, of which an engine that writes plain text knows nothing."""

from collections.abc import Sequence

import msgspec

from dragoman.events import Event, Finished, ReasoningDelta, Started, TextDelta, ToolCallDelta, Usage


class Tally:
    def __init__(self) -> None:
        self._started = Started()
        self._completion = 0
        self._reasoning = 0

    def __call__(self, events: Sequence[Event]) -> Sequence[Event]:
        for event in events:
            # To ask for one of two types at once takes longer than all the rest.
            if type(event) is TextDelta or type(event) is ToolCallDelta:
                self._completion += event.count
            elif isinstance(event, ReasoningDelta):
                self._completion += event.count
                self._reasoning += event.count
            elif isinstance(event, Started):
                self._started = event
        last = events[-1] if events else None
        if isinstance(last, Finished):
            return [*events[:-1], msgspec.structs.replace(last, usage=self._complete(last.usage))]
        return events

    def _complete(self, told: Usage | None) -> Usage:
        if told is None:
            return self._usage
        return msgspec.structs.replace(told, reasoning=self._reasoning) if self._reasoning else told

    @property
    def _usage(self) -> Usage:
        return Usage(
            prompt=self._started.prompt_tokens,
            completion=self._completion,
            cached=self._started.cached_tokens,
            reasoning=self._reasoning,
            kept=self._started.kept_tokens,
        )
