"""The events of a reply that is complete, so that it is encoded as its stream would be."""

from collections.abc import Iterator, Sequence

from dragoman.core.events import (
    Event,
    Finished,
    ReasoningDelta,
    TextDelta,
    TokenLogprob,
    ToolCallDelta,
    ToolCallStart,
    Usage,
)
from dragoman.core.reply import Choice
from dragoman.core.request import Reasoning, Text, ToolCall


def reply_events(choice: Choice, usage: Usage) -> Iterator[Event]:
    """Return the events of a reply. The last text gets the remaining logprobs, even if its end was cut off."""
    texts = [part for part in choice.parts if isinstance(part, Text)]
    logprobs = choice.logprobs
    if not texts:
        yield TextDelta("", logprobs=logprobs)
    for part in choice.parts:
        if isinstance(part, Text):
            count = len(logprobs) if part is texts[-1] else _count_tokens(part.text, logprobs)
            yield TextDelta(part.text, logprobs=logprobs[:count])
            logprobs = logprobs[count:]
        elif isinstance(part, Reasoning):
            yield ReasoningDelta(part.text, signature=part.signature)
        elif isinstance(part, ToolCall):
            yield ToolCallStart(part.id, part.name)
            yield ToolCallDelta(part.arguments)
    yield Finished(choice.reason, usage=usage)


def _count_tokens(text: str, logprobs: Sequence[TokenLogprob]) -> int:
    count, left = 0, len(text.encode())
    while left > 0 and count < len(logprobs):
        left -= len(logprobs[count].text)
        count += 1
    return count
