"""The engine for models in GGUF files. Runs many requests at once, each in a slot of its own.

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
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Self, TypeVar

import msgspec

from dragoman.core.embeddings import Embedding, Input
from dragoman.core.engine import Engine, ModelInfo, RenderedPrompt
from dragoman.core.errors import ConfigError, EngineFailed, NotSupported
from dragoman.core.events import Event, Finished
from dragoman.core.request import GenerationRequest
from dragoman.engines.llama import hardware
from dragoman.engines.llama.adapters import adapter_path, adapter_problems, load_adapter
from dragoman.engines.llama.binding import Context, LlamaModel
from dragoman.engines.llama.compute_thread import ComputeThread
from dragoman.engines.llama.embedder import Embedder
from dragoman.engines.llama.generation import Generation
from dragoman.engines.llama.memory_fit import ContextSize, expected_bytes, fit_context, option_warnings
from dragoman.engines.llama.options import LlamaOptions
from dragoman.engines.llama.request_builder import LlamaRequestBuilder
from dragoman.engines.llama.runner import LEAST_CHUNK_ALONE, Runner
from dragoman.engines.llama.scheduler import MAX_PROMPT_OUTPUTS, Scheduler
from dragoman.engines.llama.tuning.record import read_record
from dragoman.engines.prompt_reader import detokenize, tokenize
from dragoman.files.gguf import read_metadata
from dragoman.formats import detect_format, get_format
from dragoman.grammar.schema_check import find_violations

log = logging.getLogger("dragoman.engine")
T = TypeVar("T")

MAX_DEFAULT_EMBEDDING_TOKENS = 2048
"""Default input length of bidirectional models. Their memory grows with its square."""
EMBEDDING_SEQUENCES = 16

EMBEDDING_FEATURES = frozenset({"embeddings", "tokenize"})
FEATURES = EMBEDDING_FEATURES | frozenset(
    {
        *("chat", "completion", "token_prompt", "token_ids", "logprobs", "prompt_logprobs"),
        *("temperature", "top_p", "top_k", "min_p", "seed", "logit_bias"),
        *("repetition_penalty", "presence_penalty", "frequency_penalty"),
        *("stop_token_ids", "ignore_eos", "max_tokens", "usage"),
        *("tools", "strict_tools", "constraint", "thinking", "documents", "render", "template_options"),
    }
)


class _Loaded(msgspec.Struct, frozen=True):
    """The parts that generate text."""

    request_builder: LlamaRequestBuilder
    runner: Runner
    adapter_runners: Mapping[str, Runner]
    """By adapter name."""
    capacity: int
    """Tokens that fit into the slots of all runners."""

    @property
    def runners(self) -> Sequence[Runner]:
        return [self.runner, *self.adapter_runners.values()]

    @property
    def tokens(self) -> int:
        return sum(runner.tokens for runner in self.runners)


class LlamaEngine(Engine):
    Options = LlamaOptions
    emits_events = True

    def __init__(self, name: str, options: LlamaOptions) -> None:
        self.name = name
        self.options = options
        self.slots = options.slots
        self.model: LlamaModel | None = None
        self.embedder: Embedder | None = None
        self.loaded: _Loaded | None = None
        self.active_generations = 0
        # The engine has pools of its own because their threads must be done before the model is freed.
        self.prompt_pool = ThreadPoolExecutor(2, thread_name_prefix="dragoman-prompt")
        # Requests to render or tokenize must not delay generations.
        self.tokenize_pool = ThreadPoolExecutor(2, thread_name_prefix="dragoman-tokenize")
        # Checking a reply against keywords that were not enforced may take half a second.
        self.check_pool = ThreadPoolExecutor(2, thread_name_prefix="dragoman-check")
        self.compute_thread = ComputeThread()

    @classmethod
    def configured(cls, name: str, options: msgspec.Struct) -> Self:
        if not isinstance(options, LlamaOptions):
            raise TypeError(f"the llama engine expects LlamaOptions, got {type(options).__name__}")
        return cls(name, options)

    @classmethod
    def needs_worker(cls, options: msgspec.Struct) -> bool:
        return True

    @classmethod
    def memory_beside_file(cls, options: msgspec.Struct) -> int:
        assert isinstance(options, LlamaOptions)
        files = [adapter_path(entry) for entry in options.adapters.values()]
        adapter_bytes = sum(file.stat().st_size for file in files if file.is_file())
        try:
            metadata = read_metadata(Path(options.path).expanduser())
        except ConfigError:
            # Loading reports what is wrong with the file.
            return adapter_bytes
        return adapter_bytes + expected_bytes(metadata, options)

    @classmethod
    def mistakes(cls, options: msgspec.Struct) -> Sequence[tuple[str, str]]:
        assert isinstance(options, LlamaOptions)
        problems = adapter_problems(Path(options.path).expanduser(), options.adapters)
        return [(f"adapters.{name}", message) for name, message in problems]

    @classmethod
    def doubts(cls, options: msgspec.Struct) -> Sequence[tuple[str, str]]:
        assert isinstance(options, LlamaOptions)
        return list(option_warnings(options))

    def models(self) -> Sequence[ModelInfo]:
        if self.loaded is None:
            length = self.options.context if self.embedder is None else self.embedder.length
            format_name = self.options.format or "plain"
        else:
            length, format_name = self.loaded.request_builder.context, self.loaded.request_builder.format.name
        return [ModelInfo(name, context=length, format=format_name) for name in (self.name, *self.options.adapters)]

    def supports(self) -> frozenset[str]:
        if self.model is None:
            return FEATURES
        if self.loaded is None:
            return EMBEDDING_FEATURES
        return FEATURES if self.model.infill is None else FEATURES | {"infill"}

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self.progress = None
        self.model, self.loaded, embedder = await self._run_in_pool(
            _load, self.options, loop, self.compute_thread, self._set_progress
        )
        self.embedder = embedder
        embedder.start()
        if self.loaded is not None:
            for runner in self.loaded.runners:
                runner.start()

    def _set_progress(self, share: float) -> None:
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
            await loaded.request_builder.constraints.close()
        await asyncio.to_thread(self._free, model, loaded, embedder)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Sequence[Event], None]:
        loaded = self._require_loaded()
        read = await self._run_in_pool(loaded.request_builder.read, request)
        constrained = await loaded.request_builder.constrain(request, read)
        generation = await self._run_in_pool(loaded.request_builder.generation, request, read, constrained)
        runner = loaded.adapter_runners.get(request.model, loaded.runner)
        runner.submit(generation)
        self.active_generations += 1
        try:
            while events := await generation.inbox.take():
                self.kv_used = loaded.tokens / loaded.capacity
                if type(events[-1]) is Finished and generation.params.checks:
                    finished = await self._run_in_pool(_check_reply, generation, events[-1], pool=self.check_pool)
                    events = [*events[:-1], finished]
                yield events
        finally:
            runner.cancel(generation)
            self.active_generations -= 1
            if not self.active_generations:
                self.kv_used = 0.0

    async def render(self, request: GenerationRequest) -> RenderedPrompt:
        return await self._run_in_pool(self._require_loaded().request_builder.render, request, pool=self.tokenize_pool)

    async def tokenize(self, text: str, special: bool) -> Sequence[int]:
        model, _ = self._require_running()
        return await self._run_in_pool(tokenize, model, text, special, pool=self.tokenize_pool)

    async def detokenize(self, tokens: Sequence[int]) -> str:
        model, _ = self._require_running()
        return await self._run_in_pool(detokenize, model, tokens, pool=self.tokenize_pool)

    async def embed(self, inputs: Sequence[Input]) -> Sequence[Embedding]:
        _, embedder = self._require_running()
        job = embedder.submit(await self._run_in_pool(embedder.read, inputs))
        try:
            return await job.future
        finally:
            embedder.cancel(job)

    def _require_running(self) -> tuple[LlamaModel, Embedder]:
        if self.model is None or self.embedder is None:
            raise EngineFailed("the engine is not running")
        return self.model, self.embedder

    def _require_loaded(self) -> _Loaded:
        self._require_running()
        if self.loaded is None:
            raise NotSupported("this model creates embeddings and cannot generate text")
        return self.loaded

    async def _run_in_pool(self, function: Callable[..., T], *arguments: object, pool: Executor | None = None) -> T:
        return await asyncio.get_running_loop().run_in_executor(pool or self.prompt_pool, function, *arguments)

    def _free(self, model: LlamaModel | None, loaded: _Loaded | None, embedder: Embedder | None) -> None:
        for pool in (self.prompt_pool, self.check_pool, self.tokenize_pool):
            pool.shutdown(wait=True)
        for runner in () if loaded is None else loaded.runners:
            runner.join()
            runner.context.close()
            if runner.drafted:
                log.info("%d of %d drafted tokens were accepted", runner.accepted, runner.drafted)
        if embedder is not None:
            embedder.join()
        self.compute_thread.close()
        if model is not None:
            model.close()


def _load(
    options: LlamaOptions,
    loop: asyncio.AbstractEventLoop,
    compute_thread: ComputeThread,
    progress: Callable[[float], None],
) -> tuple[LlamaModel, _Loaded | None, Embedder]:
    path = Path(options.path).expanduser()
    if not path.is_file():
        raise ConfigError(f"llama: there is no model file at {path}")
    path, threads = _find_tuned(path, options)
    with contextlib.ExitStack() as stack:
        model = LlamaModel(path, progress)
        stack.callback(model.close)
        _check_kind(model, options)
        if model.is_bidirectional:
            embedder = _bidirectional_embedder(model, options, threads, compute_thread)
            stack.pop_all()
            return model, None, embedder
        size = fit_context(model, options)
        runners = _create_runners(model, options, size, threads, loop, compute_thread, stack)
        loaded = _create_loaded(model, options, size.length, runners)
        length = loaded.request_builder.context
        embedder = Embedder(
            model,
            partial(_embedding_context, model, length, options.batch, threads),
            length=length,
            sequences=EMBEDDING_SEQUENCES,
            rows=options.batch,
            compute_thread=compute_thread,
            is_generating=lambda: any(not runner.scheduler.idle for runner in runners),
        )
        stack.pop_all()
        return model, loaded, embedder


def _find_tuned(path: Path, options: LlamaOptions) -> tuple[Path, int]:
    """Return the file and the number of threads that `dragoman tune` recorded, or the defaults."""
    record = None if options.layout == "as-is" else read_record(path)
    if record is None:
        return path, options.threads or hardware.threads()
    threads = options.threads or record.chosen.threads
    log.info("tuned by `dragoman tune`: %s, %d threads", record.file, threads)
    return record.file, threads


def _check_kind(model: LlamaModel, options: LlamaOptions) -> None:
    path, description = options.path, model.description
    if not model.is_decoder:
        raise ConfigError(f"llama: {path} does not generate text token by token ({description})")
    if model.is_bidirectional and model.is_reranker:
        raise ConfigError(f"llama: {path} is a reranking model ({description}); use an embedding model to rank")
    if model.is_bidirectional and options.adapters:
        raise ConfigError(f"llama: {path} is an embedding model ({description}), which cannot have adapters")


def _create_runners(
    model: LlamaModel,
    options: LlamaOptions,
    size: ContextSize,
    threads: int,
    loop: asyncio.AbstractEventLoop,
    compute_thread: ComputeThread,
    stack: contextlib.ExitStack,
) -> list[Runner]:
    """Return one runner for the model itself, then one for each adapter."""
    adapters = [None, *(load_adapter(model, name, entry) for name, entry in options.adapters.items())]
    schedule = partial(
        Scheduler,
        size.slots,
        size.cached,
        sharing=not model.is_recurrent,
        isolate=options.isolate,
        clock=time.monotonic,
    )
    runners: list[Runner] = []
    for adapter in adapters:
        context = Context(
            model,
            sequences=size.sequences,
            length=size.length,
            rows=options.batch + options.slots,
            outputs=MAX_PROMPT_OUTPUTS + options.slots,
            threads=threads,
            flash_attention=options.flash_attention,
            kv=options.kv,
        )
        stack.callback(context.close)
        if adapter is not None:
            context.adapt(*adapter)
        compute_thread.run(_warm_up, context, min(options.batch, LEAST_CHUNK_ALONE, size.length))
        gap, long_steps = options.gap_ms / 1000, options.flash_attention
        runners.append(
            Runner(
                context,
                loop,
                schedule,
                batch=options.batch,
                gap=gap,
                long_steps=long_steps,
                compute_thread=compute_thread,
            )
        )
    for runner in runners:
        runner.neighbours = [other for other in runners if other is not runner]
    return runners


def _create_loaded(model: LlamaModel, options: LlamaOptions, length: int, runners: Sequence[Runner]) -> _Loaded:
    runner, *others = runners
    syntax = get_format(options.format or detect_format(model.chat_template, model.metadata.get("general.name", "")))
    speculation = options.speculation and not model.is_recurrent
    context = min(length, runner.context.length)
    builder = LlamaRequestBuilder(model, context, syntax, options.template_options, speculation=speculation)
    capacity = options.slots * context * len(runners)
    return _Loaded(builder, runner, dict(zip(options.adapters, others, strict=True)), capacity)


def _bidirectional_embedder(
    model: LlamaModel, options: LlamaOptions, threads: int, compute_thread: ComputeThread
) -> Embedder:
    length = min(options.context or MAX_DEFAULT_EMBEDDING_TOKENS, model.trained_context)
    rows = max(length, min(options.batch, MAX_DEFAULT_EMBEDDING_TOKENS))
    embedder = Embedder(
        model,
        partial(_embedding_context, model, rows, rows, threads),
        length=length,
        sequences=EMBEDDING_SEQUENCES,
        rows=rows,
        compute_thread=compute_thread,
    )
    try:
        compute_thread.run(embedder.prepare)
    except EngineFailed as error:
        embedder.join()
        raise ConfigError(f"llama: the model loads, but {error}") from error
    return embedder


def _embedding_context(model: LlamaModel, length: int, rows: int, threads: int) -> Context:
    sequences = EMBEDDING_SEQUENCES
    return Context(model, sequences=sequences, length=length, rows=rows, outputs=rows, threads=threads, vectors=True)


def _check_reply(generation: Generation, finished: Finished) -> Finished:
    """Add a warning if the reply violates keywords that could not be enforced."""
    guide, checks = generation.guide, generation.params.checks
    if guide is None or finished.reason == "length":
        return finished
    return msgspec.structs.replace(finished, warnings=(*finished.warnings, *find_violations(checks, guide.captures())))


def _warm_up(context: Context, rows: int) -> None:
    """Load the weights into memory before the first request, and check that the model runs."""
    code = context.decode([0] * rows, range(rows), [0] * rows, [False] * (rows - 1) + [True])
    if code:
        raise ConfigError(f"llama: the model loads, but llama.cpp cannot run it (code {code})")
    context.clear_all()
