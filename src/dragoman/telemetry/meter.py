"""The tokens and the times of one request, as its events come: for every list of them a few additions, no more.

Rules
1. What a choice says of its usage when it ends counts, as its caller is told. Of a choice that did not get so far,
   what was heard of it counts apart.
2. The time since the last token of a choice is shared by the tokens that became ready together.
"""

from collections.abc import Sequence

from dragoman.events import Event, Finished, ReasoningDelta, Started, TextDelta, ToolCallDelta
from dragoman.telemetry.metrics import ModelMetrics
from dragoman.telemetry.record import RequestRecord


class Meter:
    __slots__ = ("_begun", "_gaps", "_open", "_prompt", "_record")

    def __init__(self, record: RequestRecord, metrics: ModelMetrics, begun: float) -> None:
        self._record = record
        self._gaps = metrics.gaps
        self._begun = begun
        self._open: dict[int, list[float]] = {}
        """Of each choice that is not finished, when its last token came, and how many came."""
        self._prompt = 0

    def note(self, choice: int, events: Sequence[Event], now: float) -> None:
        tokens = 0
        for event in events:
            # To ask for any of several types at once takes longer than all the rest.
            if type(event) is TextDelta or type(event) is ReasoningDelta or type(event) is ToolCallDelta:
                tokens += event.count
        state = self._open.get(choice)
        if state is None:
            self._begin(choice, events[0], tokens, now)
        elif tokens:
            if state[1]:
                self._gaps.add_shared(now - state[0], tokens)
            elif self._record.first_token_us is None:
                self._record.first_token_us = int((now - self._begun) * 1e6)
            state[0] = now
            state[1] += tokens
        last = events[-1]
        if type(last) is Finished:
            self._record.finish = last.reason
            if last.usage is not None:
                self._record.count(last.usage)
                del self._open[choice]

    def _begin(self, choice: int, first: Event, tokens: int, now: float) -> None:
        self._open[choice] = [now, tokens]
        if type(first) is Started and first.prompt_tokens > self._prompt:
            self._prompt = first.prompt_tokens
        record, passed = self._record, int((now - self._begun) * 1e6)
        if record.first_event_us is None:
            record.first_event_us = passed
        if tokens and record.first_token_us is None:
            record.first_token_us = passed

    def close(self) -> None:
        """The request has ended; what did not finish is counted as far as it came."""
        if not self._open:
            return
        heard = int(sum(tokens for _, tokens in self._open.values()))
        self._record.unfinished_tokens = heard + (0 if self._record.prompt_tokens else self._prompt)
        self._open.clear()
