"""The tokens and the times of one request, as its events come: for every list of them a few additions, no more.

Rules
1. What a choice says of its usage when it ends counts, as its caller is told. Of a choice that did not get so far,
   what was heard of it counts apart.
2. The time since the last token of a choice is shared by the tokens that became ready together.
3. Where nobody counts, as with servers whose replies are passed on, a piece that says something is a token, or as many
   as its length lets expect. A usage at the end wins over that; what has none is counted so, and its prompt by an
   estimate. No caller is told these figures.
"""

from collections.abc import Callable, Sequence

from dragoman.core.events import Event, Finished, ReasoningDelta, Started, TextDelta, ToolCallDelta
from dragoman.server.telemetry.metrics import ModelMetrics
from dragoman.server.telemetry.record import RequestRecord

CHARACTERS_PER_TOKEN = 4


class Meter:
    __slots__ = ("_begun", "_estimate", "_gaps", "_open", "_prompt", "_record")

    def __init__(
        self, record: RequestRecord, metrics: ModelMetrics, begun: float, estimate: Callable[[], int] = int
    ) -> None:
        """`estimate` tells the tokens of the prompt, where nobody else does."""
        self._record = record
        self._gaps = metrics.gaps
        self._begun = begun
        self._estimate = estimate
        self._open: dict[int, list[float]] = {}
        """Of each choice that is not finished, when its last token came, how many came, and how many seem to have."""
        self._prompt = 0

    def note(self, choice: int, events: Sequence[Event], now: float) -> None:
        tokens = 0
        for event in events:
            # To ask for any of several types at once takes longer than all the rest.
            if type(event) is TextDelta or type(event) is ReasoningDelta or type(event) is ToolCallDelta:
                tokens += event.count
        state = self._open.get(choice)
        if state is None:
            state = self._begin(choice, events[0], tokens, now)
        elif tokens:
            if state[1]:
                self._gaps.add_shared(now - state[0], tokens)
            elif self._record.first_token_us is None:
                self._record.first_token_us = int((now - self._begun) * 1e6)
            state[0] = now
            state[1] += tokens
        if not tokens and not state[1]:
            self._hear(state, events, now)
        last = events[-1]
        if type(last) is Finished:
            self._record.finish = last.reason
            if last.usage is not None:
                self._record.count(last.usage)
                if last.usage.completion or not state[2]:
                    del self._open[choice]

    def _hear(self, state: list[float], events: Sequence[Event], now: float) -> None:
        """What came without a count."""
        heard = 0
        for event in events:
            if type(event) is TextDelta or type(event) is ReasoningDelta:
                said = event.text
            elif type(event) is ToolCallDelta:
                said = event.arguments
            else:
                continue
            if said:
                heard += len(said) // CHARACTERS_PER_TOKEN or 1
        if not heard:
            return
        if state[2]:
            self._gaps.add_shared(now - state[0], heard)
        elif self._record.first_token_us is None:
            self._record.first_token_us = int((now - self._begun) * 1e6)
        state[0] = now
        state[2] += heard

    def _begin(self, choice: int, first: Event, tokens: int, now: float) -> list[float]:
        self._open[choice] = state = [now, tokens, 0]
        if type(first) is Started and first.prompt_tokens > self._prompt:
            self._prompt = first.prompt_tokens
        record, passed = self._record, int((now - self._begun) * 1e6)
        if record.first_event_us is None:
            record.first_event_us = passed
        if tokens and record.first_token_us is None:
            record.first_token_us = passed
        return state

    def close(self) -> None:
        """The request has ended; what did not finish is counted as far as it came."""
        if self._open:
            self._count_unfinished()
        # The estimate refers to the whole request, which must not stay in memory as long as this meter.
        self._estimate = int

    def _count_unfinished(self) -> None:
        heard = int(sum(tokens or seeming for _, tokens, seeming in self._open.values()))
        self._record.unfinished_tokens = heard + (0 if self._record.prompt_tokens else self._unfinished_prompt())
        self._open.clear()

    def _unfinished_prompt(self) -> int:
        is_uncounted = not self._prompt and any(seeming for _, _, seeming in self._open.values())
        return self._estimate() if is_uncounted else self._prompt
