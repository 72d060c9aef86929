"""The engine that runs models in vLLM's asynchronous engine. Prompts go in as tokens; each step returns one event list.

Rules
1. vLLM's own output processing is bypassed: the messages of its engine process are read directly.
2. When the engine process dies, all its requests fail at once. If it dies before the engine is ready, the start fails.
3. An error of vLLM, or in processing its output, fails only the request it belongs to.
4. An error in processing a whole step is handled like the death of the process.
"""

import asyncio
import gc
import logging
import os
import re
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self, TypeVar

import msgspec

from dragoman.core.embeddings import Embedding, Input
from dragoman.core.engine import ModelInfo, RenderedPrompt
from dragoman.core.errors import ConfigError, DragomanError, EngineFailed, NotSupported
from dragoman.core.events import Event, Finished
from dragoman.core.request import GenerationRequest
from dragoman.engines import prompt_reader
from dragoman.engines.step_delivery import RequestUpdate, SteppingEngine
from dragoman.engines.vllm import vllm_api as vllm
from dragoman.engines.vllm.captured_stderr import Overheard, overhearing, refers
from dragoman.engines.vllm.config_errors import describe_error, find_errors, last_line
from dragoman.engines.vllm.embedder import EmbeddingRequestBuilder, PendingEmbedding
from dragoman.engines.vllm.generation import VllmGeneration
from dragoman.engines.vllm.options import VllmOptions, adapter_directories, build_engine_args, check_arg_names
from dragoman.engines.vllm.request_builder import VllmRequestBuilder
from dragoman.engines.vllm.vocabulary import HfVocabulary
from dragoman.formats import detect_format, get_format
from dragoman.grammar.schema_check import find_violations
from dragoman.pipeline.event_stream import engine_failure

log = logging.getLogger("dragoman.engine")
T = TypeVar("T")

WATCH_SECONDS = 0.2
MAX_PROMPT_THREADS = 4
OUT_OF_MEMORY = re.compile(r"out of memory|OutOfMemory", re.IGNORECASE)
"""A temporary failure: a later start may succeed."""

EMBEDDING_FEATURES = frozenset({"embeddings", "tokenize"})
FEATURES = frozenset(
    {
        *("chat", "completion", "token_prompt", "token_ids", "logprobs", "prompt_logprobs", "tokenize"),
        *("temperature", "top_p", "top_k", "min_p", "seed", "logit_bias"),
        *("repetition_penalty", "presence_penalty", "frequency_penalty"),
        *("stop_token_ids", "ignore_eos", "max_tokens", "usage"),
        *("tools", "thinking", "documents", "render", "template_options"),
    }
)
CONSTRAINT_FEATURES = frozenset({"strict_tools", "constraint"})


