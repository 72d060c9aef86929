"""vLLM's asynchronous engine behind ours: prompts go in as tokens, and every step comes out as one list of events.

Rules
1. vLLM's own output path is not used: what its engine process sends after a step is read here as it is.
2. Where the engine process dies, so does everything that it worked on; whoever receives the steps is told at once. One
   that dies before it has begun to serve has not started.
3. What vLLM refuses, and what cannot be made of its outputs, fails the request that it belongs to, and no other.
4. Steps are read as long as the engine runs. What goes wrong with a whole one is its end, as that of the process is.
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
from dragoman.core.engine import ModelInfo, Rendered
from dragoman.core.errors import ConfigError, DragomanError, EngineFailed, NotSupported
from dragoman.core.events import Event, Finished
from dragoman.core.request import GenerationRequest
from dragoman.engines import prompt_reader
from dragoman.engines.step_delivery import Portion, SteppingEngine
from dragoman.engines.vllm import vllm_api as vllm
from dragoman.engines.vllm.captured_stderr import Overheard, overhearing, refers
from dragoman.engines.vllm.embedder import Pooled, Texts
from dragoman.engines.vllm.error_text import last_line, refusal
from dragoman.engines.vllm.generation import Work
from dragoman.engines.vllm.options import VllmOptions, adapter_folders, arguments, check_names
from dragoman.engines.vllm.preflight import mistakes
from dragoman.engines.vllm.request_builder import Intake
from dragoman.engines.vllm.vocabulary import Tokens
from dragoman.formats import detect, named
from dragoman.grammar.schema_check import warnings
from dragoman.pipeline.event_stream import failed

log = logging.getLogger("dragoman.engine")
T = TypeVar("T")

WATCH_SECONDS = 0.2
MOST_READERS = 4
NO_MEMORY = re.compile(r"out of memory|OutOfMemory", re.IGNORECASE)
"""Where another try may find more of it."""

VECTOR_FEATURES = frozenset({"embeddings", "tokenize"})
FEATURES = frozenset(
    {
        *("chat", "completion", "token_prompt", "token_ids", "logprobs", "prompt_logprobs", "tokenize"),
        *("temperature", "top_p", "top_k", "min_p", "seed", "logit_bias"),
        *("repetition_penalty", "presence_penalty", "frequency_penalty"),
        *("stop_token_ids", "ignore_eos", "max_tokens", "usage"),
        *("tools", "thinking", "documents", "render", "template_options"),
    }
)
SHAPE_FEATURES = frozenset({"strict_tools", "constraint"})


class VllmEngine(SteppingEngine):
    Options = VllmOptions
    takes_folder = True

    def __init__(self, name: str, options: VllmOptions) -> None:
        super().__init__()
        self.name = name
        self.options = options
        self.slots = options.slots
        self.parts: vllm.Parts | None = None
        self.llm: vllm.Llm | None = None
        self.model: Tokens | None = None
        self.intake: Intake | None = None
        self.texts: Texts | None = None
        self.context: int | None = options.context
        self.live: dict[str, Work | Pooled] = {}
        """By the id under which vLLM answers."""
        self.works: dict[int, Work] = {}
        """By our key."""
        self.tasks: set[asyncio.Task[None]] = set()
        self.lost: asyncio.Future[str]
        """Why vLLM's process is gone, once it is."""
        self.readers = ThreadPoolExecutor(_readers(), thread_name_prefix="dragoman-prompt")
        # Nobody's generation waits for answers to questions about prompts and tokens.
        self.tellers = ThreadPoolExecutor(2, thread_name_prefix="dragoman-tell")
        # Checking a reply against keywords that were not enforced may take half a second.
        self.checkers = ThreadPoolExecutor(2, thread_name_prefix="dragoman-check")

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
        return [*missing, *mistakes(options)]

    @classmethod
    def is_installed(cls) -> bool:
        return vllm.is_installed()

    def models(self) -> Sequence[ModelInfo]:
        form = self.options.format or "plain" if self.intake is None else self.intake.format.name
        return [ModelInfo(name, context=self.context, format=form) for name in (self.name, *self.options.adapters)]

    def supports(self) -> frozenset[str]:
        if self.texts is not None:
            return VECTOR_FEATURES
        if self.model is None:
            return FEATURES | SHAPE_FEATURES
        shapes = frozenset() if self.model.kind is None else SHAPE_FEATURES
        return FEATURES | shapes | (frozenset() if self.model.infill is None else {"infill"})

    # Its beginning and its end.

    async def start(self) -> None:
        parts, llm, model = await asyncio.to_thread(_load, self.options)
        core = llm.engine_core
        self.lost = asyncio.get_running_loop().create_future()
        self.parts, self.llm, self.model = parts, llm, model
        self.device, self.context = parts.device, llm.model_config.max_model_len
        # Where there is one, vLLM starts no reader of its own.
        llm.output_handler = self._keep(self._follow(core))
        self._keep(self._watch(core))
        await self._unless_lost(self._prepare(parts, llm, model))
        # What is there by now stays: looking through it for garbage, again and again, would stop every stream.
        gc.collect()
        gc.freeze()
        log.info("model %s: vllm %s on %s, context %s", self.name, parts.version, self.device, self.context)

    async def _prepare(self, parts: vllm.Parts, llm: vllm.Llm, model: Tokens) -> None:
        core, config = llm.engine_core, llm.model_config
        tasks = await core.get_supported_tasks_async()
        if config.runner_type == "pooling":
            if "embed" not in tasks:
                raise ConfigError(f"vllm: {self.options.path} makes no vectors; it can do: {', '.join(tasks)}")
            self.texts = Texts(parts, llm.input_processor, tasks, model, config.max_model_len)
        else:
            loras = await self._loras(parts, core)
            self.intake = await asyncio.to_thread(_intake, self.options, parts, llm, model, tasks, loras)

    async def _unless_lost(self, doing: Coroutine[Any, Any, None]) -> None:
        """Its process may die before anybody is there to be told, and leave those who wait for it without an answer."""
        task = asyncio.get_running_loop().create_task(doing)
        try:
            await asyncio.wait((task, self.lost), return_when=asyncio.FIRST_COMPLETED)
            if self.lost.done():
                raise EngineFailed(self.lost.result())
            task.result()
        finally:
            task.cancel()

    async def _loras(self, parts: vllm.Parts, core: vllm.Core) -> dict[str, Any]:
        loras = {}
        for number, (name, folder) in enumerate(adapter_folders(self.options).items(), 1):
            lora = parts.lora(lora_name=name, lora_int_id=number, lora_path=str(folder))
            try:
                await core.add_lora_async(lora)
            except Exception as error:
                words = f"the adapter {name} cannot be used: {last_line(error)}"
                # vLLM tells what happened in its process in words alone; of what class it was they do not say.
                if core.resources.engine_dead or NO_MEMORY.search(str(error)):
                    raise EngineFailed(words) from error
                raise ConfigError(f"vllm: {words}") from error
            loras[name] = lora
        return loras

    async def stop(self) -> None:
        llm, self.llm = self.llm, None
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        if llm is not None:
            await asyncio.to_thread(llm.shutdown)
        if self.intake is not None and self.intake.constraints is not None:
            await self.intake.constraints.close()
        for pool in (self.readers, self.tellers, self.checkers):
            pool.shutdown(wait=False)

    # Requests.

    async def begin(self, key: int, request: GenerationRequest) -> None:
        intake = self._writing()
        if intake.is_shaped(request):
            read = await self._aside(intake.read, request)
            constrained = await intake.constrain(request, read)
            work = await self._aside(intake.work, key, request, read, constrained)
        else:
            work = await self._aside(intake.read_work, key, request)
        self.works[key] = work
        try:
            await self._submit(work)
        except BaseException:
            # Nobody else knows of it.
            self.drop(key)
            raise

    def drop(self, key: int) -> None:
        work = self.works.pop(key, None)
        if work is not None:
            self._abort(work)

    async def embed(self, inputs: Sequence[Input]) -> Sequence[Embedding]:
        if self.texts is None:
            self._writing()
            raise NotSupported("this model writes text; vectors need a model with `args: {runner: pooling}`")
        requests = await self._aside(self.texts.read, inputs)
        loop = asyncio.get_running_loop()
        pooled = [Pooled(request, loop.create_future()) for request in requests]
        try:
            for entry in pooled:
                await self._submit(entry)
            return await asyncio.gather(*(entry.future for entry in pooled))
        finally:
            for entry in pooled:
                self._abort(entry)

    async def render(self, request: GenerationRequest) -> Rendered:
        return await self._aside(self._writing().render, request, pool=self.tellers)

    async def tokenize(self, text: str, special: bool) -> Sequence[int]:
        return await self._aside(prompt_reader.tokenize, self._running(), text, special, pool=self.tellers)

    async def detokenize(self, tokens: Sequence[int]) -> str:
        return await self._aside(prompt_reader.detokenize, self._running(), tokens, pool=self.tellers)

    def _running(self) -> Tokens:
        if self.model is None or self.llm is None:
            raise EngineFailed("the engine is not running")
        return self.model

    def _writing(self) -> Intake:
        self._running()
        if self.intake is None:
            raise NotSupported("this model makes vectors, not text")
        return self.intake

    async def _aside(self, function: Callable[..., T], *arguments: object, pool: Executor | None = None) -> T:
        return await asyncio.get_running_loop().run_in_executor(pool or self.readers, function, *arguments)

    async def _submit(self, entry: Work | Pooled) -> None:
        if self.llm is None:
            raise EngineFailed("the engine is not running")
        if isinstance(entry, Work) and entry.key not in self.works:
            # Dropped in the meantime.
            return
        self.live[entry.request.request_id] = entry
        await self.llm.engine_core.add_request_async(entry.request)

    def _abort(self, entry: Work | Pooled) -> None:
        """vLLM need not go on with it. One that has ended may be aborted too."""
        if self.live.pop(entry.request.request_id, None) is not None and self.llm is not None:
            self._keep(self.llm.engine_core.abort_requests_async([entry.request.request_id]))

    # Steps.

    async def _follow(self, core: vllm.Core) -> None:
        while True:
            try:
                step = await core.get_output_async()
            except Exception as error:
                log.exception("vLLM's engine process has died")
                self._lose(str(error))
                return
            if step.scheduler_stats is not None:
                self.kv_used = step.scheduler_stats.kv_cache_usage
            try:
                self._take(step.outputs)
            except Exception as error:
                # Unread, all that comes later would be waited for until somebody loses patience.
                log.exception("a step of vLLM's could not be handed on")
                self._lose(str(error))
                return

    def _take(self, outputs: Sequence[vllm.Output]) -> None:
        """A whole step, in one call."""
        live, portions = self.live, []
        for output in outputs:
            entry = live.get(output.request_id)
            if entry is None:
                continue
            if isinstance(entry, Work):
                portion = self._portion(entry, output)
                if portion is not None:
                    portions.append(portion)
            elif output.finish_reason is not None:
                del live[output.request_id]
                entry.take(output)
        if portions:
            self.receiver.take(portions)

    def _portion(self, work: Work, output: vllm.Output) -> Portion | None:
        try:
            events = work.take(output)
            if work.closing:
                events = (*events, *self._close_thought(work))
        except Exception as error:  # noqa: BLE001 (told to whoever asked, and to the log; the others of the step go on)
            return self._failed(work, error)
        if not work.ended:
            return Portion(work.key, events)
        if work.given_up:
            self._abort(work)
        if work.bearings.checks and work.guide is not None:
            self.live.pop(work.request.request_id, None)
            self._keep(self._checked(work, events), work)
            return None
        self._forget(work)
        return Portion(work.key, events, ended=True)

    def _failed(self, work: Work, error: BaseException) -> Portion:
        if not isinstance(error, DragomanError):
            log.error("a request failed", exc_info=error)
            error = failed(error)
        self._abort(work)
        self._forget(work)
        return Portion(work.key, ended=True, error=error)

    def _forget(self, work: Work) -> None:
        self.live.pop(work.request.request_id, None)
        self.works.pop(work.key, None)

    def _close_thought(self, work: Work) -> list[Event]:
        """Give up what vLLM works on, and go on behind the tokens that close the thought."""
        self._abort(work)
        events = work.close_thought()
        if not work.ended:
            work.request = self._writing().resumed(work)
            self._keep(self._submit(work), work)
        return events

    async def _checked(self, work: Work, events: tuple[Event, ...]) -> None:
        """The end of a reply, with a warning where it does not fit what could not be enforced."""
        *before, finished = events
        if isinstance(finished, Finished) and finished.reason != "length" and work.guide is not None:
            found = await self._aside(warnings, work.bearings.checks, work.guide.captures(), pool=self.checkers)
            finished = msgspec.structs.replace(finished, warnings=(*finished.warnings, *found))
        if self.works.pop(work.key, None) is not None:
            self.receiver.take([Portion(work.key, (*before, finished), ended=True)])

    async def _watch(self, core: vllm.Core) -> None:
        """vLLM notices at once when its process dies, and tells those who wait only after it has cleaned up."""
        while not core.resources.engine_dead:  # noqa: ASYNC110 (a thread of vLLM's sets it)
            await asyncio.sleep(WATCH_SECONDS)
        self._lose("vLLM's engine process has died")

    def _lose(self, reason: str) -> None:
        if self.llm is None:
            return
        self.llm = None
        self.lost.set_result(reason)
        for entry in self.live.values():
            if isinstance(entry, Pooled) and not entry.future.done():
                entry.future.set_exception(EngineFailed(reason))
        self.live.clear()
        self.works.clear()
        self.receiver.lose(reason)

    def _keep(self, doing: Coroutine[Any, Any, None], of: Work | None = None) -> asyncio.Task[None]:
        """`of`: whose it is, and who is told what goes wrong with it."""
        task = asyncio.get_running_loop().create_task(doing)
        self.tasks.add(task)
        task.add_done_callback(lambda task: self._done(task, of))
        return task

    def _done(self, task: asyncio.Task[None], of: Work | None) -> None:
        self.tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is None:
            return
        if of is None:
            log.error("vLLM could not be told", exc_info=error)
        elif of.key in self.works:
            self.receiver.take([self._failed(of, error)])


