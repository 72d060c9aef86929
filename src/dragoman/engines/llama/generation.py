"""One request's way from logits to events.

The request is prepared by the event loop's side, then lives in the runner's thread; the events it makes go back to the
event loop through its inbox.

Rules
1. The first events are `Started` and the first token's; `Finished` is the last.
2. A token that ends the text (end of generation, or one of the request's stop tokens) is neither delivered nor counted.
3. Text is cut at whole characters: a token that ends inside one is delivered with no text, and what never became a
   character is delivered at the end as the replacement character.
4. A reply that is kept to a shape ends where the shape does, and nowhere before: neither a stop token nor the end of
   generation cuts it. Only the limit does, and then the reason says so.
5. Drafts change nothing: each token is picked from the logits of its own row, with the mask, the penalties and the
   chance that are due there, in the order of the text, until one is not the one that was drafted. They do change how
   the logits are rounded, so there are none for a request with a seed.
6. Calls that must be made end when one repeats the one before it word for word: a weak model would go on repeating it.
"""

import itertools
from collections import deque
from collections.abc import Sequence

import msgspec
import numpy as np

from dragoman.core.detokenizer import Detokenizer
from dragoman.core.errors import EngineFailed
from dragoman.core.event_queue import Mailbox
from dragoman.core.events import Event, Finished, FinishReason, Started, TextDelta, TokenLogprob, Usage
from dragoman.core.request import GenerationRequest
from dragoman.engines.llama.binding import Context, Model
from dragoman.engines.llama.sampling import Allowed, Picker, Recipe, token_logprob
from dragoman.engines.llama.scheduler import Chunk, Job
from dragoman.engines.llama.speculation import Lookup
from dragoman.engines.reply_limits import Budget, Sections
from dragoman.grammar.masks import Guide
from dragoman.grammar.schema_check import Check

_ids = itertools.count()


class Bearings(msgspec.Struct, frozen=True):
    """What a reply is kept to. `limit` is the most tokens it may have; `ignored` what could not be honoured."""

    limit: int
    guide: Guide | None = None
    checks: tuple[Check, ...] = ()
    calls: bool = False
    budget: Budget | None = None
    thinking: bool = False
    ignored: tuple[str, ...] = ()


class Generation:
    def __init__(
        self,
        request: GenerationRequest,
        model: Model,
        recipe: Recipe,
        prompt: tuple[int, ...],
        bearings: Bearings,
        lookup: Lookup | None = None,
    ) -> None:
        """`lookup`, which knows the prompt, is what drafts come from; None: there are none."""
        self.model = model
        self.recipe = recipe
        self.bearings = bearings
        self.limit = bearings.limit
        self.guide = bearings.guide
        self.budget = bearings.budget
        self.logprobs = request.logprobs
        self.stop_tokens = frozenset(request.stop_token_ids)
        self.ends = frozenset() if request.ignore_eos else model.ends
        self.unwanted = sorted(model.ends) if request.ignore_eos else []
        self.prompt_text = _prompt_text(request, model) if request.echo else None
        prompt_outputs = request.logprobs is not None and request.logprobs.prompt
        self.job = Job(next(_ids), prompt, prompt_outputs, request.principal, request.keep_seconds)
        self.inbox = Mailbox()
        self.picker: Picker | None = None
        self.prompt_logprobs: list[TokenLogprob] = []
        self.lookup = lookup
        self.detokenizer = Detokenizer()
        self.forced: deque[int] = deque()
        self.sections = Sections() if bearings.calls else None
        self.cached = self.kept = 0
        self.count = 0

    def read_prompt(self, context: Context, chunk: Chunk, first_row: int) -> None:
        """Note the log probabilities of the prompt's tokens, of which the chunk's rows foretell the next ones."""
        prompt, text, top = self.job.prompt, self.model.pieces.__getitem__, self.logprobs.top if self.logprobs else 0
        if chunk.start == 0:
            self.prompt_logprobs.append(TokenLogprob(prompt[0], text(prompt[0]), None))
        for at, token in enumerate(prompt[chunk.start + 1 : chunk.start + len(chunk.tokens) + 1]):
            self.prompt_logprobs.append(token_logprob(context.logits(first_row + at), token, top, text))

    def start(self, cached: int, kept: int) -> list[Event]:
        """The prompt is in memory."""
        self.cached, self.kept = cached, kept
        started = Started(
            len(self.job.prompt),
            cached,
            tuple(self.prompt_logprobs),
            self.prompt_text,
            self.bearings.thinking,
            self.bearings.ignored,
            kept,
        )
        return [started] if self.limit else [started, *self._finish("length")]

    def step(self, context: Context, row: int) -> tuple[int, list[Event]]:
        """Pick the next token, and say what it means to the reader."""
        self._force_closing()
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

    def hopes(self) -> Sequence[float]:
        """How likely one, two, three … further tokens are to come as they would be drafted."""
        if self.lookup is None or self.forced:
            return ()
        return self.lookup.hopes(self.limit - self.count - 1)

    def draft(self, count: int) -> Sequence[int]:
        """So many tokens that may come next, fewer where the shape of the reply does not let them."""
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
        """Whether the shape is, behind this text."""
        if self.guide is None:
            return False
        repeated = self.sections is not None and self.sections.repeats(text, self.guide.accepting)
        return repeated or self.guide.complete

    def _force_closing(self) -> None:
        """Close a thought that has used up its budget, if the reply may go on that way."""
        closing = self.budget.closing if self.budget is not None and not self.forced else ()
        if self.budget is None or not closing:
            return
        self.budget.closed()
        if self.guide is None or self.guide.lets(closing):
            self.forced.extend(closing)

    def _pick(self, context: Context, row: int) -> tuple[int, tuple[TokenLogprob, ...]]:
        if self.picker is None:
            self.picker = Picker(self.recipe, self.job.prompt)
        if self.logprobs is None:
            return self._next(self.picker, context, row), ()
        # Picking writes bias, penalties and mask into the logits.
        logits = context.logits(row).copy()
        token = self._next(self.picker, context, row)
        return token, (token_logprob(logits, token, self.logprobs.top, self.model.pieces.__getitem__),)

    def _next(self, picker: Picker, context: Context, row: int) -> int:
        if self.forced:
            token = self.forced.popleft()
            picker.count(token)
            return token
        return picker.pick(context, row, None if self.guide is None else self._allowed(self.guide))

    def _allowed(self, guide: Guide) -> Allowed:
        allowed: Allowed = guide.allowed(self.model.vocab_size)
        if self.unwanted and np.count_nonzero(allowed) > np.count_nonzero(allowed[self.unwanted]):
            allowed[self.unwanted] = False
        if not allowed.any():
            raise EngineFailed("nothing may follow in the shape of the reply")
        return allowed

    def _finish(self, reason: FinishReason) -> list[Event]:
        rest = self.detokenizer.flush()
        usage = Usage(prompt=len(self.job.prompt), completion=self.count, cached=self.cached, kept=self.kept)
        finished = Finished(reason, usage=usage)
        return [TextDelta(rest, count=0), finished] if rest else [finished]


def _prompt_text(request: GenerationRequest, model: Model) -> str | None:
    prompt = request.prompt
    return model.detokenize(prompt) if isinstance(prompt, tuple) else prompt
