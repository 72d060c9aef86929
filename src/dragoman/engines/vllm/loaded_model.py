"""A model that vLLM has loaded: takes requests and passes the outputs of each step on to them.

Rules
1. vLLM's own output processing is bypassed: the messages of its engine process are read directly.
2. When the engine process dies, all its requests fail at once.
3. An error of vLLM, or in processing its output, fails only the request it belongs to.
4. An error in processing a whole step is handled like the death of the process.
"""

import asyncio
import itertools
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from dragoman.core.engine import Engine
from dragoman.core.errors import BadRequest, DragomanError, EngineDied, EngineFailed, engine_failure
from dragoman.core.events import Event
from dragoman.engines.vllm.generation import PendingEmbedding, VllmGeneration
from dragoman.engines.vllm.vllm_api import StepOutput, VllmApi
from dragoman.engines.vllm.vocabulary import HfVocabulary

log = logging.getLogger("dragoman.engine")

WATCH_SECONDS = 0.2


class LoadedModel:
    def __init__(self, engine: Engine, api: VllmApi, llm: Any, vocabulary: HfVocabulary) -> None:
        self.api = api
        self.llm = llm
        self.vocabulary = vocabulary
        self.context: int = llm.model_config.max_model_len
        self.tasks: tuple[str, ...] = ()
        """What the model supports, as vLLM reports it."""
        self.pending: dict[str, VllmGeneration | PendingEmbedding] = {}
        """Requests by vLLM's request id."""
        self.is_running = True
        self._engine = engine
        self._ids = itertools.count()
        self._background: set[asyncio.Task[None]] = set()
        self._death: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Resolves to the reason when vLLM's engine process dies."""
        # vLLM starts its own reader unless this is set.
        llm.output_handler = self._create_task(self._read_steps(llm.engine_core))
        self._create_task(self._watch_process(llm.engine_core))

    async def run_unless_dead(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Await a coroutine, and raise if the engine process dies, which may leave the coroutine waiting forever."""
        task = asyncio.get_running_loop().create_task(coroutine)
        try:
            await asyncio.wait((task, self._death), return_when=asyncio.FIRST_COMPLETED)
            if self._death.done():
                raise EngineFailed(self._death.result())
            task.result()
        finally:
            task.cancel()

    async def close(self) -> None:
        self.is_running = False
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        await asyncio.to_thread(self.llm.shutdown)

    def build_request(
        self,
        tokens: Sequence[int],
        make_params: Callable[[], Any],
        *,
        param: str | None = None,
        cache_salt: str | None = None,
        lora: Any = None,
        priority: int = 0,
    ) -> Any:
        """Return a request that vLLM has validated. Runs in threads, not the event loop."""
        try:
            return self.llm.input_processor.process_inputs(
                str(next(self._ids)),
                self.api.tokens_input(list(tokens), cache_salt=cache_salt),
                make_params(),
                supported_tasks=self.tasks,
                lora_request=lora,
                priority=priority,
            )
        except self.api.request_errors as error:
            raise BadRequest(str(error), param=param or getattr(error, "parameter", None)) from error

    async def submit(self, entry: VllmGeneration | PendingEmbedding) -> None:
        if not self.is_running:
            raise EngineFailed("the engine is not running")
        if entry.is_dropped:
            return
        self.pending[entry.request.request_id] = entry
        await self.llm.engine_core.add_request_async(entry.request)

    def drop(self, entry: VllmGeneration | PendingEmbedding) -> None:
        """Cancel a request. Does nothing if it has ended."""
        entry.is_dropped = True
        self._abort(entry)

    def _abort(self, entry: VllmGeneration | PendingEmbedding) -> None:
        if self.pending.pop(entry.request.request_id, None) is not None and self.is_running:
            self._create_task(self.llm.engine_core.abort_requests_async([entry.request.request_id]))

    async def _read_steps(self, core: Any) -> None:
        while True:
            try:
                step = await core.get_output_async()
                if step.scheduler_stats is not None:
                    self._engine.kv_used = step.scheduler_stats.kv_cache_usage
                self.process_step(step.outputs)
            except Exception as error:
                # Without a reader, all requests would wait until they time out.
                log.exception("vLLM's engine process has died, or its output could not be processed")
                self._fail_all(str(error))
                return

    def process_step(self, outputs: Sequence[StepOutput]) -> None:
        pending = self.pending
        for output in outputs:
            entry = pending.get(output.request_id)
            if isinstance(entry, VllmGeneration):
                self._process_output(entry, output)
            elif entry is not None and output.finish_reason is not None:
                del pending[output.request_id]
                entry.resolve(output)

    def _process_output(self, generation: VllmGeneration, output: StepOutput) -> None:
        try:
            events = generation.process(output)
            if generation.closing_tokens:
                events += self._close_thought(generation)
        except Exception as error:  # noqa: BLE001 (reported to the client and the log; other requests continue)
            self._fail(generation, error)
            return
        generation.events.put(events)
        if generation.has_ended:
            if generation.needs_abort:
                self._abort(generation)
            self.pending.pop(output.request_id, None)
            generation.events.end()

    def _close_thought(self, generation: VllmGeneration) -> tuple[Event, ...]:
        """Abort the vLLM request and resume it after the tokens that close the reasoning."""
        self._abort(generation)
        events = generation.close_thought()
        if not generation.has_ended:
            generation.resume(str(next(self._ids)))
            self._create_task(self.submit(generation), generation)
        return events

    def _fail(self, generation: VllmGeneration, error: BaseException) -> None:
        if not isinstance(error, DragomanError):
            log.error("a request failed", exc_info=error)
            error = engine_failure(error)
        self.drop(generation)
        generation.fail(error)

    async def _watch_process(self, core: Any) -> None:
        """Detect the death of the engine process. vLLM's own calls fail only after its cleanup."""
        while not core.resources.engine_dead:  # noqa: ASYNC110 (a thread of vLLM sets it)
            await asyncio.sleep(WATCH_SECONDS)
        self._fail_all("vLLM's engine process has died")

    def _fail_all(self, reason: str) -> None:
        if not self.is_running:
            return
        self.is_running = False
        self._death.set_result(reason)
        for entry in self.pending.values():
            entry.fail(EngineDied(reason))
        self.pending.clear()
        if self._engine.on_death is not None:
            self._engine.on_death(reason)

    def _create_task(
        self, coroutine: Coroutine[Any, Any, None], generation: VllmGeneration | None = None
    ) -> asyncio.Task[None]:
        """Run a background task. An exception fails the given generation."""

        def on_done(task: asyncio.Task[None]) -> None:
            self._background.discard(task)
            error = None if task.cancelled() else task.exception()
            if error is not None and generation is not None:
                self._fail(generation, error)
            elif error is not None:
                log.error("a call to vLLM failed", exc_info=error)

        task = asyncio.get_running_loop().create_task(coroutine)
        self._background.add(task)
        task.add_done_callback(on_done)
        return task