def _readers() -> int:
    """Making tokens needs no lock of Python's, rendering does: more threads than these would only wait for it."""
    return max(2, min(MOST_READERS, os.cpu_count() or 1))


def _load(options: VllmOptions) -> tuple[vllm.Parts, vllm.Llm, Tokens]:
    found = [f"{key}: {words}" for key, words in mistakes(options)]
    if found:
        raise ConfigError(f"vllm: {'; '.join(found)}")
    parts = vllm.parts()
    check_names(options, parts.arguments)
    try:
        args = parts.engine_args(**arguments(options))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"vllm: {refusal(error, options)}") from error
    try:
        with overhearing() as overheard:
            llm = parts.load(args)
    except (TypeError, ValueError, OSError) as error:
        raise ConfigError(f"vllm: {options.path}: {refusal(error, options)}") from error
    except RuntimeError as error:
        raise ConfigError(f"vllm: {options.path}: {_reason(error, overheard)}") from error
    config = llm.model_config
    try:
        return parts, llm, Tokens(llm.tokenizer, config.get_vocab_size(), vllm.end_tokens(config))
    except (AttributeError, msgspec.MsgspecError) as error:
        llm.shutdown()
        words = "its tokenizer is not one of Hugging Face's fast ones"
        raise ConfigError(f"vllm: {options.path} cannot be used: {words} ({refusal(error, options)})") from error


def _intake(
    options: VllmOptions,
    parts: vllm.Parts,
    llm: vllm.Llm,
    model: Tokens,
    tasks: Sequence[str],
    loras: Mapping[str, Any],
) -> Intake:
    syntax = named(options.format or detect(model.chat_template, Path(options.path).name))
    return Intake(
        parts,
        llm.input_processor,
        tasks,
        model,
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
