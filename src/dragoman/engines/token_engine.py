"""Base classes for engines that generate token by token.

    request ──prompt pool──> generation ──engine──> events ──> listener

Rules
1. Prompts are read, and generations built, in threads. Principals take turns, because a long prompt may take a second.
2. Questions about prompts have a pool of their own, so that generations do not wait for them.
3. If the reply must be checked against keywords that were not enforced, `Finished` is kept in `unchecked` and delivered
   after the check, which may take half a second and has a pool of its own.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from typing import Generic, Protocol, TypeVar

import msgspec

from dragoman.core.delivery import EventQueue
from dragoman.core.engine import Engine, RenderedPrompt
from dragoman.core.events import (
    Event,
    Finished,
    FinishReason,
    Listener,
    Started,
    TextDelta,
    TokenLogprob,
    Usage,
    notify,
)
from dragoman.core.fair_semaphore import FairSemaphore
from dragoman.core.request import GenerationRequest
from dragoman.engines.prompt_reader import PromptReader, PromptTokens, Vocabulary, detokenize, token_texts, tokenize
from dragoman.engines.reply_limits import RepeatedCallDetector, ThinkingBudget
from dragoman.grammar.constraints import CompiledConstraint
from dragoman.grammar.masks import Guide
from dragoman.grammar.schema_check import SchemaCheck, find_violations

T = TypeVar("T")
G = TypeVar("G", bound="TokenGeneration")

MIN_LOGPROB = -9999.0
"""Replaces minus infinity, which JSON cannot represent."""


class ReplySettings(msgspec.Struct, frozen=True, kw_only=True):
    """The fixed parameters of a reply.

    `limit` is the maximum number of tokens. `shows_prompt`: the ids of the prompt are returned. `guide` follows the
    grammar and captures values for `checks`. With `calls` the reply ends when a tool call is repeated.
    """

    prompt: tuple[int, ...]
    limit: int
    prompt_text: str | None = None
    shows_prompt: bool = False
    guide: Guide | None = None
    checks: tuple[SchemaCheck, ...] = ()
    calls: bool = False
    budget: ThinkingBudget | None = None
    thinking: bool = False
    ignored: tuple[str, ...] = ()


class FlushableDecoder(Protocol):
    def flush(self) -> str:
        """Return the text of an incomplete character at the end."""


class TokenGeneration:
    """One reply, from its first to its last event."""

    def __init__(self, settings: ReplySettings, decoder: FlushableDecoder) -> None:
        self.settings = settings
        self.decoder = decoder
        self.events = EventQueue()
        self.guide = settings.guide
        self.budget = settings.budget
        self.repeated_calls = RepeatedCallDetector() if settings.calls and settings.guide is not None else None
        self.count = 0
        """Tokens of the reply so far."""
        self.has_ended = False
        self.unchecked: Finished | None = None
        self._cached = self._kept = 0

    def create_started(self, logprobs: Sequence[TokenLogprob], cached: int, kept: int = 0) -> Started:
        """Return the first event. `cached` prompt tokens were reused, and `kept` are kept for later requests."""
        self._cached, self._kept = cached, kept
        settings = self.settings
        text, thinking, ignored = settings.prompt_text, settings.thinking, settings.ignored
        ids = settings.prompt if settings.shows_prompt else ()
        return Started(len(settings.prompt), cached, tuple(logprobs), text, thinking, ignored, kept, ids)

    def finish(self, reason: FinishReason) -> list[Event]:
        """Return the last events."""
        self.has_ended = True
        settings, text = self.settings, self.decoder.flush()
        events: list[Event] = [TextDelta(text, count=0)] if text else []
        usage = Usage(prompt=len(settings.prompt), completion=self.count, cached=self._cached, kept=self._kept)
        finished = Finished(reason, usage=usage)
        if settings.checks and self.guide is not None and reason != "length":
            self.unchecked = finished
            return events
        return [*events, finished]

    def find_violations(self) -> tuple[str, ...]:
        captures = () if self.guide is None else self.guide.get_captures()
        return find_violations(self.settings.checks, captures)


class RequestBuilder(PromptReader, Generic[G]):
    """Builds generations from requests."""

    async def constrain(self, request: GenerationRequest, prompt: PromptTokens) -> CompiledConstraint | None:
        """Compile the constraint. Runs in the event loop; other processes and threads do the work."""
        raise NotImplementedError

    def build(
        self, request: GenerationRequest, prompt: PromptTokens, constrained: CompiledConstraint | None = None
    ) -> G:
        raise NotImplementedError

    def read_and_build(self, request: GenerationRequest) -> G:
        return self.build(request, self.read(request))

    def prompt_text(self, request: GenerationRequest) -> str | None:
        """Return the text of the prompt, if the reply must echo it."""
        if not request.echo:
            return None
        return self.model.detokenize(request.prompt) if isinstance(request.prompt, tuple) else request.prompt


class TokenEngine(Engine):
    def __init__(self, prompt_threads: int, threads_per_principal: int) -> None:
        self._prompt_turns = FairSemaphore(prompt_threads, per_caller=threads_per_principal)
        self.prompt_pool = ThreadPoolExecutor(prompt_threads, thread_name_prefix="dragoman-prompt")
        self.query_pool = ThreadPoolExecutor(2, thread_name_prefix="dragoman-query")
        self.check_pool = ThreadPoolExecutor(2, thread_name_prefix="dragoman-check")

    def require_vocabulary(self) -> Vocabulary:
        """Return the vocabulary of the loaded model."""
        raise NotImplementedError

    def require_builder(self) -> PromptReader:
        """Return the builder of a model that generates text."""
        raise NotImplementedError

    async def render(self, request: GenerationRequest) -> RenderedPrompt:
        return await self.run_in_pool(self.require_builder().render, request, pool=self.query_pool)

    async def count_tokens(self, request: GenerationRequest) -> int:
        return await self.run_in_pool(self.require_builder().count, request, pool=self.query_pool)

    async def tokenize(self, text: str, special: bool) -> Sequence[int]:
        return await self.run_in_pool(tokenize, self.require_vocabulary(), text, special, pool=self.query_pool)

    async def tokenize_text(self, text: str, special: bool) -> Sequence[int]:
        return await self.run_in_pool(tokenize, self.require_vocabulary(), text, special, True, pool=self.query_pool)

    async def token_texts(self, tokens: Sequence[int]) -> Sequence[bytes]:
        return await self.run_in_pool(token_texts, self.require_vocabulary(), tokens, pool=self.query_pool)

    async def detokenize(self, tokens: Sequence[int]) -> str:
        return await self.run_in_pool(detokenize, self.require_vocabulary(), tokens, pool=self.query_pool)

    async def build_generation(self, builder: RequestBuilder[G], request: GenerationRequest) -> G:
        turn = partial(self._prompt_turns.acquire, request.principal)
        if not builder.is_constrained(request):
            async with turn():
                return await self.run_in_pool(builder.read_and_build, request)
        async with turn():
            prompt = await self.run_in_pool(builder.read, request)
        constrained = await builder.constrain(request, prompt)
        async with turn():
            return await self.run_in_pool(builder.build, request, prompt, constrained)

    async def deliver_checked(self, generation: TokenGeneration, listener: Listener) -> None:
        """Check the reply if that is required, and deliver `Finished`, with a warning if the check failed."""
        finished = generation.unchecked
        if finished is not None:
            found = await self.run_in_pool(generation.find_violations, pool=self.check_pool)
            finished = msgspec.structs.replace(finished, warnings=(*finished.warnings, *found))
            await notify(listener, [finished])

    async def run_in_pool(self, function: Callable[..., T], *arguments: object, pool: Executor | None = None) -> T:
        return await asyncio.get_running_loop().run_in_executor(pool or self.prompt_pool, function, *arguments)

    def close_pools(self, *, wait: bool) -> None:
        for pool in (self.prompt_pool, self.query_pool, self.check_pool):
            pool.shutdown(wait=wait)
