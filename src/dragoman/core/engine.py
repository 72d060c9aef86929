"""The Engine base class.

Subclass it and override `generate` to serve a model through every API. An engine receives values and yields events or
text; it never sees HTTP, SSE or JSON. The server answers for features missing from `supports`: a route with 501, a
parameter by reporting it as ignored.

Features an engine may declare
    chat, completion, token_prompt, infill                           kinds of generation
    tokenize, render, count_tokens                                   prompt and token queries
    embeddings                                                       text embeddings
    token_ids, logprobs, prompt_logprobs, images, documents, tools, strict_tools, constraint, thinking, template_options
                                                                     request and reply features beyond text
    service_tier                                                     passed on to the server that runs the model
    usage                                                            reported by the engine in `Finished`
    temperature, top_p, top_k, min_p, seed, repetition_penalty, presence_penalty, frequency_penalty, logit_bias,
    stop_token_ids, ignore_eos, max_tokens                           parameters the engine applies itself
The server implements stop strings, the number of choices and streaming for every engine, and `max_tokens` for engines
that do not declare it.
"""

from collections.abc import AsyncIterable, Awaitable, Callable, Iterable, Sequence
from typing import ClassVar, Self

import msgspec

from dragoman.core.embeddings import Embedding, Input
from dragoman.core.errors import NotSupported
from dragoman.core.events import Event, Listener
from dragoman.core.request import GenerationRequest

Output = str | Event | Sequence[str | Event]
"""A string counts as one token. A list or tuple is a batch that became ready together."""

EmbedFunction = Callable[[Sequence[Input]], Sequence[Embedding] | Awaitable[Sequence[Embedding]]]

FEATURES_BY_METHOD: dict[str, tuple[str, ...]] = {
    "generate": ("chat", "completion"),
    "tokenize": ("tokenize",),
    "render": ("render",),
    "count_tokens": ("count_tokens",),
    "embed": ("embeddings",),
}
"""Features that overriding a method declares."""


class ModelInfo(msgspec.Struct, frozen=True):
    """An entry of the model list.

    `context` is the maximum number of tokens of prompt and reply together. `format` names the syntax of reasoning and
    tool calls (see `formats`).
    """

    name: str
    owner: str = "dragoman"
    context: int | None = None
    format: str = "plain"


class RenderedPrompt(msgspec.Struct, frozen=True):
    """The prompt sent to the model, and the format used to parse the reply."""

    text: str
    tokens: tuple[int, ...]
    format: str


class NoOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pass


class Engine:
    Options: ClassVar[type[msgspec.Struct]] = NoOptions
    """The configuration keys of a model of this engine."""

    emits_events: ClassVar[bool] = False
    """`generate` is an async generator of non-empty event lists, complete from `Started` to `Finished`."""

    is_push_based: ClassVar[bool] = False
    """The engine implements `tell`; callers prefer it to `generate`."""

    emits_tool_calls: bool = False
    """The events contain reasoning and tool calls, so the text is not parsed for them."""

    loads_directory: ClassVar[bool] = False
    """The source is a model directory or a Hugging Face name; the engine finds the files itself."""

    device: str = "cpu"
    """The compute device, as shown in the model list."""
    kv_used: float | None = None
    """Fraction of the KV cache in use, from 0 to 1; None if unknown."""
    slots: int | None = None
    """Maximum number of concurrent generations; further requests queue. None means unlimited."""
    progress: float | None = None
    """Fraction of the model loaded so far, from 0 to 1; None if unknown."""

    @classmethod
    def configured(cls, name: str, options: msgspec.Struct) -> Self:
        """Create the engine for the configured model `name`."""
        return cls()

    @classmethod
    def needs_worker(cls, options: msgspec.Struct) -> bool:
        """Whether the engine can crash its process and so needs a worker process."""
        return False

    @classmethod
    def memory_beside_file(cls, options: msgspec.Struct) -> int:
        """Estimate the bytes a worker process needs in addition to the model file.

        Used until the real value has been measured. Called in a thread, so it may read files.
        """
        return 0

    @classmethod
    def mistakes(cls, options: msgspec.Struct) -> Sequence[tuple[str, str]]:
        """Return errors found without loading the model, as pairs of key and message, for `dragoman check`.

        The key is a path such as `adapters.legal`, or "" for the whole model entry.
        """
        return ()

    @classmethod
    def doubts(cls, options: msgspec.Struct) -> Sequence[tuple[str, str]]:
        """Return warnings for valid but probably unintended options, as pairs of key and message."""
        return ()

    @classmethod
    def is_installed(cls) -> bool:
        """Whether the optional packages the engine needs are installed."""
        return True

    def models(self) -> Sequence[ModelInfo]:
        return [ModelInfo(type(self).__name__.removesuffix("Engine").lower() or "engine")]

    def supports(self) -> frozenset[str]:
        overridden = (
            method for method in FEATURES_BY_METHOD if getattr(type(self), method) is not getattr(Engine, method)
        )
        return frozenset(feature for method in overridden for feature in FEATURES_BY_METHOD[method])

    async def start(self) -> None:
        """Load the model. Called before the first request, and again after `stop` when the model is reloaded."""

    async def stop(self) -> None:
        """Release all resources."""

    def generate(self, request: GenerationRequest) -> Iterable[Output] | AsyncIterable[Output]:
        """Generate a reply. A plain generator runs in its own thread. Closing the iterator cancels the generation."""
        raise NotSupported("this model does not generate text")

    async def tell(self, request: GenerationRequest, listener: Listener) -> None:
        """Generate a reply by calling `listener` with each batch of events, from `Started` to `Finished`.

        Engines that receive events in event loop callbacks avoid waking a task per token this way. An exception of
        the listener, or cancellation, ends the generation and propagates to the caller.
        """
        raise NotSupported("this model does not generate text")

    def render(self, request: GenerationRequest) -> RenderedPrompt | Awaitable[RenderedPrompt]:
        """Return the prompt that `generate` would use."""
        raise NotSupported("this model does not support rendering prompts")

    def count_tokens(self, request: GenerationRequest) -> int | Awaitable[int]:
        """Count the tokens of the prompt. Not needed for engines that override `render`."""
        raise NotSupported("this model does not support counting tokens")

    def tokenize(self, text: str, special: bool) -> Sequence[int] | Awaitable[Sequence[int]]:
        """Tokenize a text; with `special`, names of control tokens in it become those tokens."""
        raise NotSupported("this model does not support tokenization")

    def detokenize(self, tokens: Sequence[int]) -> str | Awaitable[str]:
        raise NotSupported("this model does not support tokenization")

    def embed(self, inputs: Sequence[Input]) -> Sequence[Embedding] | Awaitable[Sequence[Embedding]]:
        """Return one embedding per input, in order. Inputs are not empty; a long list arrives in several calls."""
        raise NotSupported("this model does not support embeddings")

    def embed_function_for(self, model: str) -> EmbedFunction:
        """Return the function that embeds with the given model; engines with several models override this."""
        return self.embed
