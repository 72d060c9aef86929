"""Constraints on a model's replies: tried in another process, then compiled in this one and cached.

    request -> job -> cached? -> turn of the caller -> trial -> compile -> guide

Rules
1. This process does not interpret a caller's schema, expression or grammar before it has passed its trial.
2. A cached result needs no turn and no trial.
3. A caller has at most `MOST_PER_CALLER` turns at once, and waiting callers are served in rotation: one caller cannot
   block the others. A turn lasts until the compiling thread has ended, even if the request is cancelled.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from dragoman.core.errors import ENCODE_ERRORS, InvalidSchema, by_name
from dragoman.core.request import GenerationRequest
from dragoman.grammar.caller_turns import CallerTurns
from dragoman.grammar.lru_cache import Kept
from dragoman.grammar.masks import Grammars, Guide, vocabulary
from dragoman.grammar.reply_grammar import Shape, Speaker, blamed_field
from dragoman.grammar.trial import TrialJob, TrialModel
from dragoman.grammar.trial_client import TrialClient
from dragoman.grammar.trial_server import CPU_SECONDS, MEMORY_BYTES

MOST_TURNS = 4
"""Trials and compilations at the same time."""
MOST_PER_CALLER = 2
MOST_SHAPES = 256
MOST_BYTES = 16 * 1024 * 1024
"""Of all cached shapes together with their jobs."""
MOST_JOB = 4 * 1024 * 1024
"""Bytes of all schemas of a request together."""

TOO_COMPLEX = (
    f"this is too complex to be enforced: it takes more than {CPU_SECONDS:g} s or "
    f"{MEMORY_BYTES >> 20} MB to compile; simplify it"
)


class Constrained(msgspec.Struct, frozen=True):
    """The shape of a reply, and the guide that enforces it."""

    shape: Shape
    guide: Guide


class _Tried(msgspec.Struct, frozen=True):
    """The result of a passed trial. `shape` is None if the reply is unconstrained."""

    shape: Shape | None
    memory: int


class Constraints:
    """Use it in one event loop only."""

    def __init__(
        self,
        speaker: Speaker,
        pieces: Sequence[bytes],
        control: frozenset[int],
        tokenize: Callable[[str], Sequence[int]],
    ) -> None:
        self.grammars = Grammars(vocabulary(pieces, control, speaker.ends, tokenize))
        self.trials = TrialClient(lambda: TrialModel(tuple(pieces), control, speaker))
        self._tried: Kept[_Tried] = Kept(MOST_SHAPES, MOST_BYTES)
        self._turns = CallerTurns(MOST_TURNS, MOST_PER_CALLER)
        self._threads = ThreadPoolExecutor(MOST_TURNS, thread_name_prefix="dragoman-compile")

    async def constrain(self, request: GenerationRequest, *, thinks: bool, opened: bool) -> Constrained | None:
        """None if the reply is unconstrained. `opened`: the prompt ends inside a thought."""
        param = blamed_field(request)
        job = _encoded(TrialJob.of(request, thinks=thinks, opened=opened), param)
        tried = self._tried.get(job)
        if tried is not None:
            if tried.shape is None:
                return None
            guide = self.grammars.find(tried.shape.grammar, param)
            if guide is not None:
                return Constrained(tried.shape, guide)
        async with self._turns.turn(request.principal):
            # Another request with the same job may have been tried meanwhile.
            tried = self._tried.get(job) or await self._try(job, param)
            return None if tried.shape is None else await self._compile(tried.shape, tried.memory)

    async def close(self) -> None:
        await self.trials.close()
        await asyncio.to_thread(self._threads.shutdown)

    async def _try(self, job: bytes, param: str) -> _Tried:
        outcome = await self.trials.run(job)
        if outcome is None:
            raise InvalidSchema(f"{param}: {TOO_COMPLEX}", param=param)
        if outcome.failure is not None:
            raise by_name(outcome.failure.name)(outcome.failure.message, param=outcome.failure.param)
        tried = _Tried(outcome.shape, outcome.memory)
        self._tried.keep(job, tried, 0 if outcome.shape is None else len(outcome.shape.grammar))
        return tried

    async def _compile(self, shape: Shape, memory: int) -> Constrained:
        loop = asyncio.get_running_loop()
        compiling = loop.run_in_executor(self._threads, self.grammars.guide, shape.grammar, shape.param, memory)
        try:
            return Constrained(shape, await asyncio.shield(compiling))
        except asyncio.CancelledError:
            # Native code cannot be interrupted. It takes no longer than the trial did.
            await asyncio.wait((compiling,))
            raise


def _encoded(job: TrialJob, param: str) -> bytes:
    try:
        encoded = msgspec.msgpack.encode(job)
    except ENCODE_ERRORS as error:
        raise InvalidSchema(f"{param}: this cannot be encoded: {error}", param=param) from error
    if len(encoded) > MOST_JOB:
        words = f"all schemas of a request may have {MOST_JOB} bytes together, not {len(encoded)}"
        raise InvalidSchema(f"{param}: {words}", param=param)
    return encoded
