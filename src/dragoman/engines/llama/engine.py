"""The engine for models in GGUF files. Runs many requests at once, each in a slot of its own.

    event loop ──request──> prompt pool ──generation──> event loop ──job──> compute thread ──events──> event loop

A slot holds `context` tokens of prompt and reply. So does each of the `cache_sequences`, which keep prefixes for later
requests. The KV cache takes memory for `context` times the number of both.

An adapter is served as a model of its own over the same weights. llama.cpp applies an adapter to a whole context, so
each adapter has a context of the same size and a runner. The runners take turns and share no prefixes.

Every model can create embeddings, with a context that is created on first use. Bidirectional models can do only that.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Self

import msgspec

from dragoman.core.embeddings import Embedding, Input
from dragoman.core.engine import ModelInfo
from dragoman.core.errors import ConfigError, EngineFailed, NotSupported
from dragoman.core.events import Listener
from dragoman.core.features import Feature
from dragoman.core.request import GenerationRequest
from dragoman.engines.llama import hardware
from dragoman.engines.llama.binding import Context, ContextParams, LlamaModel
from dragoman.engines.llama.compute_thread import ComputeThread
from dragoman.engines.llama.embedder import Embedder
from dragoman.engines.llama.generation import LlamaRequestBuilder
from dragoman.engines.llama.options import (
    ContextSize,
    LlamaOptions,
    expected_kv_bytes,
    find_mistakes,
    find_warnings,
    fit_context,
)
from dragoman.engines.llama.runner import MIN_CHUNK_ALONE, Runner, StepEvents
from dragoman.engines.llama.scheduler import MAX_PROMPT_OUTPUTS, Scheduler
from dragoman.engines.llama.tuning_record import read_record
from dragoman.engines.prompt_reader import CONSTRAINT_FEATURES, EMBEDDING_FEATURES, TOKEN_FEATURES
from dragoman.engines.token_engine import TokenEngine
from dragoman.files.gguf import read_metadata

log = logging.getLogger("dragoman.engine")

FEATURES = TOKEN_FEATURES | CONSTRAINT_FEATURES | EMBEDDING_FEATURES

MAX_DEFAULT_EMBEDDING_TOKENS = 2048
"""Default input length of bidirectional models. Their memory grows with its square."""
EMBEDDING_SEQUENCES = 16


class LoadedLlama(msgspec.Struct, frozen=True):
    model: LlamaModel
    embedder: Embedder
    builder: LlamaRequestBuilder | None = None
    """None for models that only create embeddings."""
    runners: Mapping[str, Runner] = {}
    """By the name of the adapter; "" is the runner without one."""


class LlamaEngine(TokenEngine):
    Options = LlamaOptions
    loads_gguf = True

    def __init__(self, name: str, options: LlamaOptions) -> None:
        super().__init__(prompt_threads=2, threads_per_principal=1)
        self.name = name
        self.options = options
        self.slots = options.slots
        self.compute_thread: ComputeThread | None = None
        self.loaded: LoadedLlama | None = None
        self.active_generations = 0

    @classmethod
    def configured(cls, name: str, options: msgspec.Struct) -> Self:
        assert isinstance(options, LlamaOptions)
        return cls(name, options)

    @classmethod
    def needs_worker(cls, options: msgspec.Struct) -> bool:
        return True

    @classmethod
    def memory_beside_file(cls, options: msgspec.Struct) -> int:
        assert isinstance(options, LlamaOptions)
        files = [adapter.file for adapter in options.adapter_options.values()]
        adapter_bytes = sum(file.stat().st_size for file in files if file.is_file())
        try:
            kv_bytes = expected_kv_bytes(read_metadata(options.file), options)
        except ConfigError:
            # Loading reports what is wrong with the file.
            return adapter_bytes
        record = None if options.layout == "as-is" else read_record(options.file, check_hash=False)
        # A tuned copy is loaded instead of the file.
        growth = 0 if record is None else record.file.stat().st_size - options.file.stat().st_size
        return adapter_bytes + kv_bytes + growth

    @classmethod
    def find_option_errors(cls, options: msgspec.Struct) -> Sequence[tuple[str, str]]:
        assert isinstance(options, LlamaOptions)
        return list(find_mistakes(options))

    @classmethod
    def find_option_warnings(cls, options: msgspec.Struct) -> Sequence[tuple[str, str]]:
        assert isinstance(options, LlamaOptions)
        return list(find_warnings(options))

    def models(self) -> Sequence[ModelInfo]:
        length, format_name = self.options.context, self.options.format or "plain"
        if self.loaded is not None:
            length = self.loaded.embedder.length
            if self.loaded.builder is not None:
                format_name = self.loaded.builder.format.name
        return [ModelInfo(name, context=length, format=format_name) for name in (self.name, *self.options.adapters)]

    def supports(self) -> frozenset[str]:
        if self.loaded is None:
            return FEATURES
        if self.loaded.builder is None:
            return EMBEDDING_FEATURES
        return FEATURES if self.loaded.model.infill is None else FEATURES | {Feature.INFILL}

    async def start(self) -> None:
        def set_progress(share: float) -> None:
            self.progress = max(self.progress or 0.0, round(share, 2))

        self.progress = None
        self.compute_thread = thread = ComputeThread(asyncio.get_running_loop())
        future = thread.submit(partial(_load, self.options, thread, self._deliver_step, set_progress))
        try:
            self.loaded = await asyncio.wrap_future(future)
        except BaseException:
            thread.close()
            raise

    async def stop(self) -> None:
        loaded, self.loaded = self.loaded, None
        if self.compute_thread is not None:
            self.compute_thread.close()
        if loaded is not None and loaded.builder is not None:
            await loaded.builder.constraints.close()
        # The threads must be done before the model is freed.
        await asyncio.to_thread(self.close_pools, wait=True)
        if self.compute_thread is not None:
            await asyncio.to_thread(self.compute_thread.join)
        if loaded is not None:
            loaded.model.close()

    async def deliver(self, request: GenerationRequest, listener: Listener) -> None:
        builder, runners = self.require_builder(), self._require_loaded().runners
        generation = await self.build_generation(builder, request)
        runner = runners.get(request.model, runners[""])
        runner.submit(generation)
        self.active_generations += 1
        try:
            await generation.events.deliver(listener)
        finally:
            runner.cancel(generation)
            self.active_generations -= 1
            if not self.active_generations:
                self.kv_used = 0.0
        await self.deliver_checked(generation, listener)

    def _deliver_step(self, step: StepEvents) -> None:
        """Called in the event loop with the events of each step."""
        if self.loaded is not None and self.active_generations:
            runners = self.loaded.runners.values()
            capacity = self.options.slots * self.loaded.embedder.length * len(runners)
            self.kv_used = sum(runner.tokens for runner in runners) / capacity
        for put in step:
            put()

    async def embed(self, inputs: Sequence[Input]) -> Sequence[Embedding]:
        embedder = self._require_loaded().embedder
        job = embedder.submit(await self.run_in_pool(embedder.read, inputs))
        try:
            return await asyncio.wrap_future(job.future)
        finally:
            embedder.cancel(job)

    def require_vocabulary(self) -> LlamaModel:
        return self._require_loaded().model

    def require_builder(self) -> LlamaRequestBuilder:
        builder = self._require_loaded().builder
        if builder is None:
            raise NotSupported("this model creates embeddings and cannot generate text")
        return builder

    def _require_loaded(self) -> LoadedLlama:
        if self.loaded is None:
            raise EngineFailed("the engine is not running")
        return self.loaded


def _load(
    options: LlamaOptions,
    thread: ComputeThread,
    deliver: Callable[[StepEvents], None],
    progress: Callable[[float], None],
) -> LoadedLlama:
    """Load the model, in the compute thread. `deliver` gets the events, `progress` the fraction that is loaded."""
    if not options.file.is_file():
        raise ConfigError(f"llama: there is no model file at {options.file}")
    path, threads = _find_tuned(options)
    with contextlib.ExitStack() as stack:
        model = LlamaModel(path, progress)
        stack.callback(model.close)
        _check_kind(model, options)
        try:
            if model.is_bidirectional:
                loaded = _prepare_embedding(model, options, threads, thread, stack)
            else:
                loaded = _prepare_generation(model, options, threads, thread, deliver, stack)
        except EngineFailed as error:
            raise ConfigError(f"llama: the model loads, but {error}") from error
        stack.pop_all()
    thread.members = [*loaded.runners.values(), loaded.embedder]
    return loaded


def _find_tuned(options: LlamaOptions) -> tuple[Path, int]:
    """Return the file and the number of threads that `dragoman tune` recorded, or the defaults."""
    record = None if options.layout == "as-is" else read_record(options.file)
    if record is None:
        return options.file, options.threads or hardware.threads()
    threads = options.threads or record.chosen.threads
    log.info("tuned by `dragoman tune`: %s, %d threads", record.file, threads)
    return record.file, threads


def _check_kind(model: LlamaModel, options: LlamaOptions) -> None:
    path, description = options.path, model.description
    if not model.generates_text:
        raise ConfigError(f"llama: {path} does not generate text token by token ({description})")
    if model.is_bidirectional and model.is_reranker:
        raise ConfigError(f"llama: {path} is a reranking model ({description}); use an embedding model to rank")
    if model.is_bidirectional and options.adapters:
        raise ConfigError(f"llama: {path} is an embedding model ({description}), which cannot have adapters")


def _create_contexts(
    model: LlamaModel, options: LlamaOptions, size: ContextSize, threads: int, stack: contextlib.ExitStack
) -> list[Context]:
    """Return a context for the model itself, then one for each adapter."""
    params = ContextParams(
        sequences=size.sequences,
        length=size.length,
        rows=options.batch + options.slots,
        outputs=MAX_PROMPT_OUTPUTS + options.slots,
        threads=threads,
        flash_attention=options.flash_attention,
        kv=options.kv,
    )
    adapters: list[tuple[int, float] | None] = [None]
    for name, entry in options.adapter_options.items():
        if not entry.file.is_file():
            raise ConfigError(f"llama: adapter {name}: no file at {entry.file}")
        adapters.append((model.load_adapter(entry.file), entry.scale))
    contexts = []
    for adapter in adapters:
        contexts.append(context := Context(model, params))
        stack.callback(context.close)
        if adapter is not None:
            context.set_adapter(*adapter)
        context.warm_up(min(options.batch, MIN_CHUNK_ALONE, size.length))
    return contexts


def _prepare_generation(
    model: LlamaModel,
    options: LlamaOptions,
    threads: int,
    thread: ComputeThread,
    deliver: Callable[[StepEvents], None],
    stack: contextlib.ExitStack,
) -> LoadedLlama:
    size = fit_context(model, options)
    contexts = _create_contexts(model, options, size, threads, stack)
    sharing, isolate = not model.is_recurrent, options.isolate
    schedule = partial(Scheduler, size.slots, size.cached, sharing=sharing, isolate=isolate, clock=time.monotonic)
    runners: list[Runner] = []
    runners += [Runner(context, schedule, options, thread, deliver, runners) for context in contexts]
    length = min(size.length, contexts[0].length)
    params = _embedding_params(length, options.batch, threads)
    embedder = Embedder(model, params, length, thread, lambda: any(runner.has_work for runner in runners))
    builder = LlamaRequestBuilder(model, length, options)
    return LoadedLlama(model, embedder, builder, dict(zip(("", *options.adapters), runners, strict=True)))


def _prepare_embedding(
    model: LlamaModel, options: LlamaOptions, threads: int, thread: ComputeThread, stack: contextlib.ExitStack
) -> LoadedLlama:
    length = min(options.context or MAX_DEFAULT_EMBEDDING_TOKENS, model.trained_context)
    rows = max(length, min(options.batch, MAX_DEFAULT_EMBEDDING_TOKENS))
    embedder = Embedder(model, _embedding_params(rows, rows, threads), length, thread)
    stack.callback(embedder.close)
    embedder.prepare()
    return LoadedLlama(model, embedder)


def _embedding_params(length: int, rows: int, threads: int) -> ContextParams:
    return ContextParams(
        sequences=EMBEDDING_SEQUENCES, length=length, rows=rows, outputs=rows, threads=threads, vectors=True
    )
