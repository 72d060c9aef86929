"""Turns a request into a validated token prompt, for engines that take tokens. Runs in threads, not the event loop.

Rules
1. In a chat, only the text of the template may become control tokens. The prompt of a completion is raw input: names of
   control tokens in it become those tokens. A prompt of token ids is used unchanged.
2. A prompt with a suffix is content on both sides of the infill tokens: names of control tokens in it stay text.
3. A prompt made from text starts with exactly one BOS token if the vocabulary requires it.
4. Text that exceeds the context even if it consisted of the longest tokens is rejected before it is tokenized.
   Tokenizing megabytes takes seconds and would delay other requests.
5. Reading the prompt and compiling the grammar are separate steps, because the grammar is tried in another process.
6. Requests that only tokenize or detokenize have a limit of their own instead of the context.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Protocol

import msgspec

from dragoman.core.engine import RenderedPrompt
from dragoman.core.errors import BadRequest, ContextTooLong, NoRoomForReply, UnsupportedParameter
from dragoman.core.request import LEAST_REPETITION_PENALTY, MOST_REPETITION_PENALTY, GenerationRequest, Sampling
from dragoman.engines.reply_limits import ThinkingBudget
from dragoman.formats.syntax import ModelFormat, Tags, reasoning_end, reasoning_tags
from dragoman.grammar.reply_grammar import GrammarModel
from dragoman.prompt import ChatTemplate, Segment

MAX_TOKENIZED = 1024 * 1024
"""Maximum length, in characters or tokens, of a tokenize or detokenize request: about a second of work."""


class Vocabulary(Protocol):
    """The parts of a model's vocabulary needed to build prompts and constrain replies."""

    vocab_size: int
    bos: int
    eos: int
    add_bos: bool
    longest_piece: int
    infill: tuple[int, int, int] | None
    """The tokens before the prefix, before the suffix, and before the text to generate."""
    ends: frozenset[int]

    @property
    def chat_template(self) -> str | None: ...

    @property
    def control(self) -> tuple[str, ...]:
        """Names of the control tokens, which content must never produce."""

    def name(self, token: int) -> str: ...

    def text(self, token: int) -> bytes:
        """The visible text of a token."""

    def show(self, markers: Collection[str]) -> None:
        """Make the named control tokens visible, except end-of-text tokens."""

    def control_ids(self, names: Collection[str]) -> Mapping[str, int]: ...

    def tokenize(self, text: str, special: bool) -> list[int]: ...

    def detokenize(self, tokens: Sequence[int]) -> str: ...


class PromptTokens(msgspec.Struct, frozen=True):
    """A prompt as tokens. `opener` is the opening tag if the prompt ends inside reasoning."""

    tokens: tuple[int, ...]
    opener: str | None = None
    ignored: tuple[str, ...] = ()


