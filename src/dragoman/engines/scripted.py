"""An engine that plays scripted model output, for testing agents and for the tests of this project.

`scripted_replies` says which reply a request gets. If none fits, the engine echoes the last user or tool message. Every
`chunk` characters are one token. Faults happen at the N-th token of each reply. If a request continues the beginning of
the reply, the rest is played. Otherwise the whole reply follows the text.

A script is raw model output in the syntax named by `format`, including reasoning and tool calls, or, with the format
`plain`, the parts of the reply. Tools, schemas, images, suffixes and token ids are accepted and ignored. A thinking
budget shortens raw reasoning, as with a real model.

Embeddings are sums of hashes: each word has a fixed pseudo-random vector, so texts that share words are similar.
"""

import asyncio
import hashlib
import os
import re
import signal
import time
import types
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from functools import lru_cache
from itertools import chain
from typing import Annotated, Self

import msgspec

from dragoman.core.embeddings import Embedding, Input, map_inputs
from dragoman.core.engine import Engine, ModelInfo
from dragoman.core.errors import ContextTooLong, EngineFailed
from dragoman.core.events import (
    Event,
    Finished,
    FinishReason,
    Listener,
    ReasoningDelta,
    Started,
    TextDelta,
    Usage,
    notify,
)
from dragoman.core.features import Feature
from dragoman.core.request import GenerationRequest, Reasoning, Text, Thinking, ToolCall
from dragoman.core.types import Count, CountOrZero, SecondsOrZero
from dragoman.engines.scripted_replies import (
    Script,
    ScriptedReply,
    continue_parts,
    reply_parts,
    split_tokens,
)
from dragoman.formats import get_format
from dragoman.formats.syntax import PLAIN
from dragoman.pipeline.split import starts_inside_reasoning

FEATURES = frozenset(
    {
        *(Feature.CHAT, Feature.COMPLETION, Feature.TOKEN_PROMPT, Feature.INFILL, Feature.IMAGES, Feature.EMBEDDINGS),
        *(Feature.COUNT_TOKENS, Feature.MAX_TOKENS, Feature.USAGE, Feature.PREFILL),
        *(Feature.TOOLS, Feature.STRICT_TOOLS, Feature.CONSTRAINT, Feature.THINKING),
    }
)

MAX_CACHED_CHARACTERS = 65536
"""Longer texts are not cached, because clients choose the text to echo."""


class ScriptedOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    replies: tuple[ScriptedReply, ...] = ()
    format: str = "plain"
    """The syntax of the script, one of `formats`; plain is text only."""
    chunk: Count = 4
    burst: Count = 1
    """Number of tokens per event batch."""
    tokens_per_second: Annotated[float, msgspec.Meta(gt=0)] | None = None
    prefill_seconds: SecondsOrZero = 0
    dimensions: Count = 384
    """Dimensions of the embeddings."""
    context: Count | None = None
    slots: Count | None = None
    fail_after: CountOrZero | None = None
    hang_after: CountOrZero | None = None
    crash_after: CountOrZero | None = None

    def __post_init__(self) -> None:
        if self.format != PLAIN.name and any(reply.has_parts for reply in self.replies):
            raise ValueError(f"format: `reasoning` and `calls` of a reply need the format {PLAIN.name}")


class Play(msgspec.Struct, frozen=True):
    """How one reply is played."""

    size: int
    """In tokens."""
    tokens: Callable[[int, int], tuple[Event, ...]]
    """The events from one token up to another one."""
    thinking: bool = False
    """Whether the reply begins inside of reasoning."""
    has_calls: bool = False