class VllmEngine(SteppingEngine):
    Options = VllmOptions
    loads_directory = True

    def __init__(self, name: str, options: VllmOptions) -> None:
        super().__init__()
        self.name = name
        self.options = options
        self.slots = options.slots
        self.context: int | None = options.context
        self._llm: vllm.Llm | None = None
        self._vocabulary: HfVocabulary | None = None
        self._builder: VllmRequestBuilder | None = None
        self._embedding_builder: EmbeddingRequestBuilder | None = None
        self._pending: dict[str, VllmGeneration | PendingEmbedding] = {}
        """Requests by vLLM's request id."""
        self._generations: dict[int, VllmGeneration] = {}
        """Generations by our key."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._death: asyncio.Future[str]
        """Resolves to the reason when vLLM's engine process dies."""
        # Tokenizing releases the GIL but rendering does not, so more threads would only wait for it.
        prompt_threads = max(2, min(MAX_PROMPT_THREADS, os.cpu_count() or 1))
        self._prompt_pool = ThreadPoolExecutor(prompt_threads, thread_name_prefix="dragoman-prompt")
        # Separate, so that generations do not wait for render and tokenize requests.
        self._query_pool = ThreadPoolExecutor(2, thread_name_prefix="dragoman-query")
        # Validating a reply against keywords that were not enforced may take half a second.
        self._check_pool = ThreadPoolExecutor(2, thread_name_prefix="dragoman-check")

    @classmethod
    def configured(cls, name: str, options: msgspec.Struct) -> Self:
        if not isinstance(options, VllmOptions):
            raise TypeError(f"the vllm engine takes VllmOptions, not {type(options).__name__}")
        return cls(name, options)

    @classmethod
    def needs_worker(cls, options: msgspec.Struct) -> bool:
        return True

    @classmethod
    def mistakes(cls, options: msgspec.Struct) -> Sequence[tuple[str, str]]:
        assert isinstance(options, VllmOptions)
        missing = [] if vllm.is_installed() else [("engine", vllm.NOT_INSTALLED)]
        return [*missing, *find_errors(options)]

    @classmethod
    def is_installed(cls) -> bool:
        return vllm.is_installed()

    def models(self) -> Sequence[ModelInfo]:
        syntax = self.options.format or "plain" if self._builder is None else self._builder.format.name
        return [ModelInfo(name, context=self.context, format=syntax) for name in (self.name, *self.options.adapters)]

    def supports(self) -> frozenset[str]:
        if self._embedding_builder is not None:
            return EMBEDDING_FEATURES
        if self._vocabulary is None:
            return FEATURES | CONSTRAINT_FEATURES
        constraints = frozenset() if self._vocabulary.kind is None else CONSTRAINT_FEATURES
        return FEATURES | constraints | (frozenset() if self._vocabulary.infill is None else {"infill"})

    # Start and stop

    async def start(self) -> None:
        api, llm, vocabulary = await asyncio.to_thread(_load, self.options)
        core = llm.engine_core
        self._death = asyncio.get_running_loop().create_future()
        self._llm, self._vocabulary = llm, vocabulary
        self.device, self.context = api.device, llm.model_config.max_model_len
        # vLLM starts its own reader unless this is set.
        llm.output_handler = self._create_task(self._read_steps(core))
        self._create_task(self._watch_process(core))
        await self._run_unless_dead(self._prepare(api, llm, vocabulary))
        # Exempt the loaded objects from garbage collection, which would pause all streams.
        gc.collect()
        gc.freeze()
        log.info("model %s: vllm %s on %s, context %s", self.name, api.version, self.device, self.context)

    async def _prepare(self, api: vllm.VllmApi, llm: vllm.Llm, vocabulary: HfVocabulary) -> None:
        core, config = llm.engine_core, llm.model_config
        tasks = await core.get_supported_tasks_async()
        if config.runner_type == "pooling":
            if "embed" not in tasks:
                message = f"{self.options.path} does not support embeddings, only: {', '.join(tasks)}"
                raise ConfigError(f"vllm: {message}")
            self._embedding_builder = EmbeddingRequestBuilder(
                api, llm.input_processor, tasks, vocabulary, config.max_model_len
            )
        else:
            loras = await self._load_adapters(api, core)
            self._builder = await asyncio.to_thread(_create_builder, self.options, api, llm, vocabulary, tasks, loras)

    async def _run_unless_dead(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Await a coroutine, and raise if the engine process dies, which may leave the coroutine waiting forever."""
        task = asyncio.get_running_loop().create_task(coroutine)
        try:
            await asyncio.wait((task, self._death), return_when=asyncio.FIRST_COMPLETED)
            if self._death.done():
                raise EngineFailed(self._death.result())
            task.result()
        finally:
            task.cancel()

    async def _load_adapters(self, api: vllm.VllmApi, core: vllm.EngineCore) -> dict[str, Any]:
        loras = {}
        for number, (name, directory) in enumerate(adapter_directories(self.options).items(), 1):
            lora = api.lora(lora_name=name, lora_int_id=number, lora_path=str(directory))
            try:
                await core.add_lora_async(lora)
            except Exception as error:
                message = f"adapter {name} cannot be loaded: {last_line(error)}"
                # Errors of the engine process arrive as text, without their class.
                if core.resources.engine_dead or OUT_OF_MEMORY.search(str(error)):
                    raise EngineFailed(message) from error
                raise ConfigError(f"vllm: {message}") from error
            loras[name] = lora
        return loras

    async def stop(self) -> None:
        llm, self._llm = self._llm, None
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if llm is not None:
            await asyncio.to_thread(llm.shutdown)
        if self._builder is not None and self._builder.constraints is not None:
            await self._builder.constraints.close()
        for pool in (self._prompt_pool, self._query_pool, self._check_pool):
            pool.shutdown(wait=False)

    # Requests

    async def begin(self, key: int, request: GenerationRequest) -> None:
        builder = self._require_builder()
        if builder.is_constrained(request):
            prompt = await self._run_in_pool(builder.read, request)
            constrained = await builder.constrain(request, prompt)
            generation = await self._run_in_pool(builder.build, key, request, prompt, constrained)
        else:
            generation = await self._run_in_pool(builder.read_and_build, key, request)
        self._generations[key] = generation
        try:
            await self._submit(generation)
        except BaseException:
            self.drop(key)
            raise

    def drop(self, key: int) -> None:
        generation = self._generations.pop(key, None)
        if generation is not None:
            self._abort(generation)

    async def embed(self, inputs: Sequence[Input]) -> Sequence[Embedding]:
        if self._embedding_builder is None:
            self._require_builder()
            raise NotSupported("this model generates text; embeddings need a model with `args: {runner: pooling}`")
        requests = await self._run_in_pool(self._embedding_builder.build, inputs)
        loop = asyncio.get_running_loop()
        entries = [PendingEmbedding(request, loop.create_future()) for request in requests]
        try:
            for entry in entries:
                await self._submit(entry)
            return await asyncio.gather(*(entry.future for entry in entries))
        finally:
            for entry in entries:
                self._abort(entry)

    async def render(self, request: GenerationRequest) -> RenderedPrompt:
        return await self._run_in_pool(self._require_builder().render, request, pool=self._query_pool)

    async def tokenize(self, text: str, special: bool) -> Sequence[int]:
        vocabulary = self._require_vocabulary()
        return await self._run_in_pool(prompt_reader.tokenize, vocabulary, text, special, pool=self._query_pool)

    async def detokenize(self, tokens: Sequence[int]) -> str:
        vocabulary = self._require_vocabulary()
        return await self._run_in_pool(prompt_reader.detokenize, vocabulary, tokens, pool=self._query_pool)

    def _require_vocabulary(self) -> HfVocabulary:
        if self._vocabulary is None or self._llm is None:
            raise EngineFailed("the engine is not running")
        return self._vocabulary

    def _require_builder(self) -> VllmRequestBuilder:
        self._require_vocabulary()
        if self._builder is None:
            raise NotSupported("this model supports only embeddings")
        return self._builder

    async def _run_in_pool(self, function: Callable[..., T], *arguments: object, pool: Executor | None = None) -> T:
        return await asyncio.get_running_loop().run_in_executor(pool or self._prompt_pool, function, *arguments)

    async def _submit(self, entry: VllmGeneration | PendingEmbedding) -> None:
        if self._llm is None:
            raise EngineFailed("the engine is not running")
        if isinstance(entry, VllmGeneration) and entry.key not in self._generations:
            # Cancelled in the meantime.
            return
        self._pending[entry.request.request_id] = entry
        await self._llm.engine_core.add_request_async(entry.request)

    def _abort(self, entry: VllmGeneration | PendingEmbedding) -> None:
        """Cancel a request in vLLM. Does nothing if it has ended."""
        if self._pending.pop(entry.request.request_id, None) is not None and self._llm is not None:
            self._create_task(self._llm.engine_core.abort_requests_async([entry.request.request_id]))

    # Steps

    async def _read_steps(self, core: vllm.EngineCore) -> None:
        while True:
            try:
                step = await core.get_output_async()
            except Exception as error:
                log.exception("vLLM's engine process has died")
                self._fail_all(str(error))
                return
            if step.scheduler_stats is not None:
                self.kv_used = step.scheduler_stats.kv_cache_usage
            try:
                self._process_step(step.outputs)
            except Exception as error:
                # Without a reader, all requests would wait until they time out.
                log.exception("a step of vLLM could not be processed")
                self._fail_all(str(error))
                return

    def _process_step(self, outputs: Sequence[vllm.StepOutput]) -> None:
        """Pass the results of a step to the receiver in one call."""
        pending, portions = self._pending, []
        for output in outputs:
            entry = pending.get(output.request_id)
            if entry is None:
                continue
            if isinstance(entry, VllmGeneration):
                portion = self._process_output(entry, output)
                if portion is not None:
                    portions.append(portion)
            elif output.finish_reason is not None:
                del pending[output.request_id]
                entry.resolve(output)
        if portions:
            self.receiver.take(portions)

    def _process_output(self, generation: VllmGeneration, output: vllm.StepOutput) -> RequestUpdate | None:
        try:
            events = generation.process(output)
            if generation.closing_tokens:
                events = (*events, *self._close_thought(generation))
        except Exception as error:  # noqa: BLE001 (reported to the client and the log; other requests continue)
            return self._fail(generation, error)
        if not generation.has_ended:
            return RequestUpdate(generation.key, events)
        if generation.needs_abort:
            self._abort(generation)
        if generation.settings.checks and generation.guide is not None:
            self._pending.pop(generation.request.request_id, None)
            self._create_task(self._finish_checked(generation, events), generation)
            return None
        self._remove(generation)
        return RequestUpdate(generation.key, events, ended=True)

    def _fail(self, generation: VllmGeneration, error: BaseException) -> RequestUpdate:
        if not isinstance(error, DragomanError):
            log.error("a request failed", exc_info=error)
            error = engine_failure(error)
        self._abort(generation)
        self._remove(generation)
        return RequestUpdate(generation.key, ended=True, error=error)

    def _remove(self, generation: VllmGeneration) -> None:
        self._pending.pop(generation.request.request_id, None)
        self._generations.pop(generation.key, None)

    def _close_thought(self, generation: VllmGeneration) -> list[Event]:
        """Abort the vLLM request and resume it after the tokens that close the reasoning."""
        self._abort(generation)
        events = generation.close_thought()
        if not generation.has_ended:
            generation.request = self._require_builder().resume(generation)
            self._create_task(self._submit(generation), generation)
        return events

    async def _finish_checked(self, generation: VllmGeneration, events: tuple[Event, ...]) -> None:
        """Deliver the end of a reply, with a warning if the reply violates keywords that were not enforced."""
        *before, finished = events
        if isinstance(finished, Finished) and finished.reason != "length" and generation.guide is not None:
            captures = generation.guide.captures()
            found = await self._run_in_pool(
                find_violations, generation.settings.checks, captures, pool=self._check_pool
            )
            finished = msgspec.structs.replace(finished, warnings=(*finished.warnings, *found))
        if self._generations.pop(generation.key, None) is not None:
            self.receiver.take([RequestUpdate(generation.key, (*before, finished), ended=True)])

    async def _watch_process(self, core: vllm.EngineCore) -> None:
        """Detect the death of the engine process. vLLM's own calls fail only after its cleanup."""
        while not core.resources.engine_dead:  # noqa: ASYNC110 (a thread of vLLM sets it)
            await asyncio.sleep(WATCH_SECONDS)
        self._fail_all("vLLM's engine process has died")

    def _fail_all(self, reason: str) -> None:
        if self._llm is None:
            return
        self._llm = None
        self._death.set_result(reason)
        for entry in self._pending.values():
            if isinstance(entry, PendingEmbedding) and not entry.future.done():
                entry.future.set_exception(EngineFailed(reason))
        self._pending.clear()
        self._generations.clear()
        self.receiver.lose(reason)

    def _create_task(
        self, coroutine: Coroutine[Any, Any, None], generation: VllmGeneration | None = None
    ) -> asyncio.Task[None]:
        """Run a background task. An exception fails the given generation."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(lambda task: self._on_task_done(task, generation))
        return task

    def _on_task_done(self, task: asyncio.Task[None], generation: VllmGeneration | None) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is None:
            return
        if generation is None:
            log.error("a call to vLLM failed", exc_info=error)
        elif generation.key in self._generations:
            self.receiver.take([self._fail(generation, error)])


def _load(options: VllmOptions) -> tuple[vllm.VllmApi, vllm.Llm, HfVocabulary]:
    errors = [f"{key}: {message}" for key, message in find_errors(options)]
    if errors:
        raise ConfigError(f"vllm: {'; '.join(errors)}")
    api = vllm.import_vllm()
    check_arg_names(options, api.arg_names)
    try:
        args = api.engine_args(**build_engine_args(options))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"vllm: {describe_error(error, options)}") from error
    try:
        with overhearing() as overheard:
            llm = api.load(args)
    except (TypeError, ValueError, OSError) as error:
        raise ConfigError(f"vllm: {options.path}: {describe_error(error, options)}") from error
    except RuntimeError as error:
        raise ConfigError(f"vllm: {options.path}: {_reason(error, overheard)}") from error
    config = llm.model_config
    try:
        return api, llm, HfVocabulary(llm.tokenizer, config.get_vocab_size(), vllm.end_tokens(config))
    except (AttributeError, msgspec.MsgspecError) as error:
        llm.shutdown()
        reason = f"its tokenizer is not a fast Hugging Face tokenizer ({describe_error(error, options)})"
        raise ConfigError(f"vllm: {options.path} cannot be used: {reason}") from error


def _create_builder(
    options: VllmOptions,
    api: vllm.VllmApi,
    llm: vllm.Llm,
    vocabulary: HfVocabulary,
    tasks: Sequence[str],
    loras: Mapping[str, Any],
) -> VllmRequestBuilder:
    syntax = get_format(options.format or detect_format(vocabulary.chat_template, Path(options.path).name))
    return VllmRequestBuilder(
        api,
        llm.input_processor,
        tasks,
        vocabulary,
        llm.model_config.max_model_len,
        syntax,
        options.template_options,
        defaults=vllm.generation_defaults(llm.model_config),
        loras=loras,
        isolate=options.isolate,
        strict_tools=options.strict_tools,
    )


def _reason(error: RuntimeError, overheard: Overheard) -> str:
    if refers(str(error)):
        overheard.wait()
        if overheard.reason is not None:
            return overheard.reason
    log.error("vLLM could not be loaded", exc_info=error)
    return last_line(error)
