"""Models in GGUF files, run by llama.cpp: many requests at once, each in a slot of its own.

A slot has room for `context` tokens of prompt and reply together, and so has each of the `cache_sequences` in which
beginnings of texts are kept: the memory that the model's state takes grows with `context` times the two together.

Adapters are models of their own over the same weights. llama.cpp applies an adapter to all that a decoder does, so each
has a decoder with the same room, and a runner; they take turns. What one has computed is of no use to another.

Any model makes vectors of texts too, in a decoder of its own that is made when it is first asked for. A model that
looks ahead does nothing else.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Self, TypeVar

import msgspec

from dragoman.core.embeddings import Embedding, Input
from dragoman.core.engine import Engine, ModelInfo, Rendered
from dragoman.core.errors import ConfigError, EngineFailed, NotSupported
from dragoman.core.events import Event, Finished
from dragoman.core.request import GenerationRequest
from dragoman.engines.llama import adapters, hardware
from dragoman.engines.llama.binding import Context, Model
from dragoman.engines.llama.compute_thread import Turns
from dragoman.engines.llama.embedder import Embedder
from dragoman.engines.llama.generation import Generation
from dragoman.engines.llama.memory_fit import Room, expected_bytes, room
from dragoman.engines.llama.options import LlamaOptions
from dragoman.engines.llama.request_builder import Intake
from dragoman.engines.llama.runner import LEAST_CHUNK_ALONE, Runner
from dragoman.engines.llama.scheduler import MAX_PROMPT_OUTPUTS, Scheduler
from dragoman.engines.llama.tuning import threads
from dragoman.engines.llama.tuning.layout import prepared
from dragoman.engines.llama.warnings import doubts
from dragoman.engines.prompt_reader import detokenize, tokenize
from dragoman.files.gguf import read_metadata
from dragoman.formats import detect, named
from dragoman.grammar.schema_check import warnings

log = logging.getLogger("dragoman.engine")
T = TypeVar("T")

MOST_DEFAULT_WHOLE = 2048
"""Tokens of a text that goes in whole: the memory for it grows with their square."""
TRIAL_SHARE = 0.9
"""Of the time that loading takes where another layout is tried."""
EMBEDDED_AT_ONCE = 16
"""Texts."""

VECTOR_FEATURES = frozenset({"embeddings", "tokenize"})
FEATURES = VECTOR_FEATURES | frozenset(
    {
        *("chat", "completion", "token_prompt", "token_ids", "logprobs", "prompt_logprobs"),
        *("temperature", "top_p", "top_k", "min_p", "seed", "logit_bias"),
        *("repetition_penalty", "presence_penalty", "frequency_penalty"),
        *("stop_token_ids", "ignore_eos", "max_tokens", "usage"),
        *("tools", "strict_tools", "constraint", "thinking", "documents", "render", "template_options"),
    }
)


class _Loaded(msgspec.Struct, frozen=True):
    """What it takes to write text."""

    intake: Intake
    runner: Runner
    adapted: Mapping[str, Runner]
    """By the names of the adapters."""

    capacity: int
    """Tokens that fit into the slots of all runners."""

    @property
    def runners(self) -> Sequence[Runner]:
        return [self.runner, *self.adapted.values()]

    @property
    def tokens(self) -> int:
        return sum(runner.tokens for runner in self.runners)


class LlamaEngine(Engine):
    Options = LlamaOptions
    streams_events = True

    def __init__(self, name: str, options: LlamaOptions) -> None:
        self.name = name
        self.options = options
        self.slots = options.slots
        self.model: Model | None = None
        self.embedder: Embedder | None = None
        self.loaded: _Loaded | None = None
        self.writing = 0
        # Threads of its own: they must be through with the model before it is freed.
        self.readers = ThreadPoolExecutor(2, thread_name_prefix="dragoman-prompt")
        # Nobody's generation waits for answers to questions about prompts and tokens.
        self.tellers = ThreadPoolExecutor(2, thread_name_prefix="dragoman-tell")
        self.turns = Turns()
        # Checking a reply against keywords that were not enforced may take half a second.
        self.checkers = ThreadPoolExecutor(2, thread_name_prefix="dragoman-check")

    @classmethod
    def configured(cls, name: str, options: msgspec.Struct) -> Self:
        if not isinstance(options, LlamaOptions):
            raise TypeError(f"the llama engine takes LlamaOptions, not {type(options).__name__}")
        return cls(name, options)

    @classmethod
    def needs_worker(cls, options: msgspec.Struct) -> bool:
        return True

    @classmethod
    def memory_beside_file(cls, options: msgspec.Struct) -> int:
        assert isinstance(options, LlamaOptions)
        files = [adapters.file_of(entry) for entry in options.adapters.values()]
        beside = sum(file.stat().st_size for file in files if file.is_file())
        try:
            metadata = read_metadata(Path(options.path).expanduser())
        except ConfigError:
            # Loading it will say what is wrong with it.
            return beside
        room = options.slots, options.context, options.cache_sequences, options.kv
        return beside + expected_bytes(metadata, *room, times=1 + len(options.adapters))

    @classmethod
    def mistakes(cls, options: msgspec.Struct) -> Sequence[tuple[str, str]]:
        assert isinstance(options, LlamaOptions)
        found = adapters.mistakes(Path(options.path).expanduser(), options.adapters)
        return [(f"adapters.{name}", words) for name, words in found]

    @classmethod
    def doubts(cls, options: msgspec.Struct) -> Sequence[tuple[str, str]]:
        assert isinstance(options, LlamaOptions)
        return list(doubts(options))

    def models(self) -> Sequence[ModelInfo]:
        if self.loaded is None:
            length = self.options.context if self.embedder is None else self.embedder.length
            form = self.options.format or "plain"
        else:
            length, form = self.loaded.intake.context, self.loaded.intake.format.name
        return [ModelInfo(name, context=length, format=form) for name in (self.name, *self.options.adapters)]

    def supports(self) -> frozenset[str]:
        if self.model is None:
            return FEATURES
        if self.loaded is None:
            return VECTOR_FEATURES
        return FEATURES if self.model.infill is None else FEATURES | {"infill"}

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self.progress = None
        self.model, self.loaded, embedder = await self._aside(
            _load, self.options, loop, self.turns, self._note_progress
        )
        self.embedder = embedder
        embedder.start()
        if self.loaded is not None:
            for runner in self.loaded.runners:
                runner.start()

    def _note_progress(self, share: float) -> None:
        self.progress = max(self.progress or 0.0, round(share, 2))

    async def stop(self) -> None:
        loaded, self.loaded = self.loaded, None
        model, self.model = self.model, None
        embedder, self.embedder = self.embedder, None
        if loaded is not None:
            for runner in loaded.runners:
                runner.close()
        if embedder is not None:
            embedder.close()
        if loaded is not None:
            await loaded.intake.constraints.close()
        await asyncio.to_thread(self._free, model, loaded, embedder)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Sequence[Event], None]:
        loaded = self._writing()
        read = await self._aside(loaded.intake.read, request)
        constrained = await loaded.intake.constrain(request, read)
        generation = await self._aside(loaded.intake.generation, request, read, constrained)
        runner = loaded.adapted.get(request.model, loaded.runner)
        runner.submit(generation)
        self.writing += 1
        try:
            while events := await generation.inbox.take():
                self.kv_used = loaded.tokens / loaded.capacity
                if type(events[-1]) is Finished and generation.bearings.checks:
                    events = [*events[:-1], await self._aside(_checked, generation, events[-1], pool=self.checkers)]
                yield events
        finally:
            runner.cancel(generation)
            self.writing -= 1
            if not self.writing:
                self.kv_used = 0.0

    async def render(self, request: GenerationRequest) -> Rendered:
        return await self._aside(self._writing().intake.render, request, pool=self.tellers)

    async def tokenize(self, text: str, special: bool) -> Sequence[int]:
        return await self._aside(tokenize, self._running()[0], text, special, pool=self.tellers)

    async def detokenize(self, tokens: Sequence[int]) -> str:
        return await self._aside(detokenize, self._running()[0], tokens, pool=self.tellers)

    async def embed(self, inputs: Sequence[Input]) -> Sequence[Embedding]:
        _, embedder = self._running()
        job = embedder.submit(await self._aside(embedder.read, inputs))
        try:
            return await job.future
        finally:
            embedder.cancel(job)

    def _running(self) -> tuple[Model, Embedder]:
        if self.model is None or self.embedder is None:
            raise EngineFailed("the engine is not running")
        return self.model, self.embedder

    def _writing(self) -> _Loaded:
        self._running()
        if self.loaded is None:
            raise NotSupported("this model makes vectors, not text")
        return self.loaded

    async def _aside(self, function: Callable[..., T], *arguments: object, pool: Executor | None = None) -> T:
        return await asyncio.get_running_loop().run_in_executor(pool or self.readers, function, *arguments)

    def _free(self, model: Model | None, loaded: _Loaded | None, embedder: Embedder | None) -> None:
        self.readers.shutdown(wait=True)
        self.checkers.shutdown(wait=True)
        self.tellers.shutdown(wait=True)
        for runner in () if loaded is None else loaded.runners:
            runner.join()
            runner.context.close()
            if runner.drafted:
                log.info("of %d drafted tokens %d were the right ones", runner.drafted, runner.accepted)
        if embedder is not None:
            embedder.join()
        self.turns.close()
        if model is not None:
            model.close()


def _load(
    options: LlamaOptions, loop: asyncio.AbstractEventLoop, turns: Turns, progress: Callable[[float], None]
) -> tuple[Model, _Loaded | None, Embedder]:
    path = Path(options.path).expanduser()
    if not path.is_file():
        raise ConfigError(f"llama: there is no model file at {path}")
    if options.layout == "auto":
        path = prepared(path, bar=lambda _, done: progress(TRIAL_SHARE * done))
    with contextlib.ExitStack() as undo:
        model = Model(path, progress)
        undo.callback(model.close)
        _check_kind(model, options)
        if model.looks_ahead:
            embedder = _whole_embedder(model, options, turns)
            undo.pop_all()
            return model, None, embedder
        # Once for the model as it is, and once for each adapter.
        times = 1 + len(options.adapters)
        space = room(model, options.slots, options.context, options.cache_sequences, options.kv, times=times)
        runners = _runners(model, options, space, loop, turns, undo)
        many = options.threads or turns.run(_choose_threads, [runner.context for runner in runners], path)
        loaded = _loaded(model, options, space.length, runners)
        embedder = _embedder(model, options, loaded.intake.context, turns, many, lambda: _are_writing(runners))
        undo.pop_all()
        return model, loaded, embedder


def _check_kind(model: Model, options: LlamaOptions) -> None:
    path = options.path
    if not model.generates:
        raise ConfigError(f"llama: {path} does not write text token by token ({model.description})")
    if model.looks_ahead and model.ranks:
        raise ConfigError(f"llama: {path} ranks texts ({model.description}); rank with a model that makes vectors")
    if model.looks_ahead and options.adapters:
        raise ConfigError(f"llama: {path} makes vectors ({model.description}): it takes no adapters")


def _runners(
    model: Model,
    options: LlamaOptions,
    space: Room,
    loop: asyncio.AbstractEventLoop,
    turns: Turns,
    undo: contextlib.ExitStack,
) -> list[Runner]:
    """One for the model as it is, then one for each adapter."""
    changes = [None, *(adapters.loaded(model, name, entry) for name, entry in options.adapters.items())]
    schedule = partial(
        Scheduler,
        space.slots,
        space.cached,
        sharing=not model.forgets,
        isolate=options.isolate,
        clock=time.monotonic,
    )
    runners: list[Runner] = []
    for change in changes:
        context = _context(model, options, space)
        undo.callback(context.close)
        if change is not None:
            context.adapt(*change)
        turns.run(_warm_up, context, min(options.batch, LEAST_CHUNK_ALONE, space.length))
        gap, leaps = options.gap_ms / 1000, options.flash_attention
        runners.append(Runner(context, loop, schedule, batch=options.batch, gap=gap, leaps=leaps, turns=turns))
    for runner in runners:
        runner.company = [other for other in runners if other is not runner]
    return runners


def _are_writing(runners: Sequence[Runner]) -> bool:
    return any(not runner.scheduler.idle for runner in runners)


def _loaded(model: Model, options: LlamaOptions, length: int, runners: Sequence[Runner]) -> _Loaded:
    plain, *others = runners
    syntax = named(options.format or detect(model.chat_template, model.metadata.get("general.name", "")))
    speculation = options.speculation and not model.forgets
    fitting = min(length, plain.context.length)
    intake = Intake(model, fitting, syntax, options.template_options, speculation=speculation)
    capacity = options.slots * fitting * len(runners)
    return _Loaded(intake, plain, dict(zip(options.adapters, others, strict=True)), capacity)


def _choose_threads(contexts: Sequence[Context], path: Path) -> int:
    """As many as are fastest; those for many rows at once."""
    found = threads.chosen(contexts[0], path)
    for context in contexts:
        context.use_threads(found.single, found.many)
    return found.many


def _context(model: Model, options: LlamaOptions, space: Room) -> Context:
    return Context(
        model,
        sequences=space.sequences,
        length=space.length,
        rows=options.batch + options.slots,
        outputs=MAX_PROMPT_OUTPUTS + options.slots,
        threads=options.threads or hardware.cpus(),
        flash_attention=options.flash_attention,
        kv=options.kv,
    )


def _embedder(
    model: Model, options: LlamaOptions, length: int, turns: Turns, many: int, is_writing: Callable[[], bool]
) -> Embedder:
    """Its decoder has room for one text as long as a slot, or for several that are shorter."""

    def make() -> Context:
        return _vector_context(model, length, options.batch, many)

    return Embedder(
        model,
        make,
        length=length,
        sequences=EMBEDDED_AT_ONCE,
        rows=options.batch,
        turns=turns,
        is_writing=is_writing,
    )


def _whole_embedder(model: Model, options: LlamaOptions, turns: Turns) -> Embedder:
    trained = model.trained_context
    length = min(options.context or MOST_DEFAULT_WHOLE, trained)
    rows = max(length, min(options.batch, MOST_DEFAULT_WHOLE))
    embedder = Embedder(
        model,
        lambda: _vector_context(model, rows, rows, options.threads or hardware.threads()),
        length=length,
        sequences=EMBEDDED_AT_ONCE,
        rows=rows,
        turns=turns,
    )
    try:
        turns.run(embedder.prepare)
    except EngineFailed as error:
        embedder.join()
        raise ConfigError(f"llama: the model loads, but {error}") from error
    return embedder


def _vector_context(model: Model, length: int, rows: int, threads: int) -> Context:
    return Context(
        model,
        sequences=EMBEDDED_AT_ONCE,
        length=length,
        rows=rows,
        outputs=rows,
        threads=threads,
        vectors=True,
    )


def _checked(generation: Generation, finished: Finished) -> Finished:
    """With a warning where the reply does not fit what could not be enforced."""
    guide, checks = generation.guide, generation.bearings.checks
    if guide is None or finished.reason == "length":
        return finished
    found = warnings(checks, guide.captures())
    return msgspec.structs.replace(finished, warnings=(*finished.warnings, *found))


def _warm_up(context: Context, rows: int) -> None:
    """Read the weights in once, so that the first request does not; also the first sign of a model that cannot run."""
    code = context.decode([0] * rows, range(rows), [0] * rows, [False] * (rows - 1) + [True])
    if code:
        raise ConfigError(f"llama: the model loads but does not run (code {code})")
    context.clear_all()