class ScriptedEngine(Engine):
    Options = ScriptedOptions

    def __init__(self, name: str = "scripted", options: ScriptedOptions | None = None) -> None:
        self.name = name
        self.options = options = options or ScriptedOptions()
        self.slots = options.slots
        self.syntax = get_format(options.format)
        self._models = (ModelInfo(name, context=options.context, format=self.syntax.name),)
        faults = (options.fail_after, options.hang_after, options.crash_after)
        self.first_fault = min((at for at in faults if at is not None), default=None)
        self.script = Script(options.replies)
        if any(reply.has_parts for reply in options.replies):
            self.emits_tool_calls = True

    @classmethod
    def configured(cls, name: str, options: msgspec.Struct) -> Self:
        assert isinstance(options, ScriptedOptions)
        return cls(name, options)

    @classmethod
    def needs_worker(cls, options: msgspec.Struct) -> bool:
        return isinstance(options, ScriptedOptions) and options.crash_after is not None

    def models(self) -> Sequence[ModelInfo]:
        return self._models

    def supports(self) -> frozenset[str]:
        return FEATURES

    async def deliver(self, request: GenerationRequest, listener: Listener) -> None:
        prompt_tokens = self.count_tokens(request)
        limit = self._max_reply_tokens(request, prompt_tokens)
        reply = self.choose_reply(request)
        play = self._prepare(reply, request)
        played = play.size if limit is None else min(play.size, limit)
        failing = None if reply.error is None else min(reply.error.after, played)
        fault = self.first_fault if self.first_fault is not None and self.first_fault <= played else None
        end_of_play = min((at for at in (fault, failing) if at is not None), default=played)
        if delay := self.options.prefill_seconds + reply.delay:
            await asyncio.sleep(delay)
        started_at, burst, rate = time.monotonic(), self.options.burst, self.options.tokens_per_second
        ready: tuple[Event, ...] = (Started(prompt_tokens, thinking=play.thinking),)
        for at in range(0, end_of_play, burst):
            if at:
                await notify(listener, ready)
                ready = ()
            if rate is None:
                await _yield_to_loop()
            else:
                await asyncio.sleep(max(0.0, started_at + (at + burst) / rate - time.monotonic()))
            ready += play.tokens(at, min(at + burst, end_of_play))
        if fault is not None or failing is not None:
            await notify(listener, ready)
            if end_of_play == failing:
                await self.raise_error(reply, request)
            await self._raise_fault(end_of_play)
        reason: FinishReason = reply.finish or ("tool_calls" if play.has_calls else "stop")
        if played < play.size:
            reason = "length"
        usage = Usage(prompt=prompt_tokens, completion=played)
        if reply.has_parts:
            deltas = play.tokens(0, played)
            thought = sum(event.count for event in deltas if isinstance(event, ReasoningDelta))
            usage = msgspec.structs.replace(usage, reasoning=thought)
        await notify(listener, (*ready, Finished(reason, usage=usage)))

    async def raise_error(self, reply: ScriptedReply, request: GenerationRequest) -> None:
        """End a reply with its error."""
        assert reply.error is not None
        raise reply.error.build()

    def choose_reply(self, request: GenerationRequest) -> ScriptedReply:
        return self.script.choose(request) or ScriptedReply(request.last_user_text)

    def _prepare(self, reply: ScriptedReply, request: GenerationRequest) -> Play:
        chunk, output = self.options.chunk, reply.output or ""
        thinking = bool(request.messages) and starts_inside_reasoning(self.syntax, output)
        if reply.has_parts or reply.tokens is not None:
            parts = continue_parts(reply_parts(reply, request), request.prefill)
            tokens = split_tokens(parts, chunk, reply.tokens)
            has_calls = any(isinstance(part, ToolCall) for part in parts)
            return Play(len(tokens), lambda at, end: tuple(chain.from_iterable(tokens[at:end])), thinking, has_calls)
        output = self._apply_budget(output, thinking, request.thinking)
        output, thinking = self._continue_script(output, thinking, request.prefill)
        size = -(-len(output) // chunk)
        if len(output) > MAX_CACHED_CHARACTERS:
            return Play(size, lambda at, end: _split_range(output, chunk, at, end), thinking)
        pieces = _split(output, chunk)
        return Play(size, lambda at, end: pieces[at:end], thinking)

    def embed(self, inputs: Sequence[Input]) -> Sequence[Embedding]:
        return map_inputs(inputs, self._embedding)

    def _embedding(self, entry: Input) -> Embedding:
        if isinstance(entry, str):
            words, tokens = Counter(re.findall(r"\w+", entry.lower()) or [entry]), -(-len(entry) // self.options.chunk)
        else:
            words, tokens = Counter(map(str, entry)), len(entry)
        context = self.options.context
        if context is not None and tokens > context:
            raise ContextTooLong.of(context, tokens, "input")
        total = [0.0] * self.options.dimensions
        for word, times in words.items():
            hashed = hashlib.shake_128(word.encode("utf-8", "replace")).digest(len(total))
            total = [so_far + times * (byte - 127.5) for so_far, byte in zip(total, hashed, strict=True)]
        return Embedding.of(total, tokens)

    def _apply_budget(self, output: str, thinking: bool, options: Thinking) -> str:
        """Shorten the first reasoning section to the thinking budget."""
        budget = 0 if options.is_off else options.budget_tokens
        if budget is None:
            return output
        tags = next((tags for tags in self.syntax.thoughts if tags.close in output), None)
        opener = 0 if tags is None or thinking else output.find(tags.open) + len(tags.open)
        if tags is None or (not thinking and tags.open not in output):
            return output
        closer = output.index(tags.close, opener)
        return output[: min(opener + budget * self.options.chunk, closer)] + output[closer:]

    def _continue_script(self, output: str, thinking: bool, prefill: Text | Reasoning | None) -> tuple[str, bool]:
        """Return what follows the prefill, and whether that begins with reasoning."""
        if prefill is None:
            return output, thinking
        if isinstance(prefill, Reasoning):
            opener = next((tags.open for tags in self.syntax.thoughts if output.startswith(tags.open)), "")
            return output.removeprefix(opener).lstrip().removeprefix(prefill.text.lstrip()), True
        closer = next((tags.close for tags in self.syntax.thoughts if tags.close in output), None)
        if closer is not None and not output.startswith(prefill.text):
            # The model has thought before it wrote the text.
            output = output.partition(closer)[2].lstrip()
        return output.removeprefix(prefill.text), False

    def count_tokens(self, request: GenerationRequest) -> int:
        size, prompt = self.options.chunk, request.prompt
        if isinstance(prompt, str):
            return -(-len(prompt) // size)
        if prompt is not None:
            return len(prompt)
        return sum([-(-len(message.text) // size) for message in request.messages])

    def _max_reply_tokens(self, request: GenerationRequest, prompt_tokens: int) -> int | None:
        """Maximum number of reply tokens; None means unlimited."""
        context = self.options.context
        if context is None:
            return request.max_tokens
        if prompt_tokens >= context:
            raise ContextTooLong.of(context, prompt_tokens, "messages" if request.messages else "prompt")
        left = context - prompt_tokens
        return left if request.max_tokens is None else min(left, request.max_tokens)

    async def _raise_fault(self, at: int) -> None:
        options = self.options
        if at == options.crash_after:
            # Give the worker time to send the tokens before the crash.
            await asyncio.sleep(0.05)
            os.kill(os.getpid(), signal.SIGKILL)
        if at == options.hang_after:
            await asyncio.Event().wait()
        raise EngineFailed(f"the script fails after {options.fail_after} tokens")


@types.coroutine
def _yield_to_loop() -> Generator[None, None, None]:
    """Yield to the event loop, like `asyncio.sleep(0)` without its coroutine."""
    yield


@lru_cache(maxsize=64)
def _split(text: str, size: int) -> tuple[TextDelta, ...]:
    """Split the whole text; cached because scripts are played repeatedly."""
    return _split_range(text, size, 0, -(-len(text) // size))


def _split_range(text: str, size: int, start: int, end: int) -> tuple[TextDelta, ...]:
    """Tokens `start` to `end` of a text, each with `size` characters."""
    return tuple([TextDelta(text[at * size : (at + 1) * size]) for at in range(start, end)])
