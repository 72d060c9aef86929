"""Turns the logits of one request into events.

The request is prepared outside the runner's thread, then lives in it. Its events return to the event loop through its
inbox.

Rules
1. `Started` comes first, together with the first token. `Finished` comes last.
2. A token that ends the text (an end-of-generation token or a stop token of the request) is not delivered or counted.
3. Text is delivered in whole characters. A token that ends inside a character has no text, and an incomplete character
   at the end becomes the replacement character.
4. A constrained reply ends where its grammar does. Stop tokens and end-of-generation tokens do not end it earlier; the
   token limit does, with the reason `length`.
5. Drafts do not change the choice of tokens: each token is picked from the logits of its own row, until one differs
   from the draft. Drafts do change the rounding of the logits, so a request with a seed has none.
6. A list of forced tool calls ends when a call repeats the previous one word for word, because weak models would repeat
   it for ever.
"""

import itertools
from collections import deque
from collections.abc import Sequence

import msgspec
import numpy as np

from dragoman.core.detokenizer import Detokenizer
from dragoman.core.errors import EngineFailed
from dragoman.core.event_queue import EventQueue
from dragoman.core.events import Event, Finished, FinishReason, Started, TextDelta, TokenLogprob, Usage
from dragoman.core.request import GenerationRequest
from dragoman.engines.llama.binding import Context, LlamaModel
from dragoman.engines.llama.sampling import SamplingParams, TokenMask, TokenPicker, token_logprob
from dragoman.engines.llama.scheduler import Chunk, Job
from dragoman.engines.llama.speculation import DraftLookup
from dragoman.engines.reply_limits import RepeatedCallDetector, ThinkingBudget
from dragoman.grammar.masks import Guide
from dragoman.grammar.schema_check import SchemaCheck

_ids = itertools.count()


class GenerationParams(msgspec.Struct, frozen=True):
    """Limits and constraints of a reply. `limit` is its maximum number of tokens."""

    limit: int
    guide: Guide | None = None
    checks: tuple[SchemaCheck, ...] = ()
    calls: bool = False
    budget: ThinkingBudget | None = None
    thinking: bool = False
    ignored: tuple[str, ...] = ()


