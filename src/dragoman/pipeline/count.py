"""Stages that count: `CountStage` completes the usage, `LimitStage` enforces `max_tokens`, `TimeStage` adds times.

`CountStage` provides a usage if the reply is cut short or the engine reports none. It also counts reasoning tokens,
which engines that produce plain text cannot.
"""

import time
from collections.abc import Sequence

import msgspec

from dragoman.core.events import Event, Finished, ReasoningDelta, Started, TextDelta, ToolCallDelta, Usage

UNCOUNTED = "the reply ended at a stop string before the engine reported its token usage"


class CountStage:
    def __init__(self) -> None:
        self._started = Started()
        self._completion = 0
        self._reasoning = 0

    def __call__(self, events: Sequence[Event]) -> Sequence[Event]:
        for event in events:
            # Faster than isinstance with two types.
            if type(event) is TextDelta or type(event) is ToolCallDelta:
                self._completion += event.count
            elif isinstance(event, ReasoningDelta):
                self._completion += event.count
                self._reasoning += event.count
            elif isinstance(event, Started):
                self._started = event
        last = events[-1] if events else None
        if isinstance(last, Finished):
            return [*events[:-1], self._finish(last)]
        return events

    def _finish(self, last: Finished) -> Finished:
        if last.usage is None:
            started = self._started
            counted = Usage(
                started.prompt_tokens, self._completion, started.cached_tokens, self._reasoning, started.kept_tokens
            )
        else:
            counted = last.usage
        usage = msgspec.structs.replace(counted, reasoning=self._reasoning) if self._reasoning else counted
        # A reply that is ended by a stage does not include the usage that the engine reports last.
        is_uncounted = last.usage is None and last.stop is not None and not usage.completion
        warnings = (*last.warnings, UNCOUNTED) if is_uncounted else last.warnings
        return msgspec.structs.replace(last, usage=usage, warnings=warnings)


class LimitStage:
    """Ends the reply after `max_tokens` tokens, for engines that do not."""

    def __init__(self, max_tokens: int) -> None:
        self._left = max_tokens

    def __call__(self, events: Sequence[Event]) -> Sequence[Event]:
        for index, event in enumerate(events):
            if type(event) is Finished:
                return events
            if type(event) is TextDelta or type(event) is ReasoningDelta or type(event) is ToolCallDelta:
                if event.count > self._left:
                    return [*events[:index], Finished("length")]
                self._left -= event.count
                if not self._left:
                    return [*events[: index + 1], Finished("length")]
        return events


class TimeStage:
    """Adds the times for the prompt, which began at `began`, and for the reply."""

    def __init__(self, began: float) -> None:
        self._began = began

    def __call__(self, events: Sequence[Event]) -> Sequence[Event]:
        return [self._add_time(event) if isinstance(event, Started | Finished) else event for event in events]

    def _add_time(self, event: Started | Finished) -> Event:
        before, self._began = self._began, time.monotonic()
        return msgspec.structs.replace(event, seconds=self._began - before)
