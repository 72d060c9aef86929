"""Builds a generation from a request, outside the compute thread, and turns its logits into events, inside of it.

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
   it forever.
"""

import itertools
from collections import deque
from collections.abc import Sequence

import numpy as np

from dragoman.core.errors import BadRequest, EngineFailed
from dragoman.core.events import Detokenizer, Event, TextDelta, TokenLogprob
from dragoman.core.request import GenerationRequest, Logprobs
from dragoman.engines.llama.binding import Context, LlamaModel
from dragoman.engines.llama.options import LlamaOptions
from dragoman.engines.llama.sampling import (
    SamplingParams,
    TokenMask,
    TokenSampler,
    complete_sampling,
    default_sampling,
    token_logprob,
)
from dragoman.engines.llama.scheduler import Chunk, Job
from dragoman.engines.llama.speculation import DraftLookup
from dragoman.engines.prompt_reader import PromptTokens
from dragoman.engines.token_engine import ReplySettings, RequestBuilder, TokenGeneration
from dragoman.formats import detect_format, get_format
from dragoman.grammar.constraints import CompiledConstraint, ConstraintCompiler


class Generation(TokenGeneration):
    decoder: Detokenizer

    def __init__(
        self,
        job: Job,
        request: GenerationRequest,
        model: LlamaModel,
        sampling: SamplingParams,
        settings: ReplySettings,
        lookup: DraftLookup | None = None,
    ) -> None:
        """`lookup` has indexed the prompt and supplies drafts. None disables drafts."""
        super().__init__(settings, Detokenizer())
        self.job = job
        self.model = model
        self.sampling = sampling
        self.limit = settings.limit
        self.logprobs = request.logprobs or Logprobs(top=None)
        self.stop_tokens = frozenset(request.stop_token_ids)
        self.ends = frozenset() if request.ignore_eos else model.ends
        self.masked_ends = sorted(model.ends) if request.ignore_eos else []
        self.sampler: TokenSampler | None = None
        self.prompt_logprobs: list[TokenLogprob] = []
        self.lookup = lookup
        self.forced: deque[int] = deque()

    def read_prompt(self, context: Context, chunk: Chunk, first_row: int) -> None:
        """Record the log probabilities of the prompt tokens that the chunk's rows predict."""
        prompt, text, top = self.job.prompt, self.model.pieces.__getitem__, self.logprobs.prompt or 0
        if chunk.start == 0:
            self.prompt_logprobs.append(TokenLogprob(prompt[0], text(prompt[0]), None))
        for row, token in enumerate(prompt[chunk.start + 1 : chunk.start + len(chunk.tokens) + 1], first_row):
            self.prompt_logprobs.append(token_logprob(context.logits(row), token, top, text))

    def start(self, cached: int, kept: int) -> list[Event]:
        """Return the first events. Called when the prompt is in memory."""
        started = self.create_started(self.prompt_logprobs, cached, kept)
        if not self.limit:
            return [started, *self.finish("length")]
        # The text that the reply continues may be a complete answer.
        is_complete = self.guide is not None and self.guide.is_complete
        return [started, *self.finish("stop")] if is_complete else [started]

    def step(self, context: Context, row: int) -> tuple[int, list[Event]]:
        """Pick the next token and return it with its events."""
        self._enforce_thinking_budget()
        token, logprobs = self._pick(context, row)
        is_stop_token = token in self.stop_tokens and (self.guide is None or self.guide.is_accepting)
        if is_stop_token or token in self.ends:
            return token, self.finish("stop")
        if self.guide is not None:
            self.guide.advance(token)
        self.count += 1
        if self.lookup is not None:
            self.lookup.append(token)
        text = self.decoder.feed(self.model.text(token))
        if self.budget is not None and not self.forced:
            self.budget.add_token(text)
        events: list[Event] = [TextDelta(text, count=1, tokens=(token,), logprobs=logprobs)]
        if self._is_complete(text):
            events += self.finish("stop")
        elif self.count >= self.limit:
            events += self.finish("length")
        return token, events

    def draft_chances(self) -> Sequence[float]:
        """Return the probabilities that one, two, three … drafted tokens are all right."""
        if self.lookup is None or self.forced:
            return ()
        return self.lookup.draft_chances(self.limit - self.count - 1)

    def draft(self, count: int) -> Sequence[int]:
        """Return up to `count` likely next tokens that the grammar allows."""
        tokens = () if self.lookup is None else self.lookup.guess(count)
        return tokens if self.guide is None else tokens[: self.guide.count_allowed(tokens)]

    def close(self) -> None:
        """Free the sampler, in the compute thread."""
        if self.sampler is not None:
            self.sampler.close()
            self.sampler = None

    def _is_complete(self, text: str) -> bool:
        """Whether a constrained reply ends after this text."""
        if self.guide is None:
            return False
        repeated = self.repeated_calls is not None and self.repeated_calls.is_repeated(text, self.guide.is_accepting)
        return repeated or self.guide.is_complete

    def _enforce_thinking_budget(self) -> None:
        """End the thinking when its budget is used up, if the grammar allows it."""
        if self.budget is None or self.forced or not (closing := self.budget.closing_tokens):
            return
        self.budget.mark_closed()
        if self.guide is None or self.guide.allows(closing):
            self.forced.extend(closing)

    def _pick(self, context: Context, row: int) -> tuple[int, tuple[TokenLogprob, ...]]:
        if self.sampler is None:
            self.sampler = TokenSampler(self.sampling, self.job.prompt, self.model.vocab_size)
        # Picking writes bias, penalties and mask into the logits.
        top = self.logprobs.top
        logits = None if top is None else context.logits(row).copy()
        if self.forced:
            token = self.forced.popleft()
            self.sampler.count(token)
        else:
            token = self.sampler.pick(context, row, self._allowed_tokens())
        if top is None or logits is None:
            return token, ()
        return token, (token_logprob(logits, token, top, self.model.pieces.__getitem__),)

    def _allowed_tokens(self) -> TokenMask | None:
        if self.guide is None:
            return None
        allowed: TokenMask = self.guide.allowed_tokens(self.model.vocab_size)
        if self.masked_ends and np.count_nonzero(allowed) > np.count_nonzero(allowed[self.masked_ends]):
            allowed[self.masked_ends] = False
        if not allowed.any():
            raise EngineFailed("the grammar of the reply allows no further token")
        return allowed