class Generation:
    def __init__(
        self,
        request: GenerationRequest,
        model: LlamaModel,
        sampling: SamplingParams,
        prompt: tuple[int, ...],
        params: GenerationParams,
        lookup: DraftLookup | None = None,
    ) -> None:
        """`lookup` has indexed the prompt and supplies drafts. None disables drafts."""
        self.model = model
        self.sampling = sampling
        self.params = params
        self.limit = params.limit
        self.guide = params.guide
        self.budget = params.budget
        self.logprobs = request.logprobs
        self.stop_tokens = frozenset(request.stop_token_ids)
        self.ends = frozenset() if request.ignore_eos else model.ends
        self.masked_ends = sorted(model.ends) if request.ignore_eos else []
        self.prompt_text = _prompt_text(request, model) if request.echo else None
        prompt_outputs = request.logprobs is not None and request.logprobs.prompt
        self.job = Job(next(_ids), prompt, prompt_outputs, request.principal, request.keep_seconds)
        self.inbox = EventQueue()
        self.picker: TokenPicker | None = None
        self.prompt_logprobs: list[TokenLogprob] = []
        self.lookup = lookup
        self.detokenizer = Detokenizer()
        self.forced: deque[int] = deque()
        self.sections = RepeatedCallDetector() if params.calls else None
        self.cached = self.kept = 0
        self.count = 0

    def read_prompt(self, context: Context, chunk: Chunk, first_row: int) -> None:
        """Record the log probabilities of the prompt tokens that the chunk's rows predict."""
        prompt, text, top = self.job.prompt, self.model.pieces.__getitem__, self.logprobs.top if self.logprobs else 0
        if chunk.start == 0:
            self.prompt_logprobs.append(TokenLogprob(prompt[0], text(prompt[0]), None))
        for row, token in enumerate(prompt[chunk.start + 1 : chunk.start + len(chunk.tokens) + 1], first_row):
            self.prompt_logprobs.append(token_logprob(context.logits(row), token, top, text))

    def start(self, cached: int, kept: int) -> list[Event]:
        """Return the first events. Called when the prompt is in memory."""
        self.cached, self.kept = cached, kept
        started = Started(
            len(self.job.prompt),
            cached,
            tuple(self.prompt_logprobs),
            self.prompt_text,
            self.params.thinking,
            self.params.ignored,
            kept,
        )
        return [started] if self.limit else [started, *self._finish("length")]

    def step(self, context: Context, row: int) -> tuple[int, list[Event]]:
        """Pick the next token and return it with its events."""
        self._enforce_thinking_budget()
        token, logprobs = self._pick(context, row)
        if self._is_end(token):
            return token, self._finish("stop")
        if self.guide is not None:
            self.guide.take(token)
        self.count += 1
        if self.lookup is not None:
            self.lookup.append(token)
        text = self.detokenizer.feed(self.model.text(token))
        if self.budget is not None and not self.forced:
            self.budget.read(text)
        events: list[Event] = [TextDelta(text, count=1, tokens=(token,), logprobs=logprobs)]
        if self._is_complete(text):
            events += self._finish("stop")
        elif self.count >= self.limit:
            events += self._finish("length")
        return token, events

    def draft_chances(self) -> Sequence[float]:
        """Return the probabilities that one, two, three … drafted tokens are all right."""
        if self.lookup is None or self.forced:
            return ()
        return self.lookup.draft_chances(self.limit - self.count - 1)

    def draft(self, count: int) -> Sequence[int]:
        """Return up to `count` likely next tokens that the grammar allows."""
        tokens = () if self.lookup is None else self.lookup.guess(count)
        return tokens if self.guide is None else tokens[: self.guide.fitting(tokens)]

    def close(self) -> None:
        if self.picker is not None:
            self.picker.close()
            self.picker = None

    def _is_end(self, token: int) -> bool:
        if token in self.ends:
            return True
        return token in self.stop_tokens and (self.guide is None or self.guide.accepting)

    def _is_complete(self, text: str) -> bool:
        """Whether a constrained reply ends after this text."""
        if self.guide is None:
            return False
        repeated = self.sections is not None and self.sections.repeats(text, self.guide.accepting)
        return repeated or self.guide.complete

    def _enforce_thinking_budget(self) -> None:
        """End the thinking when its budget is used up, if the grammar allows it."""
        if self.budget is None or self.forced or not (closing := self.budget.closing):
            return
        self.budget.closed()
        if self.guide is None or self.guide.lets(closing):
            self.forced.extend(closing)

    def _pick(self, context: Context, row: int) -> tuple[int, tuple[TokenLogprob, ...]]:
        if self.picker is None:
            self.picker = TokenPicker(self.sampling, self.job.prompt)
        if self.logprobs is None:
            return self._next_token(self.picker, context, row), ()
        # Picking writes bias, penalties and mask into the logits.
        logits = context.logits(row).copy()
        token = self._next_token(self.picker, context, row)
        return token, (token_logprob(logits, token, self.logprobs.top, self.model.pieces.__getitem__),)

    def _next_token(self, picker: TokenPicker, context: Context, row: int) -> int:
        if self.forced:
            token = self.forced.popleft()
            picker.count(token)
            return token
        return picker.pick(context, row, None if self.guide is None else self._allowed_tokens(self.guide))

    def _allowed_tokens(self, guide: Guide) -> TokenMask:
        allowed: TokenMask = guide.allowed(self.model.vocab_size)
        if self.masked_ends and np.count_nonzero(allowed) > np.count_nonzero(allowed[self.masked_ends]):
            allowed[self.masked_ends] = False
        if not allowed.any():
            raise EngineFailed("the grammar of the reply allows no further token")
        return allowed

    def _finish(self, reason: FinishReason) -> list[Event]:
        rest = self.detokenizer.flush()
        usage = Usage(prompt=len(self.job.prompt), completion=self.count, cached=self.cached, kept=self.kept)
        finished = Finished(reason, usage=usage)
        return [TextDelta(rest, count=0), finished] if rest else [finished]


def _prompt_text(request: GenerationRequest, model: LlamaModel) -> str | None:
    prompt = request.prompt
    return model.detokenize(prompt) if isinstance(prompt, tuple) else prompt
