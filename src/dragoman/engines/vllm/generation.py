"""Turns the outputs of one vLLM request into events, or into an embedding.

Rules
1. The first events are `Started` and the first token; `Finished` is the last.
2. If vLLM reports a stop, its last token is the stop token: it is neither delivered nor counted.
3. Text is split at whole characters. Incomplete characters are delivered at the end as replacement characters.
4. `process` has a fast path for the common case: one more token of a plain reply.
5. When the reasoning has used up its budget, the vLLM request is aborted and resumed after the tokens that close the
   reasoning. vLLM has the prefix in its cache.
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

import msgspec

from dragoman.core.embeddings import Embedding
from dragoman.core.errors import DragomanError, EngineFailed, engine_failure
from dragoman.core.events import Event, TextDelta, TokenLogprob
from dragoman.core.request import Logprobs
from dragoman.engines.reply_limits import ThinkingBudget
from dragoman.engines.token_engine import MIN_LOGPROB, ReplySettings, TokenGeneration
from dragoman.engines.vllm.vllm_api import ABORT, ERROR, LENGTH, STOP, StepOutput
from dragoman.engines.vllm.vocabulary import HfVocabulary, TextDecoder
from dragoman.grammar.masks import Guide

log = logging.getLogger("dragoman.engine")


class VllmReplySettings(ReplySettings, frozen=True, kw_only=True):
    """`head` are tokens appended to the prompt to close the reasoning before the model generates."""

    head: tuple[int, ...] = ()
    logprobs: Logprobs | None = None


class PendingEmbedding:
    """One text that was submitted to vLLM."""

    def __init__(self, request: Any, future: "asyncio.Future[Embedding]") -> None:
        self.request = request
        self.future = future
        self.is_dropped = False

    def resolve(self, output: StepOutput) -> None:
        if output.finish_reason in (ABORT, ERROR) or output.pooling_output is None:
            self.fail(EngineFailed("vLLM returned no embedding; see its log"))
            return
        try:
            embedding = Embedding.of(output.pooling_output.flatten().tolist(), len(self.request.prompt_token_ids))
        except Exception as error:
            # For example, half-precision poolers may return NaN.
            log.exception("an embedding of vLLM could not be read")
            self.fail(engine_failure(error))
            return
        if not self.future.done():
            self.future.set_result(embedding)

    def fail(self, error: Exception) -> None:
        if not self.future.done():
            self.future.set_exception(error)


class VllmGeneration(TokenGeneration):
    settings: VllmReplySettings
    decoder: TextDecoder

    def __init__(self, vocabulary: HfVocabulary, settings: VllmReplySettings, request: Any) -> None:
        """`request` is the vLLM request; its id identifies the outputs."""
        super().__init__(settings, vocabulary.create_decoder())
        self.vocabulary = vocabulary
        self.request = request
        self.is_dropped = False
        self.fail = self.events.fail
        self.is_plain = settings.logprobs is None and settings.guide is None and settings.budget is None
        self.has_started = False
        self.reply_tokens: list[int] = []
        """All tokens so far; recorded only if there is a thinking budget."""
        self.needs_abort = False
        """Whether the reply has ended while vLLM is still generating."""
        self.closing_tokens: Sequence[int] = ()
        """Tokens that must come next, because the reasoning has used up its budget."""

    def process(self, output: StepOutput) -> tuple[Event, ...]:
        """Return the events for the output of one step."""
        tokens = output.new_token_ids
        if self.has_started and self.is_plain and output.finish_reason is None and len(tokens) == 1:
            self.count += 1
            token = tokens[0]
            return (TextDelta(self.decoder.feed(token), 1, (token,)),)
        return tuple(self._process_slowly(output))

    def _process_slowly(self, output: StepOutput) -> list[Event]:
        reason = output.finish_reason
        if reason in (ABORT, ERROR):
            raise EngineFailed("vLLM aborted the request; see its log")
        events: list[Event] = [] if self.has_started else self._create_started(output)
        tokens = output.new_token_ids[:-1] if reason == STOP else output.new_token_ids
        if self.count >= self.settings.limit:
            # vLLM always generates at least one token.
            tokens, reason = [], LENGTH
            self.needs_abort = output.finish_reason is None
        events += self._process_tokens(tokens, output)
        if self.has_ended:
            return events
        if reason is not None:
            events += self.finish("length" if reason == LENGTH else "stop")
        return events

    def _create_started(self, output: StepOutput) -> list[Event]:
        self.has_started = True
        stats = output.prefill_stats
        cached = 0 if stats is None else min(stats.num_cached_tokens, len(self.settings.prompt))
        started = self.create_started(self._prompt_logprobs(output), cached)
        return [started, *self._add_forced(self.settings.head)]

    def _add_forced(self, tokens: Sequence[int]) -> list[Event]:
        """Add tokens that the model did not choose."""
        if not tokens:
            return []
        self.count += len(tokens)
        self.reply_tokens += tokens
        text = "".join([self.decoder.feed(token) for token in tokens])
        return [TextDelta(text, len(tokens), tuple(tokens))]

    def close_thought(self) -> tuple[Event, ...]:
        events, self.closing_tokens = self._add_forced(self.closing_tokens), ()
        if self.count >= self.settings.limit:
            events += self.finish("length")
        return tuple(events)

    def resume(self, request_id: str) -> None:
        """Turn the vLLM request into one that continues after the tokens that close the reasoning."""
        request = self.request
        request.request_id = request_id
        request.prompt_token_ids = [*self.settings.prompt, *self.reply_tokens]
        request.sampling_params.max_tokens = max(self.settings.limit - self.count, 1)
        # The log probabilities of the prompt have been delivered.
        request.sampling_params.prompt_logprobs = None

    def _process_tokens(self, tokens: Sequence[int], output: StepOutput) -> list[Event]:
        events: list[Event] = []
        for at, token in enumerate(tokens):
            self.count += 1
            text = self.decoder.feed(token)
            events.append(TextDelta(text, 1, (token,), self._logprobs(output, at)))
            if self.guide is not None and self._is_repeated_call(self.guide, token, text):
                self.needs_abort = output.finish_reason is None
                return events + self.finish("stop")
            if self.budget is not None and self._is_budget_used_up(self.budget, token, text, output):
                break
        return events

    def _is_repeated_call(self, guide: Guide, token: int, text: str) -> bool:
        """Whether the reply has repeated the previous tool call."""
        try:
            guide.advance(token)
        except DragomanError:
            # vLLM enforces the grammar; the guide only observes.
            self.guide = None
            return False
        return self.repeated_calls is not None and self.repeated_calls.is_repeated(text, guide.is_accepting)

    def _is_budget_used_up(self, budget: ThinkingBudget, token: int, text: str, output: StepOutput) -> bool:
        self.reply_tokens.append(token)
        budget.add_token(text)
        if output.finish_reason is not None or not budget.closing_tokens:
            return False
        self.closing_tokens = budget.closing_tokens[: self.settings.limit - self.count]
        budget.mark_closed()
        return bool(self.closing_tokens)

    def _logprobs(self, output: StepOutput, at: int) -> tuple[TokenLogprob, ...]:
        asked, found = self.settings.logprobs, output.new_logprobs
        if asked is None or asked.top is None or found is None:
            return ()
        return (self._to_logprob(found[0][at].tolist(), found[1][at].tolist(), asked.top),)

    def _prompt_logprobs(self, output: StepOutput) -> tuple[TokenLogprob, ...]:
        asked, found = self.settings.logprobs, output.new_prompt_logprobs_tensors
        if asked is None or asked.prompt is None or found is None:
            return ()
        rows = zip(found[0].tolist(), found[1].tolist(), strict=True)
        first = self.settings.prompt[0]
        return (
            TokenLogprob(first, self.vocabulary.pieces[first], None),
            *(self._to_logprob(tokens, values, asked.prompt) for tokens, values in rows),
        )

    def _to_logprob(self, tokens: Sequence[int], values: Sequence[float], top: int) -> TokenLogprob:
        """Convert a row of vLLM: the token itself comes first, then the most likely tokens."""
        pieces = self.vocabulary.pieces
        entries = [
            TokenLogprob(token, pieces[token], max(value, MIN_LOGPROB))
            for token, value in zip(tokens[: top + 1], values, strict=False)
        ]
        return msgspec.structs.replace(entries[0], top=tuple(entries[1:]))
