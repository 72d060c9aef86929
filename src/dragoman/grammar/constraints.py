"""Compiles the constraints of requests: tried in another process, then compiled in this one and cached.

    request -> job -> cached? -> semaphore -> trial -> compile -> guide

Rules
1. This process does not interpret a caller's schema, expression or grammar before it has passed its trial.
2. A cached result needs no semaphore and no trial.
3. A caller holds the semaphore at most `MAX_PER_CALLER` times, and waiting callers are served in rotation, so one
   caller cannot block the others. It is held until the compiling thread has ended, even if the request is cancelled.
"""

import asyncio
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from dragoman.core.errors import ENCODE_ERRORS, InvalidSchema, error_class
from dragoman.core.fair_semaphore import FairSemaphore
from dragoman.core.request import GenerationRequest
from dragoman.grammar.lru_cache import LruCache
from dragoman.grammar.masks import GrammarCache, Guide, build_tokenizer
from dragoman.grammar.reply_grammar import Beginning, GrammarModel, ReplyGrammar, constraint_param
from dragoman.grammar.trial_client import TrialClient
from dragoman.grammar.trial_server import CPU_SECONDS, MEMORY_BYTES, TrialJob, TrialModel, TrialOutcome

MAX_CONCURRENT = 4
"""Concurrent trials and compilations."""
MAX_PER_CALLER = min(2, (os.cpu_count() or 1) // 2) or 1
"""A caller takes at most half of the processors."""
MAX_CACHED = 256
MAX_BYTES = 16 * 1024 * 1024
"""Of all cached grammars together with their jobs."""
MAX_JOB = 4 * 1024 * 1024
"""Bytes of all schemas of a request."""

TOO_COMPLEX = f"too complex: compiling takes more than {CPU_SECONDS:g} s or {MEMORY_BYTES >> 20} MB; simplify it"


class CompiledConstraint(msgspec.Struct, frozen=True):
    """The grammar of a reply, and the guide that enforces it."""

    shape: ReplyGrammar
    guide: Guide


class ConstraintCompiler:
    """Compiles and caches the constraints of one model. Not thread-safe: use it in one event loop."""

    def __init__(
        self,
        model: GrammarModel,
        pieces: Sequence[bytes],
        control: frozenset[int],
        tokenize: Callable[[str], Sequence[int]],
    ) -> None:
        self.grammars = GrammarCache(build_tokenizer(pieces, control, model.ends, tokenize))
        self.trials = TrialClient(lambda: TrialModel(tuple(pieces), control, model))
        self._results: LruCache[TrialOutcome] = LruCache(MAX_CACHED, MAX_BYTES)
        self._semaphore = FairSemaphore(MAX_CONCURRENT, MAX_PER_CALLER)
        self._threads = ThreadPoolExecutor(MAX_CONCURRENT, thread_name_prefix="dragoman-compile")

    async def constrain(
        self, request: GenerationRequest, *, thinks: bool, begins: Beginning
    ) -> CompiledConstraint | None:
        """Return the compiled constraint of a request. None if the reply is unrestricted."""
        param = constraint_param(request)
        job = _encode_job(TrialJob.of(request, thinks=thinks, begins=begins), param)
        result = self._results.get(job)
        if result is not None:
            if result.shape is None:
                return None
            guide = self.grammars.find(result.shape.grammar, param)
            if guide is not None:
                return CompiledConstraint(result.shape, guide)
        async with self._semaphore.acquire(request.principal):
            # Another request with the same job may have been tried meanwhile.
            result = self._results.get(job) or await self._run_trial(job, param, request.principal)
            return None if result.shape is None else await self._compile(result.shape, result.memory)

    def skip(self, guide: Guide, text: str) -> bool:
        """Advance by a text that the reply continues. False if the text cannot begin the reply."""
        return guide.skip(self.grammars.tokenizer.tokenize_str(text))

    async def close(self) -> None:
        await self.trials.close()
        await asyncio.to_thread(self._threads.shutdown)

    async def _run_trial(self, job: bytes, param: str, caller: str) -> TrialOutcome:
        outcome = await self.trials.run(job, caller)
        if outcome is None:
            raise InvalidSchema(f"{param}: {TOO_COMPLEX}", param=param)
        if outcome.failure is not None:
            name, message, failed_param = outcome.failure
            raise error_class(name)(message, param=failed_param)
        self._results.put(job, outcome, 0 if outcome.shape is None else len(outcome.shape.grammar))
        return outcome

    async def _compile(self, shape: ReplyGrammar, memory: int) -> CompiledConstraint:
        loop = asyncio.get_running_loop()
        compiling = loop.run_in_executor(self._threads, self.grammars.create_guide, shape.grammar, shape.param, memory)
        try:
            return CompiledConstraint(shape, await asyncio.shield(compiling))
        except asyncio.CancelledError:
            # Native code cannot be interrupted. It takes no longer than the trial did.
            await asyncio.wait((compiling,))
            raise


def _encode_job(job: TrialJob, param: str) -> bytes:
    try:
        encoded = msgspec.msgpack.encode(job)
    except ENCODE_ERRORS as error:
        raise InvalidSchema(f"{param}: cannot be encoded: {error}", param=param) from error
    if len(encoded) > MAX_JOB:
        message = f"the schemas of the request have {len(encoded)} bytes in total; at most {MAX_JOB} are allowed"
        raise InvalidSchema(f"{param}: {message}", param=param)
    return encoded