class PromptReader:
    def __init__(
        self, model: Vocabulary, context: int, syntax: ModelFormat, template_options: Sequence[str] = ()
    ) -> None:
        self.model = model
        self.context = context
        self.format = syntax
        self.template = ChatTemplate(
            model.chat_template,
            bos=model.name(model.bos),
            eos=model.name(model.eos),
            control=model.control,
            format=syntax,
            allowed=template_options,
        )
        model.show(syntax.markers)
        self.control = model.control_ids(syntax.markers)
        template = model.chat_template or ""
        self._may_reason = any(text in template for tags in reasoning_tags(syntax) for text in (tags.open, tags.close))
        self._prepends_space = b"".join(map(model.text, model.tokenize("a", special=False))) != b"a"

    def read(self, request: GenerationRequest) -> PromptTokens:
        """Return the prompt tokens, and validate the rest of the request."""
        read = self._read_tokens(request)
        self._check_prompt(request, read.tokens)
        self._check_sampling(request.sampling)
        check_tokens(self.model, request.stop_token_ids, "stop_token_ids")
        return read

    def is_constrained(self, request: GenerationRequest) -> bool:
        return request.constraint is not None or bool(request.tools and request.messages)

    def render(self, request: GenerationRequest) -> RenderedPrompt:
        prompt = self.template.render(request)
        self._check_length(request, (segment.text for segment in prompt.segments))
        return RenderedPrompt(
            prompt.text, tuple(self._with_bos(self._tokenize_segments(prompt.segments))), self.format.name
        )

    @property
    def speaker(self) -> GrammarModel:
        return GrammarModel(self.format, self.control, self.model.ends)

    def may_think(self, request: GenerationRequest) -> bool:
        asked = request.thinking
        if asked.is_off or not request.messages:
            return False
        return self._may_reason or bool(asked.enabled or asked.effort or asked.budget_tokens)

    def budget(self, request: GenerationRequest, opener: str | None) -> ThinkingBudget | None:
        asked, known = request.thinking, reasoning_tags(self.format)
        tokens = 0 if asked.is_off else asked.budget_tokens
        if tokens is None or not known or not request.messages:
            return None
        # An unknown channel ends with the closing tag of the last pair.
        opened = None if opener is None else next((tags for tags in known if tags.open == opener), known[-1])
        return ThinkingBudget(tokens, known, self._closing_tokens, opened)

    def _closing_tokens(self, tags: Tags) -> list[int]:
        return self.model.tokenize(reasoning_end(self.format, tags), special=True)

    def tokenize_inner_text(self, text: str) -> list[int]:
        """Tokenize text from the middle of a reply. Some vocabularies prepend a space at the start of a text."""
        if not self._prepends_space:
            return self.model.tokenize(text, special=False)
        before = self.model.tokenize("\n", special=False)
        tokens = self.model.tokenize(f"\n{text}", special=False)
        return tokens[len(before) :] if tokens[: len(before)] == before else tokens

    def _check_sampling(self, asked: Sampling) -> None:
        check_tokens(self.model, asked.logit_bias, "logit_bias")
        penalty, least, most = asked.repetition_penalty, LEAST_REPETITION_PENALTY, MOST_REPETITION_PENALTY
        if penalty is not None and not least <= penalty <= most:
            raise BadRequest(f"repetition_penalty must be between {least} and {most}", param="repetition_penalty")

    def _check_prompt(self, request: GenerationRequest, tokens: Sequence[int]) -> None:
        if not tokens:
            raise BadRequest("the prompt is empty", param=_param(request))
        if len(tokens) > self.context:
            raise self._too_long(request, len(tokens))
        if len(tokens) + self.least(request) > self.context:
            raise NoRoomForReply(
                f"this model's maximum context length is {self.context} tokens, but the prompt has {len(tokens)}: "
                "the reply needs at least one",
                param=_param(request),
                tokens=len(tokens),
                limit=self.context - 1,
            )

    def least(self, request: GenerationRequest) -> int:
        """Minimum number of reply tokens that must fit in the context."""
        return 1

    def _too_long(self, request: GenerationRequest, tokens: int, about: str = "") -> ContextTooLong:
        return ContextTooLong(
            f"this model's maximum context length is {self.context} tokens, but the prompt has {about}{tokens}",
            param=_param(request),
            tokens=tokens,
            limit=self.context - 1,
        )

    def _check_length(self, request: GenerationRequest, texts: Iterable[str]) -> None:
        size = sum(len(text.encode("utf-8", "replace")) for text in texts)
        least = -(-size // self.model.longest_piece)
        if least > self.context:
            raise self._too_long(request, least, "at least ")

    def _read_tokens(self, request: GenerationRequest) -> PromptTokens:
        prompt = request.prompt
        if isinstance(prompt, tuple):
            check_tokens(self.model, prompt, "prompt")
        if request.suffix is not None:
            self._check_length(request, [prompt, request.suffix] if isinstance(prompt, str) else [request.suffix])
            return PromptTokens(tuple(self._with_bos(self._build_infill(prompt or "", request.suffix))))
        if isinstance(prompt, tuple):
            return PromptTokens(prompt)
        if prompt is not None:
            self._check_length(request, [prompt])
            return PromptTokens(tuple(self._with_bos(self.model.tokenize(prompt, special=True))))
        return self._read_chat(request)

    def _read_chat(self, request: GenerationRequest) -> PromptTokens:
        prompt = self.template.render(request)
        self._check_length(request, (segment.text for segment in prompt.segments))
        return PromptTokens(
            tuple(self._with_bos(self._tokenize_segments(prompt.segments))), prompt.opener, prompt.ignored
        )

    def _tokenize_segments(self, segments: Iterable[Segment]) -> list[int]:
        tokens: list[int] = []
        for segment in segments:
            tokens += self.model.tokenize(segment.text, segment.special)
        return tokens

    def _build_infill(self, prefix: str | tuple[int, ...], suffix: str) -> list[int]:
        if self.model.infill is None:
            raise UnsupportedParameter("this model does not support infill; leave out the suffix", param="suffix")
        before, after, middle = self.model.infill
        head = self.model.tokenize(prefix, special=False) if isinstance(prefix, str) else prefix
        return [before, *head, after, *self.model.tokenize(suffix, special=False), middle]

    def _with_bos(self, tokens: list[int]) -> list[int]:
        model = self.model
        return [model.bos, *tokens] if model.add_bos and tokens[:1] != [model.bos] else tokens

    def limit(self, request: GenerationRequest, prompt: int) -> int:
        room = self.context - prompt
        return room if request.max_tokens is None else min(request.max_tokens, room)


def tokenize(model: Vocabulary, text: str, special: bool) -> list[int]:
    if len(text) > MAX_TOKENIZED:
        message = f"content has {len(text)} characters; at most {MAX_TOKENIZED} can be tokenized at once"
        raise BadRequest(message, param="content")
    return model.tokenize(text, special)


def detokenize(model: Vocabulary, tokens: Sequence[int]) -> str:
    if len(tokens) > MAX_TOKENIZED:
        message = f"tokens has {len(tokens)} entries; at most {MAX_TOKENIZED} can be detokenized at once"
        raise BadRequest(message, param="tokens")
    check_tokens(model, tokens, "tokens")
    return model.detokenize(tokens)


def check_tokens(model: Vocabulary, tokens: Iterable[int], param: str) -> None:
    size = model.vocab_size
    wrong = next((token for token in tokens if not 0 <= token < size), None)
    if wrong is not None:
        raise BadRequest(f"token id {wrong} is not in the vocabulary of {size} tokens", param=param)


def _param(request: GenerationRequest) -> str:
    return "prompt" if request.prompts else "messages"
