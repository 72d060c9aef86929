"""The Engine class: what a model must offer to be served.

Subclass it, override `generate`, and the model has every API. An engine sees values and yields events or text; it never
sees HTTP, SSE or JSON. What it does not declare in `supports` is answered for it, honestly: a route with 501, a
parameter by being reported as ignored.

Features an engine may declare
    chat, completion, token_prompt, infill                           what it can be asked to write
    tokenize, render, count_tokens                                   what it can tell
    embeddings                                                       it makes vectors of texts
    token_ids, logprobs, prompt_logprobs, images, documents, tools, strict_tools, constraint, thinking, template_options
                                                                     what it can do beyond text
    service_tier                                                     it passes on how soon a reply is wanted
    usage                                                            it tells the usage in `Finished` itself
    temperature, top_p, top_k, min_p, seed, repetition_penalty, presence_penalty, frequency_penalty, logit_bias,
    stop_token_ids, ignore_eos, max_tokens                           parameters it honours itself
Stop strings, the number of choices and streaming are the server's business and work with every engine; so does
`max_tokens` where the engine leaves it to the server.
"""

from collections.abc import AsyncIterable, Awaitable, Callable, Iterable, Sequence
from typing import ClassVar, Self

import msgspec

from dragoman.core.embeddings import Embedding, Input
from dragoman.core.errors import NotSupported
from dragoman.core.events import Event, Listener
from dragoman.core.request import GenerationRequest

Output = str | Event | Sequence[str | Event]
"""Text counts as one token; a list or tuple holds what became ready together."""

MakeVectors = Callable[[Sequence[Input]], Sequence[Embedding] | Awaitable[Sequence[Embedding]]]

OWN_FEATURES: dict[str, tuple[str, ...]] = {
    "generate": ("chat", "completion"),
    "tokenize": ("tokenize",),
    "render": ("render",),
    "count_tokens": ("count_tokens",),
    "embed": ("embeddings",),
}
"""What overriding a method declares without further words."""


class ModelInfo(msgspec.Struct, frozen=True):
    """A model as the model list shows it; `context` is the largest number of tokens of prompt and reply together.

    `format` names the syntax in which it writes thoughts and tool calls (see `formats`).
    """

    name: str
    owner: str = "dragoman"
    context: int | None = None
    format: str = "plain"


class Rendered(msgspec.Struct, frozen=True):
    """A prompt as the model would get it, and the format in which its reply would be read."""

    text: str
    tokens: tuple[int, ...]
    format: str


class NoOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pass


class Engine:
    Options: ClassVar[type[msgspec.Struct]] = NoOptions
    """What a configuration may say about a model of this engine, beside its name."""

    streams_events: ClassVar[bool] = False
    """Its `generate` is an async generator of lists of events from `Started` to `Finished`: nothing has to be added."""

    calls_back: ClassVar[bool] = False
    """It answers by `tell`; its `generate` is for those who would rather read."""

    tells_calls: bool = False
    """Its events tell thoughts and tool calls: nothing is looked for in its text."""

    takes_folder: ClassVar[bool] = False
    """Its source is a folder of a model, or a name of the hub, and it finds the files by itself."""

    device: str = "cpu"
    """What it computes on, as the model list shows it."""
    kv_used: float | None = None
    """The part, from 0 to 1, of its room for prompts and replies that is taken now; None: it does not tell."""
    slots: int | None = None
    """How many generations it takes at once; the others queue. None: as many as come."""
    progress: float | None = None
    """While it starts: how much of it has been loaded, from 0 to 1, where it knows."""

    @classmethod
    def configured(cls, name: str, options: msgspec.Struct) -> Self:
        """The engine for the model `name` of a configuration."""
        return cls()

    @classmethod
    def needs_worker(cls, options: msgspec.Struct) -> bool:
        """Whether it can take its process down with it, and so gets one of its own."""
        return False

    @classmethod
    def memory_beside_file(cls, options: msgspec.Struct) -> int:
        """Bytes that it will take in a process of its own, its file not counted, as far as they can be foreseen; from
        the second time on what was measured counts. It is called in a thread, and may read files."""
        return 0

    @classmethod
    def mistakes(cls, options: msgspec.Struct) -> Sequence[tuple[str, str]]:
        """What would keep it from starting, and can be seen in its files without loading them; for `dragoman check`.
        Each with the key that is to blame, as `adapters.legal`, or "" for all of the model's entry."""
        return ()

    @classmethod
    def doubts(cls, options: msgspec.Struct) -> Sequence[tuple[str, str]]:
        """What is allowed and hardly meant, or may not do on this machine: a warning of `dragoman check` and `serve`.
        Each with its key, as `mistakes`."""
        return ()

    @classmethod
    def is_installed(cls) -> bool:
        """Whether the packages are there that it needs beside ours."""
        return True

    def models(self) -> Sequence[ModelInfo]:
        return [ModelInfo(type(self).__name__.removesuffix("Engine").lower() or "engine")]

    def supports(self) -> frozenset[str]:
        overridden = (method for method in OWN_FEATURES if getattr(type(self), method) is not getattr(Engine, method))
        return frozenset(feature for method in overridden for feature in OWN_FEATURES[method])

    async def start(self) -> None:
        """Load what must be loaded. Called before the first request; again after a failure or an unloading, `stop` in
        between."""

    async def stop(self) -> None:
        """Let go of everything."""

    def generate(self, request: GenerationRequest) -> Iterable[Output] | AsyncIterable[Output]:
        """Answer. A plain generator runs in a thread of its own; closing the iterator means: stop working on it."""
        raise NotSupported("this model does not generate text")

    async def tell(self, request: GenerationRequest, listener: Listener) -> None:
        """Answer by calling the listener in the moment in which something is ready, from `Started` to `Finished`: for
        engines to which events come in the event loop's own callbacks, who are spared the way through a task. What
        the listener raises ends the generation and is raised here; so does cancelling."""
        raise NotSupported("this model does not generate text")

    def render(self, request: GenerationRequest) -> Rendered | Awaitable[Rendered]:
        """The prompt that `generate` would begin with."""
        raise NotSupported("this model does not tell its prompts")

    def count_tokens(self, request: GenerationRequest) -> int | Awaitable[int]:
        """How many tokens the prompt of the request has; whoever overrides `render` need not say it twice."""
        raise NotSupported("this model does not count its tokens")

    def tokenize(self, text: str, special: bool) -> Sequence[int] | Awaitable[Sequence[int]]:
        """Token ids of a text; with `special` the names of control tokens in it become those tokens."""
        raise NotSupported("this model does not tell its tokens")

    def detokenize(self, tokens: Sequence[int]) -> str | Awaitable[str]:
        raise NotSupported("this model does not tell its tokens")

    def embed(self, inputs: Sequence[Input]) -> Sequence[Embedding] | Awaitable[Sequence[Embedding]]:
        """A vector for each of the inputs, which are not empty, in their order; a long list comes in parts."""
        raise NotSupported("this model makes no embeddings")

    def vectors_of(self, model: str) -> MakeVectors:
        """What makes the vectors of one of its models; for an engine that has one it is `embed`."""
        return self.embed
