"""From a request to a prompt in tokens, checked, with everything its generation needs. Never runs in the event loop.

Rules
1. Text of a chat becomes control tokens only where the template wrote it. A completion's prompt is the model's raw
   input: names of control tokens in it count, as token ids would. A prompt of token ids is taken as it is.
2. A prompt with a suffix is content on both sides of the infill tokens: no names count in it.
3. Where the vocabulary wants a token at the beginning, a prompt from text gets it, once.
4. Text that is too long even if all of it were the longest tokens there are is refused unread: making tokens of
   megabytes takes seconds, which others would wait.
"""

from collections.abc import Iterable, Sequence

from dragoman.conversation import GenerationRequest, Sampling
from dragoman.engines.llama import sampling
from dragoman.engines.llama.binding import Model
from dragoman.engines.llama.generation import Generation
from dragoman.errors import BadRequest, ContextTooLong, UnsupportedParameter
from dragoman.prompt import ChatTemplate


class Intake:
    def __init__(self, model: Model, context: int) -> None:
        self.model = model
        self.context = context
        self.defaults = sampling.defaults(model.metadata)
        self.template = ChatTemplate(
            model.chat_template, bos=model.name(model.bos), eos=model.name(model.eos), control=model.control
        )

    def generation(self, request: GenerationRequest) -> Generation:
        prompt = self._prompt(request)
        self._check_sampling(request.sampling)
        self.check_tokens(request.stop_token_ids, "stop_token_ids")
        recipe = sampling.recipe(request.sampling, self.defaults, self.model.suppressed)
        return Generation(request, self.model, recipe, prompt=tuple(prompt), limit=self._limit(request, len(prompt)))

    def check_tokens(self, tokens: Iterable[int], param: str) -> None:
        size = self.model.vocab_size
        wrong = next((token for token in tokens if not 0 <= token < size), None)
        if wrong is not None:
            raise BadRequest(f"token id {wrong} is not in the vocabulary of {size} tokens", param=param)

    def _check_sampling(self, asked: Sampling) -> None:
        self.check_tokens(asked.logit_bias, "logit_bias")
        if asked.repetition_penalty is not None and asked.repetition_penalty <= 0:
            raise BadRequest("repetition_penalty must be greater than 0", param="repetition_penalty")

    def _prompt(self, request: GenerationRequest) -> Sequence[int]:
        tokens = self._tokens(request)
        if not tokens:
            raise BadRequest("the prompt is empty", param=_param(request))
        if len(tokens) >= self.context:
            raise self._too_long(request, str(len(tokens)))
        return tokens

    def _too_long(self, request: GenerationRequest, tokens: str) -> ContextTooLong:
        return ContextTooLong(
            f"this model's maximum context length is {self.context} tokens, but the prompt has {tokens}",
            param=_param(request),
        )

    def _check_length(self, request: GenerationRequest, texts: Iterable[str]) -> None:
        size = sum(len(text.encode("utf-8", "replace")) for text in texts)
        if size > self.context * self.model.longest_piece:
            raise self._too_long(request, f"more than {self.context}")

    def _tokens(self, request: GenerationRequest) -> Sequence[int]:
        prompt = request.prompt
        if isinstance(prompt, tuple):
            self.check_tokens(prompt, "prompt")
        if request.suffix is not None:
            self._check_length(request, [prompt, request.suffix] if isinstance(prompt, str) else [request.suffix])
            return self._begun(self._infill(prompt or "", request.suffix))
        if isinstance(prompt, tuple):
            return prompt
        if prompt is not None:
            self._check_length(request, [prompt])
            return self._begun(self.model.tokenize(prompt, special=True))
        segments = self.template.render(request)
        self._check_length(request, (segment.text for segment in segments))
        return self._begun(
            [token for segment in segments for token in self.model.tokenize(segment.text, segment.special)]
        )

    def _infill(self, prefix: str | tuple[int, ...], suffix: str) -> list[int]:
        if self.model.infill is None:
            raise UnsupportedParameter("this model cannot write between a prompt and a suffix", param="suffix")
        before, after, middle = self.model.infill
        head = self.model.tokenize(prefix, special=False) if isinstance(prefix, str) else prefix
        return [before, *head, after, *self.model.tokenize(suffix, special=False), middle]

    def _begun(self, tokens: list[int]) -> list[int]:
        model = self.model
        return [model.bos, *tokens] if model.add_bos and tokens[:1] != [model.bos] else tokens

    def _limit(self, request: GenerationRequest, prompt: int) -> int:
        room = self.context - prompt
        return room if request.max_tokens is None else min(request.max_tokens, room)


def _param(request: GenerationRequest) -> str:
    return "prompt" if request.prompts else "messages"