class LlamaRequestBuilder(RequestBuilder[Generation]):
    model: LlamaModel

    def __init__(self, model: LlamaModel, context: int, options: LlamaOptions) -> None:
        name = options.format or detect_format(model.chat_template, model.metadata.get("general.name", ""))
        super().__init__(model, context, get_format(name), options.template_options)
        self.speculation = options.speculation and not model.is_recurrent
        self.defaults = default_sampling(model.metadata)
        self._ids = itertools.count()
        self.constraints = ConstraintCompiler(self.grammar_model, model.pieces, model.hidden, self.tokenize_inner_text)

    def uses_drafts(self, request: GenerationRequest) -> bool:
        """Whether to draft tokens. Drafts change the rounding of logits, so a request with a seed has none."""
        return self.speculation and request.sampling.seed is None

    def min_reply_tokens(self, request: GenerationRequest) -> int:
        return 0 if request.max_tokens == 0 else 1

    async def constrain(self, request: GenerationRequest, prompt: PromptTokens) -> CompiledConstraint | None:
        begins = self.grammar_beginning(request, prompt.opener)
        return await self.constraints.constrain(request, thinks=self.may_think(request), begins=begins)

    def _skip_prefill(self, request: GenerationRequest, constrained: CompiledConstraint) -> None:
        """Advance the grammar by the text that the reply continues."""
        prefill, shape = request.prefill, constrained.shape
        # Required calls follow the text, unless they begin in it.
        if prefill is None or self.constraints.skip(constrained.guide, prefill.text) or shape.calls:
            return
        param = request.prefill_path
        message = f"{param}: the reply cannot continue this text, because it does not fit {shape.param}"
        raise BadRequest(message, param=param)

    def build(
        self, request: GenerationRequest, prompt: PromptTokens, constrained: CompiledConstraint | None = None
    ) -> Generation:
        shape = None if constrained is None else constrained.shape
        if constrained is not None:
            self._skip_prefill(request, constrained)
        settings = ReplySettings(
            prompt=prompt.tokens,
            limit=self.max_reply_tokens(request, len(prompt.tokens)),
            prompt_text=self.prompt_text(request),
            shows_prompt=request.delivery.token_ids,
            guide=None if constrained is None else constrained.guide,
            checks=() if shape is None else shape.checks,
            calls=shape is not None and shape.calls,
            budget=self.create_thinking_budget(request, prompt.opener),
            thinking=prompt.opener is not None,
            ignored=(*prompt.ignored, *(() if shape is None else shape.relaxed)),
        )
        prompt_outputs = request.logprobs is not None and request.logprobs.prompt is not None
        is_batch = request.priority == "batch"
        job = Job(next(self._ids), prompt.tokens, prompt_outputs, request.principal, request.keep_seconds, is_batch)
        sampling = complete_sampling(request.sampling, self.defaults, self.model.suppressed)
        # Indexing a long prompt takes time, so it is not done in the compute thread.
        lookup = DraftLookup(prompt.tokens) if self.uses_drafts(request) else None
        return Generation(job, request, self.model, sampling, settings, lookup)
