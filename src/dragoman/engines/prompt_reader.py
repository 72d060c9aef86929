"""From a request to a checked prompt, for every engine that is asked in tokens. Never runs in the event loop.

Rules
1. Text of a chat becomes control tokens only where the template wrote it. A completion's prompt is the model's raw
   input: names of control tokens in it count, as token ids would. A prompt of token ids is taken as it is.
2. A prompt with a suffix is content on both sides of the infill tokens: no names count in it.
3. Where the vocabulary wants a token at the beginning, a prompt from text gets it, once.
4. Text that is too long even if all of it were the longest tokens there are is refused unread: making tokens of
   megabytes takes seconds, which others would wait.
5. Reading a prompt and compiling a grammar are two steps, because a grammar is tried in another process first.
6. A text that is only to become tokens has no context to fit in; its length has a limit of its own.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Protocol

import msgspec

from dragoman.core.engine import Rendered
from dragoman.core.errors import BadRequest, ContextTooLong, NoRoomForReply, UnsupportedParameter
from dragoman.core.request import LEAST_REPETITION_PENALTY, MOST_REPETITION_PENALTY, GenerationRequest, Sampling
from dragoman.engines.thinking_budget import Budget
from dragoman.formats.syntax import ModelFormat, Tags, reasoning_end, reasoning_tags
from dragoman.grammar.reply_grammar import Speaker
from dragoman.prompt import ChatTemplate, Segment

MOST_TOKENIZED = 1024 * 1024
"""Characters of a text, or tokens, that are only to become the other: about a second."""


class Vocabulary(Protocol):
    """A model's tokens, as far as a prompt and the shape of a reply have to know them."""

    vocab_size: int
    bos: int
    eos: int
    add_bos: bool
    longest_piece: int
    infill: tuple[int, int, int] | None
    """The tokens before the prefix, before the suffix and before what is to be written between them."""
    ends: frozenset[int]

    @property
    def chat_template(self) -> str | None: ...

    @property
    def control(self) -> tuple[str, ...]:
        """The names of the tokens that content must never produce."""

    def name(self, token: int) -> str: ...

    def text(self, token: int) -> bytes:
        """What a reader sees of a token."""

    def show(self, markers: Collection[str]) -> None:
        """Let readers see the control tokens of these names, but not those that end a text."""

    def control_ids(self, names: Collection[str]) -> Mapping[str, int]: ...

    def tokenize(self, text: str, special: bool) -> list[int]: ...

    def detokenize(self, tokens: Sequence[int]) -> str: ...


class Read(msgspec.Struct, frozen=True):
    """A prompt as tokens. `opener`: the text that begins the thought inside which it ends."""

    tokens: tuple[int, ...]
    opener: str | None = None
    ignored: tuple[str, ...] = ()


