"""Counts the engine's tokens as they pass, so that a generation has a usage even if it is cut short or its engine does
not tell one; and those of thoughts, of which an engine that writes plain text knows nothing."""

from collections.abc import Sequence

import msgspec

from dragoman.core.events import Event, Finished, ReasoningDelta, Started, TextDelta, ToolCallDelta, Usage

UNCOUNTED = "the reply was ended by a stop string, before anybody said how many tokens it used"


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
            return [*events[:-1], self._ended(last)]
        return events

    def _ended(self, last: Finished) -> Finished:
        usage = self._complete(last.usage)
        # Whoever ends a reply does not hear what it would have said of its tokens in the end.
        is_unheard = last.usage is None and last.stop is not None and not usage.completion
        warnings = (*last.warnings, UNCOUNTED) if is_unheard else last.warnings
        return msgspec.structs.replace(last, usage=usage, warnings=warnings)

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
