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

from dragoman.core.embeddings import Input
from dragoman.core.engine import RenderedPrompt
from dragoman.core.errors import BadRequest, ContextTooLong, NoRoomForReply, UnsupportedParameter
from dragoman.core.features import SAMPLING_FEATURES, Feature
from dragoman.core.request import MAX_REPETITION_PENALTY, MIN_REPETITION_PENALTY, GenerationRequest
from dragoman.engines.reply_limits import ThinkingBudget
from dragoman.formats.syntax import ModelFormat, reasoning_end, reasoning_tags
from dragoman.grammar.reply_grammar import GrammarModel
from dragoman.prompt import ChatTemplate, Prompt

MAX_TOKENIZED = 1024 * 1024
"""Maximum length, in characters or tokens, of a tokenize or detokenize request: about a second of work."""
MAX_UNCHECKED_BYTES = 256 * 1024
"""Texts to embed of up to this size are always tokenized. Long runs of blanks may be few tokens."""


TOKENIZER_FEATURES = frozenset({Feature.TOKENIZE, Feature.ADD_SPECIAL, Feature.TOKEN_TEXTS})
TOKEN_FEATURES = (
    SAMPLING_FEATURES
    | TOKENIZER_FEATURES
    | {
        *(Feature.CHAT, Feature.COMPLETION, Feature.TOKEN_PROMPT, Feature.RENDER, Feature.GENERATION_PROMPT),
        Feature.COUNT_TOKENS,
        *(Feature.TOKEN_IDS, Feature.LOGPROBS, Feature.PROMPT_LOGPROBS, Feature.MAX_TOKENS, Feature.USAGE),
        *(Feature.STOP_TOKEN_IDS, Feature.IGNORE_EOS),
        *(Feature.TOOLS, Feature.THINKING, Feature.DOCUMENTS, Feature.TEMPLATE_OPTIONS),
    }
)
"""The features of every engine that generates tokens from tokens."""
CONSTRAINT_FEATURES = frozenset({Feature.STRICT_TOOLS, Feature.CONSTRAINT})
EMBEDDING_FEATURES = TOKENIZER_FEATURES | {Feature.EMBEDDINGS}


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
    pieces: tuple[bytes, ...]
    """The texts of all tokens, with the names of control tokens."""

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

    def tokenize_text(self, text: str, special: bool = False) -> list[int]:
        """Tokenize a whole text, with the begin and end tokens of the vocabulary."""

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
        self._check_prompt(request, len(read.tokens))
        check_tokens(self.model, request.sampling.logit_bias, "logit_bias")
        check_tokens(self.model, request.stop_token_ids, "stop_token_ids")
        penalty, least, most = request.sampling.repetition_penalty, MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY
        if penalty is not None and not least <= penalty <= most:
            raise BadRequest(f"repetition_penalty must be between {least} and {most}", param="repetition_penalty")
        return read

    def is_constrained(self, request: GenerationRequest) -> bool:
        return request.constraint is not None or bool(request.tools and request.messages)

    def count(self, request: GenerationRequest) -> int:
        return len(self._read_tokens(request).tokens)

    def render(self, request: GenerationRequest) -> RenderedPrompt:
        prompt, tokens = self._render_tokens(request)
        return RenderedPrompt(prompt.text, tokens, self.format.name, prompt.ignored)

    def _render_tokens(self, request: GenerationRequest) -> tuple[Prompt, tuple[int, ...]]:
        # Rendering a text of megabytes takes a second, so an obviously too long one is rejected before.
        self._check_length(request, (message.text for message in request.messages))
        prompt = self.template.render(request)
        self._check_length(request, (segment.text for segment in prompt.segments))
        tokens: list[int] = []
        for segment in prompt.segments:
            tokens += self.model.tokenize(segment.text, segment.special)
        return prompt, self._with_bos(tokens)

    @property
    def grammar_model(self) -> GrammarModel:
        return GrammarModel(self.format, self.control, self.model.ends)

    def may_think(self, request: GenerationRequest) -> bool:
        asked = request.thinking
        if asked.is_off or not request.messages:
            return False
        return self._may_reason or bool(asked.enabled or asked.effort or asked.budget_tokens)

    def create_thinking_budget(self, request: GenerationRequest, opener: str | None) -> ThinkingBudget | None:
        asked, known = request.thinking, reasoning_tags(self.format)
        tokens = 0 if asked.is_off else asked.budget_tokens
        if tokens is None or not known or not request.messages:
            return None
        # An unknown channel ends with the closing tag of the last pair.
        opened = None if opener is None else next((tags for tags in known if tags.open == opener), known[-1])
        return ThinkingBudget(
            tokens, known, lambda tags: self.model.tokenize(reasoning_end(self.format, tags), special=True), opened
        )

    def tokenize_inner_text(self, text: str) -> list[int]:
        """Tokenize text from the middle of a reply. Some vocabularies prepend a space at the start of a text."""
        if not self._prepends_space:
            return self.model.tokenize(text, special=False)
        before = self.model.tokenize("\n", special=False)
        tokens = self.model.tokenize(f"\n{text}", special=False)
        return tokens[len(before) :] if tokens[: len(before)] == before else tokens

    def _check_prompt(self, request: GenerationRequest, tokens: int) -> None:
        if not tokens:
            raise BadRequest("the prompt is empty", param=_param(request))
        if tokens > self.context:
            raise ContextTooLong.of(self.context, tokens, _param(request))
        if tokens + self.min_reply_tokens(request) > self.context:
            raise NoRoomForReply.of(self.context, tokens, _param(request), after=": the reply needs at least one")

    def min_reply_tokens(self, request: GenerationRequest) -> int:
        """Minimum number of reply tokens that must fit in the context."""
        return 1

    def _check_length(self, request: GenerationRequest, texts: Iterable[str]) -> None:
        size = sum(len(text.encode("utf-8", "replace")) for text in texts)
        least = -(-size // self.model.longest_piece)
        if least > self.context:
            raise ContextTooLong.of(self.context, least, _param(request), before="at least ")

    def _read_tokens(self, request: GenerationRequest) -> PromptTokens:
        prompt = request.prompt
        if isinstance(prompt, tuple):
            check_tokens(self.model, prompt, "prompt")
        if request.suffix is not None:
            self._check_length(request, [prompt, request.suffix] if isinstance(prompt, str) else [request.suffix])
            return PromptTokens(self._with_bos(self._build_infill(prompt or "", request.suffix)))
        if isinstance(prompt, tuple):
            return PromptTokens(prompt)
        if prompt is not None:
            self._check_length(request, [prompt])
            return PromptTokens(self._with_bos(self.model.tokenize(prompt, special=True)))
        rendered, tokens = self._render_tokens(request)
        return PromptTokens(tokens, rendered.opener, rendered.ignored)

    def _build_infill(self, prefix: str | tuple[int, ...], suffix: str) -> list[int]:
        if self.model.infill is None:
            raise UnsupportedParameter("this model does not support infill; leave out the suffix", param="suffix")
        before, after, middle = self.model.infill
        head = self.model.tokenize(prefix, special=False) if isinstance(prefix, str) else prefix
        return [before, *head, after, *self.model.tokenize(suffix, special=False), middle]

    def _with_bos(self, tokens: list[int]) -> tuple[int, ...]:
        model = self.model
        return (model.bos, *tokens) if model.add_bos and tokens[:1] != [model.bos] else tuple(tokens)

    def max_reply_tokens(self, request: GenerationRequest, prompt: int) -> int:
        room = self.context - prompt
        return room if request.max_tokens is None else min(request.max_tokens, room)


def tokenize(model: Vocabulary, text: str, special: bool, add_special: bool = False) -> list[int]:
    if len(text) > MAX_TOKENIZED:
        message = f"content has {len(text)} characters; at most {MAX_TOKENIZED} can be tokenized at once"
        raise BadRequest(message, param="content")
    return model.tokenize_text(text, special) if add_special else model.tokenize(text, special)


def detokenize(model: Vocabulary, tokens: Sequence[int]) -> str:
    if len(tokens) > MAX_TOKENIZED:
        message = f"tokens has {len(tokens)} entries; at most {MAX_TOKENIZED} can be detokenized at once"
        raise BadRequest(message, param="tokens")
    check_tokens(model, tokens, "tokens")
    return model.detokenize(tokens)


def token_texts(model: Vocabulary, tokens: Sequence[int]) -> list[bytes]:
    check_tokens(model, tokens, "tokens")
    return [model.pieces[token] for token in tokens]


def read_embedding_input(model: Vocabulary, entry: Input, context: int) -> Sequence[int]:
    """Return the tokens of an input, after checking them."""
    if isinstance(entry, str):
        size = len(entry.encode("utf-8", "replace"))
        least = -(-size // model.longest_piece)
        if least > context and size > MAX_UNCHECKED_BYTES:
            raise ContextTooLong.of(context, least, "input", before="at least ")
        entry = tuple(model.tokenize_text(entry))
    else:
        check_tokens(model, entry, "input")
    if not entry:
        raise BadRequest("the input is empty", param="input")
    if len(entry) > context:
        raise ContextTooLong.of(context, len(entry), "input")
    return entry


def check_tokens(model: Vocabulary, tokens: Iterable[int], param: str) -> None:
    size = model.vocab_size
    wrong = next((token for token in tokens if not 0 <= token < size), None)
    if wrong is not None:
        raise BadRequest(f"token id {wrong} is not in the vocabulary of {size} tokens", param=param)


def _param(request: GenerationRequest) -> str:
    return "prompt" if request.prompts else "messages"
