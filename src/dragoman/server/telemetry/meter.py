"""Measures the generations of a request, and fills its record.

Rules
1. A finished choice counts with the usage that it reports. The tokens of an unfinished choice are counted separately.
2. Tokens that arrive together share the time since the previous token of their choice.
3. If the engine reports no counts, as some upstream servers, tokens are estimated from the length of the text. A usage
   at the end replaces the estimate. Without one, the estimate counts as unfinished tokens, and so does an estimate of
   the prompt. Clients never get these estimates.
"""

from collections.abc import Callable, Sequence

from dragoman.core.events import Event, Finished, ReasoningDelta, Started, TextDelta, ToolCallDelta
from dragoman.server.telemetry.metrics import ModelMetrics, RequestRecord

CHARACTERS_PER_TOKEN = 4


class Meter:
    """Measures one generation. A request may have several, one after the other."""

    __slots__ = ("_began", "_estimate", "_gaps", "_is_prompt_counted", "_open", "_prompt", "_record")

    def __init__(
        self, record: RequestRecord, metrics: ModelMetrics, began: float, estimate: Callable[[], int] = int
    ) -> None:
        """`estimate` returns the tokens of the prompt, for engines that report none."""
        self._record = record
        self._gaps = metrics.gaps
        self._began = began
        self._estimate = estimate
        self._open: dict[int, list[float]] = {}
        """Per unfinished choice: the time of its last token, its reported tokens, its estimated tokens."""
        self._prompt = 0
        self._is_prompt_counted = False

    def note(self, choice: int, events: Sequence[Event], now: float) -> None:
        tokens = 0
        for event in events:
            # Faster than `in` or isinstance with a tuple.
            if type(event) is TextDelta or type(event) is ReasoningDelta or type(event) is ToolCallDelta:
                tokens += event.count
        state = self._open.get(choice)
        if state is None:
            state = self._begin(choice, events[0], tokens, now)
        elif tokens:
            if state[1]:
                self._gaps.add(now - state[0], tokens)
            elif self._record.first_token_us is None:
                self._record.first_token_us = int((now - self._began) * 1e6)
            state[0] = now
            state[1] += tokens
        if not tokens and not state[1]:
            self._estimate_tokens(state, events, now)
        last = events[-1]
        if type(last) is Finished:
            self._record.finish = last.reason
            if last.usage is not None:
                self._record.count(last.usage)
                self._is_prompt_counted |= last.usage.prompt > 0
                if last.usage.completion or not state[2]:
                    del self._open[choice]

    def _estimate_tokens(self, state: list[float], events: Sequence[Event], now: float) -> None:
        tokens = 0
        for event in events:
            if type(event) is TextDelta or type(event) is ReasoningDelta:
                text = event.text
            elif type(event) is ToolCallDelta:
                text = event.arguments
            else:
                continue
            if text:
                tokens += len(text) // CHARACTERS_PER_TOKEN or 1
        if not tokens:
            return
        if state[2]:
            self._gaps.add(now - state[0], tokens)
        elif self._record.first_token_us is None:
            self._record.first_token_us = int((now - self._began) * 1e6)
        state[0] = now
        state[2] += tokens

    def _begin(self, choice: int, first: Event, tokens: int, now: float) -> list[float]:
        self._open[choice] = state = [now, tokens, 0]
        if type(first) is Started and first.prompt_tokens > self._prompt:
            self._prompt = first.prompt_tokens
        record, elapsed = self._record, int((now - self._began) * 1e6)
        if record.first_event_us is None:
            record.first_event_us = elapsed
        if tokens and record.first_token_us is None:
            record.first_token_us = elapsed
        return state

    def close(self) -> None:
        """Count the unfinished choices when the generation has ended."""
        if self._open:
            record, prompt = self._record, 0
            if not self._is_prompt_counted:
                is_estimated = not self._prompt and any(estimated for _, _, estimated in self._open.values())
                prompt = self._estimate() if is_estimated else self._prompt
            completion = int(sum(reported or estimated for _, reported, estimated in self._open.values()))
            record.unfinished_prompt_tokens += prompt
            record.unfinished_tokens += prompt + completion
            self._open.clear()
        # The estimate refers to the whole request, which must be freed before this meter.
        self._estimate = int