class Reading:
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
        known = model.chat_template or ""
        self.thinks = any(text in known for tags in reasoning_tags(syntax) for text in (tags.open, tags.close))
        self.spaced = b"".join(map(model.text, model.tokenize("a", special=False))) != b"a"

    def read(self, request: GenerationRequest) -> Read:
        """The prompt; everything else that a request may have wrong is found here too."""
        read = self._tokens(request)
        self._check_prompt(request, read.tokens)
        self._check_sampling(request.sampling)
        check_tokens(self.model, request.stop_token_ids, "stop_token_ids")
        return read

    def is_shaped(self, request: GenerationRequest) -> bool:
        return request.constraint is not None or bool(request.tools and request.messages)

    def render(self, request: GenerationRequest) -> Rendered:
        prompt = self.template.render(request)
        self._check_length(request, (segment.text for segment in prompt.segments))
        return Rendered(prompt.text, tuple(self._begun(self._segments(prompt.segments))), self.format.name)

    @property
    def speaker(self) -> Speaker:
        return Speaker(self.format, self.control, self.model.ends)

    def may_think(self, request: GenerationRequest) -> bool:
        asked = request.thinking
        if asked.is_off or not request.messages:
            return False
        return self.thinks or bool(asked.enabled or asked.effort or asked.budget_tokens)

    def budget(self, request: GenerationRequest, opener: str | None) -> Budget | None:
        asked, known = request.thinking, reasoning_tags(self.format)
        tokens = 0 if asked.is_off else asked.budget_tokens
        if tokens is None or not known or not request.messages:
            return None
        # Whatever a channel is called, it ends as the one that is last among them.
        opened = None if opener is None else next((tags for tags in known if tags.open == opener), known[-1])
        return Budget(tokens, known, self._closing, opened)

    def _closing(self, tags: Tags) -> list[int]:
        return self.model.tokenize(reasoning_end(self.format, tags), special=True)

    def inner_tokens(self, text: str) -> list[int]:
        """A text as it is written in the midst of others: some vocabularies put a space before what they begin with."""
        if not self.spaced:
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
                "one is needed for the reply",
                param=_param(request),
                tokens=len(tokens),
                limit=self.context - 1,
            )

    def least(self, request: GenerationRequest) -> int:
        """Tokens of the reply for which there has to be room."""
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

    def _tokens(self, request: GenerationRequest) -> Read:
        prompt = request.prompt
        if isinstance(prompt, tuple):
            check_tokens(self.model, prompt, "prompt")
        if request.suffix is not None:
            self._check_length(request, [prompt, request.suffix] if isinstance(prompt, str) else [request.suffix])
            return Read(tuple(self._begun(self._infill(prompt or "", request.suffix))))
        if isinstance(prompt, tuple):
            return Read(prompt)
        if prompt is not None:
            self._check_length(request, [prompt])
            return Read(tuple(self._begun(self.model.tokenize(prompt, special=True))))
        return self._chat(request)

    def _chat(self, request: GenerationRequest) -> Read:
        prompt = self.template.render(request)
        self._check_length(request, (segment.text for segment in prompt.segments))
        return Read(tuple(self._begun(self._segments(prompt.segments))), prompt.opener, prompt.ignored)

    def _segments(self, segments: Iterable[Segment]) -> list[int]:
        tokens: list[int] = []
        for segment in segments:
            tokens += self.model.tokenize(segment.text, segment.special)
        return tokens

    def _infill(self, prefix: str | tuple[int, ...], suffix: str) -> list[int]:
        if self.model.infill is None:
            raise UnsupportedParameter("this model cannot write between a prompt and a suffix", param="suffix")
        before, after, middle = self.model.infill
        head = self.model.tokenize(prefix, special=False) if isinstance(prefix, str) else prefix
        return [before, *head, after, *self.model.tokenize(suffix, special=False), middle]

    def _begun(self, tokens: list[int]) -> list[int]:
        model = self.model
        return [model.bos, *tokens] if model.add_bos and tokens[:1] != [model.bos] else tokens

    def limit(self, request: GenerationRequest, prompt: int) -> int:
        room = self.context - prompt
        return room if request.max_tokens is None else min(request.max_tokens, room)


def tokenize(model: Vocabulary, text: str, special: bool) -> list[int]:
    if len(text) > MOST_TOKENIZED:
        raise BadRequest(f"content: at most {MOST_TOKENIZED} characters are made tokens at once", param="content")
    return model.tokenize(text, special)


def detokenize(model: Vocabulary, tokens: Sequence[int]) -> str:
    if len(tokens) > MOST_TOKENIZED:
        raise BadRequest(f"tokens: at most {MOST_TOKENIZED} are made text at once", param="tokens")
    check_tokens(model, tokens, "tokens")
    return model.detokenize(tokens)


def check_tokens(model: Vocabulary, tokens: Iterable[int], param: str) -> None:
    size = model.vocab_size
    wrong = next((token for token in tokens if not 0 <= token < size), None)
    if wrong is not None:
        raise BadRequest(f"token id {wrong} is not in the vocabulary of {size} tokens", param=param)


def _param(request: GenerationRequest) -> str:
    return "prompt" if request.prompts else "messages"
