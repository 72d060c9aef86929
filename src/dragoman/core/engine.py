"""The Engine base class.

Subclass it and override `generate` to serve a model through every API. An engine receives values and yields events or
text; it never sees HTTP, SSE or JSON.
"""

import asyncio
import inspect
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, ClassVar, Protocol, Self, TypeVar

import msgspec

from dragoman.core import delivery
from dragoman.core.embeddings import Embedding, Input
from dragoman.core.errors import ConfigError, NotSupported
from dragoman.core.events import Event, Listener
from dragoman.core.features import Feature
from dragoman.core.request import GenerationRequest

T = TypeVar("T")
Output = delivery.Output

EmbedFunction = Callable[[Sequence[Input]], Sequence[Embedding] | Awaitable[Sequence[Embedding]]]

PutProgress = Callable[[msgspec.Raw], None]
"""Receives the encoded progress of a generation that belongs to another process."""

FEATURES_BY_METHOD = {
    "generate": (Feature.CHAT, Feature.COMPLETION),
    "deliver": (Feature.CHAT, Feature.COMPLETION),
    "tokenize": (Feature.TOKENIZE,),
    "tokenize_text": (Feature.ADD_SPECIAL,),
    "token_texts": (Feature.TOKEN_TEXTS,),
    "render": (Feature.RENDER, Feature.COUNT_TOKENS),
    "count_tokens": (Feature.COUNT_TOKENS,),
    "embed": (Feature.EMBEDDINGS,),
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
    """The prompt sent to the model, and the format used to parse the reply.

    `ignored` are requested parameters that have no effect on it.
    """

    text: str
    tokens: tuple[int, ...]
    format: str
    ignored: tuple[str, ...] = ()


class WorkerControl(Protocol):
    """The worker process of an engine, as the server sees it."""

    @property
    def pid(self) -> int | None: ...

    @property
    def is_restarting(self) -> bool:
        """Whether the worker has died and its successor is not ready yet."""

    @property
    def restart_seconds(self) -> float:
        """Seconds since the worker died."""

    async def wait_until_running(self) -> object: ...

    def forward(self, put: PutProgress, key: int, request: msgspec.Raw) -> bool:
        """Start a generation for another process, which has chosen a unique key for it. Return False if the worker
        does not run yet."""

    async def forward_when_running(self, put: PutProgress, key: int, request: msgspec.Raw) -> None:
        """Wait for the worker and do the same."""

    def stop_forwarding(self, key: int) -> None:
        """Cancel a forwarded generation; does nothing if it has ended."""


class NoOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pass


class Engine:
    Options: ClassVar[type[msgspec.Struct]] = NoOptions
    """The configuration keys of a model of this engine."""

    emits_tool_calls: bool = False
    """The events contain reasoning and tool calls, so the text is not parsed for them."""

    loads_directory: ClassVar[bool] = False
    """The source is a model directory or a Hugging Face name; the engine finds the files itself."""

    loads_gguf: ClassVar[bool] = False
    """The source is a GGUF file."""

    runs_elsewhere: ClassVar[bool] = False
    """The model runs on another server, so this machine needs no resources for it."""

    device: str = "cpu"
    """The compute device, as shown in the model list."""
    kv_used: float | None = None
    """Fraction of the KV cache in use, from 0 to 1; None if unknown."""
    slots: int | None = None
    """Maximum number of concurrent generations; further requests queue. None means unlimited."""
    reads_fields: Sequence[str] = ()
    """Fields of the body that the engine reads in `request.extra`, beyond those of the protocols; `*` means all."""
    reads_headers: Sequence[str] = ()
    """Names of headers that the engine reads in `request.headers`, in lower case."""
    progress: float | None = None
    """Fraction of the model loaded so far, from 0 to 1; None if unknown."""
    worker_control: WorkerControl | None = None
    """Set if the engine runs in a worker process."""
    on_death: Callable[[str], None] | None = None
    """Set by a worker process: an engine that can no longer work calls it with the reason."""

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
    def find_option_errors(cls, options: msgspec.Struct) -> Sequence[tuple[str, str]]:
        """Return errors found without loading the model, as pairs of key and message, for `dragoman check`.

        The key is a path such as `adapters.legal`, or "" for the whole model entry.
        """
        return ()

    @classmethod
    def find_option_warnings(cls, options: msgspec.Struct) -> Sequence[tuple[str, str]]:
        """Return warnings for valid but probably unintended options, as pairs of key and message."""
        return ()

    @classmethod
    def is_installed(cls) -> bool:
        """Whether the optional packages the engine needs are installed."""
        return True

    def models(self) -> Sequence[ModelInfo | str]:
        """Return the models, or only their names; called often. An `async def` is called at the start, and again when
        models are listed or a name is unknown."""
        return [ModelInfo(type(self).__name__.removesuffix("Engine").lower() or "engine")]

    def model_info(self, name: str) -> ModelInfo:
        """Return the description of a model. The only model of an engine may be served under several names."""
        models = list_models(self)
        found = models[0] if len(models) == 1 else next((model for model in models if model.name == name), None)
        return ModelInfo(name) if found is None else msgspec.structs.replace(found, name=name)

    def supports(self) -> frozenset[str]:
        """Return the names of the features that the engine has; see `Feature`."""
        found: set[str] = set()
        for method, features in FEATURES_BY_METHOD.items():
            if getattr(type(self), method) is not getattr(Engine, method):
                found.update(features)
        return frozenset(found)

    async def start(self) -> None:
        """Load the model. Called before the first request, and again after `stop` when the model is reloaded."""

    async def stop(self) -> None:
        """Release all resources."""

    def generate(self, request: GenerationRequest) -> Iterable[Output] | AsyncIterable[Output]:
        """Generate a reply, as a generator or as the whole text. A plain function runs in its own thread. Closing the
        iterator cancels the generation."""
        raise NotSupported("this model does not generate text")

    async def deliver(self, request: GenerationRequest, listener: Listener) -> None:
        """Generate a reply by calling `listener` with each batch of events, from `Started` to `Finished`.

        The program calls only this method; by default it runs `generate`. An exception of the listener, or
        cancellation, ends the generation and propagates to the caller.
        """
        async with aclosing(delivery.complete_events(self.generate, request)) as batches:
            async for events in batches:
                pause = listener(events)
                if pause is not None:
                    await pause

    def render(self, request: GenerationRequest) -> RenderedPrompt | Awaitable[RenderedPrompt]:
        """Return the prompt that `generate` would use."""
        raise NotSupported("this model does not support rendering prompts")

    def count_tokens(self, request: GenerationRequest) -> int | Awaitable[int]:
        """Count the tokens of the prompt. Not needed for engines that override `render`."""
        if type(self).render is Engine.render:
            raise NotSupported("this model does not support counting tokens")
        return self._count_rendered(request)

    async def _count_rendered(self, request: GenerationRequest) -> int:
        return len((await call_engine(self.render, request)).tokens)

    def tokenize(self, text: str, special: bool) -> Sequence[int] | Awaitable[Sequence[int]]:
        """Tokenize a text; with `special`, names of control tokens in it become those tokens."""
        raise NotSupported("this model does not support tokenization")

    def tokenize_text(self, text: str, special: bool) -> Sequence[int] | Awaitable[Sequence[int]]:
        """Do the same, and add the tokens that the model needs around a text, such as BOS."""
        raise NotSupported("this model does not add tokens around a text")

    def token_texts(self, tokens: Sequence[int]) -> Sequence[bytes] | Awaitable[Sequence[bytes]]:
        """Return the text of each token. A token may be a part of a character."""
        raise NotSupported("this model does not return the text of tokens")

    def detokenize(self, tokens: Sequence[int]) -> str | Awaitable[str]:
        raise NotSupported("this model does not support tokenization")

    def embed(self, inputs: Sequence[Input]) -> Sequence[Embedding] | Awaitable[Sequence[Embedding]]:
        """Return one embedding per input, in order. Inputs are not empty; a long list arrives in several calls."""
        raise NotSupported("this model does not support embeddings")

    def embed_function_for(self, model: str) -> EmbedFunction:
        """Return the function that embeds with the given model; engines with several models override this."""
        return self.embed


def stream_events(engine: Engine, request: GenerationRequest) -> AsyncGenerator[Sequence[Event], None]:
    """Return the events of one generation as an async generator, for callers that cannot pass a listener."""
    return delivery.pull_events(partial(run_delivery, engine, request))


def run_delivery(engine: Engine, request: GenerationRequest, listener: Listener) -> Coroutine[Any, Any, None]:
    """Call `deliver`. One that is not async runs in a thread, and may call the listener there."""
    if inspect.iscoroutinefunction(engine.deliver):
        return engine.deliver(request, listener)
    return delivery.deliver_in_thread(engine.deliver, request, listener)


async def start_engine(engine: Engine) -> None:
    """Load the model, and ask for what is known about it."""
    start: Callable[[], Awaitable[None] | None] = engine.start
    await call_engine(start)
    await describe_engine(engine)


async def describe_engine(engine: Engine) -> None:
    """Ask an engine whose `models` or `supports` is async for the answers."""
    await ask_models(engine)
    declared: Any = type(engine).supports
    if inspect.iscoroutinefunction(declared):
        features = frozenset(await declared(engine))
        engine.supports = lambda: features  # type: ignore[method-assign]


async def ask_models(engine: Engine) -> Sequence[ModelInfo]:
    """Ask an engine for its models. If its method is async, `models()` returns this answer from now on."""
    declared: Any = type(engine).models
    if inspect.iscoroutinefunction(declared):
        models = _to_infos(engine, await declared(engine))
        engine.models = lambda: models  # type: ignore[method-assign]
    return list_models(engine)


def known_models(engine: Engine) -> Sequence[ModelInfo]:
    """The models of an engine that may not have started. An async `models` has not been asked then."""
    return () if inspect.iscoroutinefunction(engine.models) else list_models(engine)


def list_models(engine: Engine) -> tuple[ModelInfo, ...]:
    """The models of an engine that has started."""
    return _to_infos(engine, engine.models())


def _to_infos(engine: Engine, answer: object) -> tuple[ModelInfo, ...]:
    expected = f"`models` of engine {type(engine).__name__} must return a list of names or ModelInfo values"
    if isinstance(answer, str) or not isinstance(answer, Iterable):
        raise ConfigError(f"{expected}, not {answer!r}")
    infos = []
    for entry in answer:
        if not isinstance(entry, str | ModelInfo):
            raise ConfigError(f"{expected}, but contains {entry!r}")
        infos.append(ModelInfo(entry) if isinstance(entry, str) else entry)
    return tuple(infos)


def check_engine(engine: object) -> None:
    """Raise a ConfigError for what is not an engine, such as the class of one."""
    if isinstance(engine, Engine):
        return
    if isinstance(engine, type):
        raise ConfigError(f"expected an engine, got the class {engine.__name__}; write {engine.__name__}()")
    raise ConfigError(f"expected an engine, got {type(engine).__name__}")


def check_engine_class(cls: type[Engine]) -> None:
    """Raise a ConfigError for an engine that can answer nothing."""
    needed = ("generate", "deliver", "embed", "embed_function_for")
    if all(getattr(cls, method) is getattr(Engine, method) for method in needed):
        raise ConfigError(f"engine {cls.__name__} can answer nothing: define `generate` for text, or `embed`")


async def call_engine(method: Callable[..., T | Awaitable[T]], *arguments: object) -> T:
    """Call a method of an engine. A method that is not async runs in a thread."""
    if inspect.iscoroutinefunction(method):
        answer: T = await method(*arguments)
        return answer
    result = await asyncio.to_thread(method, *arguments)
    if isinstance(result, Awaitable):
        awaited: T = await result
        return awaited
    return result
