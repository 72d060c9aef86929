"""Counts the engine's tokens as they pass, so that a generation that is cut short has a usage too."""

from collections.abc import Sequence

from dragoman.events import Event, Finished, ReasoningDelta, Started, TextDelta, ToolCallDelta, Usage


class Tally:
    def __init__(self) -> None:
        self._started = Started()
        self._completion = 0
        self._reasoning = 0
        self._reported: Usage | None = None

    def __call__(self, events: Sequence[Event]) -> Sequence[Event]:
        for event in events:
            kind = type(event)
            if kind is TextDelta:
                self._completion += event.count  # type: ignore[union-attr]
            elif isinstance(event, ReasoningDelta):
                self._completion += event.count
                self._reasoning += event.count
            elif isinstance(event, ToolCallDelta):
                self._completion += event.count
            elif isinstance(event, Started):
                self._started = event
            elif isinstance(event, Finished):
                self._reported = event.usage
        return events

    @property
    def usage(self) -> Usage:
        """What the engine reported at its end, or what was counted until it was cut short."""
        return self._reported or Usage(
            prompt=self._started.prompt_tokens,
            completion=self._completion,
            cached=self._started.cached_tokens,
            reasoning=self._reasoning,
        )
