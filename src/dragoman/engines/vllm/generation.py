"""One request's way from the tokens of a step to events.

Rules
1. The first events are `Started` and the first token's; `Finished` is the last.
2. The token that ends the text is vLLM's last one where it says that it stopped; it is neither delivered nor counted.
3. Text is cut at whole characters, and what never became one is delivered at the end as the replacement character.
4. Almost every token is the next of a reply about which nothing has to be known: `take` has a short way for it.
5. A thought that has used up its budget is closed: what vLLM works on is given up, and taken up again behind the tokens
   that close the thought. vLLM has the beginning in its memory.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from dragoman.core.errors import EngineFailed
from dragoman.core.events import Event, Finished, FinishReason, Started, TextDelta, TokenLogprob, Usage
from dragoman.engines.reply_limits import Budget, Sections
from dragoman.engines.vllm.vllm_api import ABORT, ERROR, LENGTH, STOP, Output
from dragoman.engines.vllm.vocabulary import Tokens
from dragoman.grammar.masks import Guide
from dragoman.grammar.schema_check import Check

LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot say."""


class Bearings(msgspec.Struct, frozen=True):
    """What is known of a reply beforehand. `head` are tokens that close a thought before the model has its say, and
    were given to it behind the prompt; `top` is how many rivals of each token are wanted, None for no log
    probabilities. `guide` follows the shape of the reply where something has to be known of it that vLLM does not
    tell."""

    prompt: tuple[int, ...]
    limit: int
    head: tuple[int, ...] = ()
    top: int | None = None
    prompt_top: int | None = None
    prompt_text: str | None = None
    guide: Guide | None = None
    checks: tuple[Check, ...] = ()
    calls: bool = False
    budget: Budget | None = None
    thinking: bool = False
    ignored: tuple[str, ...] = ()


class Work:
    def __init__(self, key: int, vocabulary: Tokens, bearings: Bearings, request: Any) -> None:
        """`request` is what vLLM was given; it has the id under which vLLM answers."""
        self.key = key
        self.vocabulary = vocabulary
        self.bearings = bearings
        self.request = request
        self.spelling = vocabulary.spelling()
        self.guide = bearings.guide
        self.sections = Sections() if bearings.calls and bearings.guide is not None else None
        self.budget = bearings.budget
        self.plain = bearings.top is None and bearings.guide is None and bearings.budget is None
        self.started = False
        self.cached = 0
        self.count = 0
        self.said: list[int] = []
        """All tokens, where a budget may want them again."""
        self.ended = False
        self.given_up = False
        """vLLM still works on it, and nobody wants what comes."""
        self.closing: Sequence[int] = ()
        """What has to come next, because a thought has used up its budget."""

    def take(self, output: Output) -> tuple[Event, ...]:
        """What a step made for it. Raises what failed."""
        tokens = output.new_token_ids
        if self.started and self.plain and output.finish_reason is None and len(tokens) == 1:
            self.count += 1
            token = tokens[0]
            return (TextDelta(self.spelling.take(token), 1, (token,)),)
        return tuple(self._taken(output))

    def _taken(self, output: Output) -> list[Event]:
        reason = output.finish_reason
        if reason in (ABORT, ERROR):
            raise EngineFailed("vLLM gave the request up; its log may say why")
        events: list[Event] = [] if self.started else self._start(output)
        tokens = output.new_token_ids[:-1] if reason == STOP else output.new_token_ids
        if self.count >= self.bearings.limit:
            # vLLM writes one token at least, even where none is wanted.
            tokens, reason = [], LENGTH
            self.given_up = output.finish_reason is None
        events += self._said(tokens, output)
        if self.ended:
            return events
        if reason is not None:
            events += self.finish("length" if reason == LENGTH else "stop")
        return events

    def _start(self, output: Output) -> list[Event]:
        self.started = True
        bearings, stats = self.bearings, output.prefill_stats
        self.cached = 0 if stats is None else min(stats.num_cached_tokens, len(bearings.prompt))
        started = Started(
            len(bearings.prompt),
            self.cached,
            self._prompt_logprobs(output),
            bearings.prompt_text,
            bearings.thinking,
            bearings.ignored,
        )
        return [started, *self.forced(bearings.head)]

    def forced(self, tokens: Sequence[int]) -> list[Event]:
        """Tokens that the model did not choose."""
        if not tokens:
            return []
        self.count += len(tokens)
        self.said += tokens
        text = "".join([self.spelling.take(token) for token in tokens])
        return [TextDelta(text, len(tokens), tuple(tokens))]

    def close_thought(self) -> list[Event]:
        events, self.closing = self.forced(self.closing), ()
        return events + self.finish("length") if self.count >= self.bearings.limit else events

    def _said(self, tokens: Sequence[int], output: Output) -> list[Event]:
        events: list[Event] = []
        for at, token in enumerate(tokens):
            self.count += 1
            text = self.spelling.take(token)
            events.append(TextDelta(text, 1, (token,), self._logprobs(output, at)))
            if self.guide is not None and self._is_repetition(self.guide, token, text):
                self.given_up = output.finish_reason is None
                return events + self.finish("stop")
            if self.budget is not None and self._is_used_up(self.budget, token, text, output):
                break
        return events

    def _is_repetition(self, guide: Guide, token: int, text: str) -> bool:
        """Whether a call has been made that is the same as the one before."""
        try:
            guide.take(token)
        except EngineFailed:
            # vLLM keeps the reply to its shape; this one is only here to look on.
            self.guide = None
            return False
        return self.sections is not None and self.sections.repeats(text, guide.accepting)

    def _is_used_up(self, budget: Budget, token: int, text: str, output: Output) -> bool:
        self.said.append(token)
        budget.read(text)
        if output.finish_reason is not None or not budget.closing:
            return False
        self.closing = budget.closing[: self.bearings.limit - self.count]
        budget.closed()
        return bool(self.closing)

    def finish(self, reason: FinishReason) -> list[Event]:
        self.ended = True
        rest = self.spelling.flush()
        usage = Usage(prompt=len(self.bearings.prompt), completion=self.count, cached=self.cached)
        finished = Finished(reason, usage=usage)
        return [TextDelta(rest, count=0), finished] if rest else [finished]

    def _logprobs(self, output: Output, at: int) -> tuple[TokenLogprob, ...]:
        top, found = self.bearings.top, output.new_logprobs
        if top is None or found is None:
            return ()
        return (self._logprob(found[0][at].tolist(), found[1][at].tolist(), top),)

    def _prompt_logprobs(self, output: Output) -> tuple[TokenLogprob, ...]:
        top, found = self.bearings.prompt_top, output.new_prompt_logprobs_tensors
        if top is None or found is None:
            return ()
        rows = zip(found[0].tolist(), found[1].tolist(), strict=True)
        first = self.bearings.prompt[0]
        return (
            TokenLogprob(first, self.vocabulary.pieces[first], None),
            *(self._logprob(tokens, values, top) for tokens, values in rows),
        )

    def _logprob(self, tokens: Sequence[int], values: Sequence[float], top: int) -> TokenLogprob:
        """vLLM has the token itself first, then the likeliest."""
        pieces = self.vocabulary.pieces
        made = [
            TokenLogprob(token, pieces[token], max(value, LEAST_LOGPROB))
            for token, value in zip(tokens[: top + 1], values, strict=False)
        ]
        return msgspec.structs.replace(made[0], top=tuple(made[1:]))
