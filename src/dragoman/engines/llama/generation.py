"""One request's way from logits to events.

The request is prepared by the event loop's side, then lives in the runner's thread; the events it makes go back to the
event loop through its inbox.

Rules
1. The first events are `Started` and the first token's; `Finished` is the last.
2. A token that ends the text (end of generation, or one of the request's stop tokens) is neither delivered nor counted.
3. Text is cut at whole characters: a token that ends inside one is delivered with no text, and what never became a
   character is delivered at the end as the replacement character.
"""

import itertools

from dragoman.conversation import GenerationRequest
from dragoman.detokenize import Detokenizer
from dragoman.engines.llama.binding import Context, Model
from dragoman.engines.llama.sampling import Picker, Recipe, token_logprob
from dragoman.engines.llama.scheduler import Chunk, Job
from dragoman.events import Event, Finished, FinishReason, Started, TextDelta, TokenLogprob, Usage
from dragoman.mailbox import Mailbox

_ids = itertools.count()


class Generation:
    def __init__(
        self, request: GenerationRequest, model: Model, recipe: Recipe, *, prompt: tuple[int, ...], limit: int
    ) -> None:
        """`limit` is the most tokens the reply may have."""
        self.model = model
        self.recipe = recipe
        self.limit = limit
        self.logprobs = request.logprobs
        self.ends = frozenset(request.stop_token_ids) | (frozenset() if request.ignore_eos else model.ends)
        self.prompt_text = _prompt_text(request, model) if request.echo else None
        self.job = Job(next(_ids), prompt, prompt_outputs=request.logprobs is not None and request.logprobs.prompt)
        self.inbox = Mailbox()
        self.picker: Picker | None = None
        self.prompt_logprobs: list[TokenLogprob] = []
        self.detokenizer = Detokenizer()
        self.cached = 0
        self.count = 0

    def read_prompt(self, context: Context, chunk: Chunk, first_row: int) -> None:
        """Note the log probabilities of the prompt's tokens, of which the chunk's rows foretell the next ones."""
        prompt, text, top = self.job.prompt, self.model.pieces.__getitem__, self.logprobs.top if self.logprobs else 0
        if chunk.start == 0:
            self.prompt_logprobs.append(TokenLogprob(prompt[0], text(prompt[0]), None))
        for at, token in enumerate(prompt[chunk.start + 1 : chunk.start + len(chunk.tokens) + 1]):
            self.prompt_logprobs.append(token_logprob(context.logits(first_row + at), token, top, text))

    def start(self, cached: int) -> list[Event]:
        """The prompt is in memory."""
        self.cached = cached
        started = Started(len(self.job.prompt), cached, tuple(self.prompt_logprobs), self.prompt_text)
        return [started] if self.limit else [started, *self._finish("length")]

    def step(self, context: Context, row: int) -> tuple[int, list[Event]]:
        """Pick the next token, and say what it means to the reader."""
        token, logprobs = self._pick(context, row)
        if token in self.ends:
            return token, self._finish("stop")
        self.count += 1
        text = self.detokenizer.feed(self.model.text(token))
        events: list[Event] = [TextDelta(text, count=1, tokens=(token,), logprobs=logprobs)]
        if self.count >= self.limit:
            events += self._finish("length")
        return token, events

    def close(self) -> None:
        if self.picker is not None:
            self.picker.close()
            self.picker = None

    def _pick(self, context: Context, row: int) -> tuple[int, tuple[TokenLogprob, ...]]:
        if self.picker is None:
            self.picker = Picker(self.recipe, self.job.prompt)
        if self.logprobs is None:
            return self.picker.pick(context, row), ()
        # Picking writes bias and penalties into the logits.
        logits = context.logits(row).copy()
        token = self.picker.pick(context, row)
        return token, (token_logprob(logits, token, self.logprobs.top, self.model.pieces.__getitem__),)

    def _finish(self, reason: FinishReason) -> list[Event]:
        rest = self.detokenizer.flush()
        usage = Usage(prompt=len(self.job.prompt), completion=self.count, cached=self.cached)
        finished = Finished(reason, usage=usage)
        return [TextDelta(rest, count=0), finished] if rest else [finished]


def _prompt_text(request: GenerationRequest, model: Model) -> str | None:
    prompt = request.prompt
    return model.detokenize(prompt) if isinstance(prompt, tuple) else prompt
