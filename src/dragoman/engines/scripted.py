"""An engine that plays a script: exact model output, deterministically, through the real wire formats.

For people who test agents, and the base of our own tests. The first reply whose `match` is found in the text of the
last user or tool message is played; a reply without `match` fits everything; where none fits the message is echoed.
One piece of `chunk` characters is one token. The faults happen at the N-th token of each reply.

The script is raw model output in the syntax that `format` names, thoughts and tool calls included. Tools, schemas,
images, suffixes and token ids are accepted and change nothing in it: what a model would do with them is for the script
to say. A thinking budget cuts the thought, as it does with a real model.

Vectors are made of hashes: each word of a text has one that looks like chance and is always the same, and a text has
their sum. Texts that share words are alike; what words mean, nobody knows here.
"""

import asyncio
import hashlib
import os
import re
import signal
import time
import types
from collections import Counter
from collections.abc import AsyncGenerator, Generator, Sequence
from functools import lru_cache
from typing import Annotated, Self

import msgspec

from dragoman.core.embeddings import Embedding, Input, each
from dragoman.core.engine import Engine, ModelInfo
from dragoman.core.errors import ContextTooLong, EngineFailed
from dragoman.core.events import Event, Finished, FinishReason, Started, TextDelta, Usage
from dragoman.core.request import GenerationRequest, Thinking
from dragoman.core.types import Count
from dragoman.formats import named
from dragoman.pipeline.split import begins_in_thought

FEATURES = frozenset(
    {
        *("chat", "completion", "token_prompt", "infill", "count_tokens", "embeddings", "max_tokens", "usage"),
        *("tools", "strict_tools", "constraint", "thinking", "images"),
    }
)


Number = Annotated[int, msgspec.Meta(ge=0)]
KEPT_CHARACTERS = 65536
"""The tokens of longer texts are made while they are played, and not cached: callers choose the text to echo."""


class ScriptedReply(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    output: str
    match: str | None = None

    def __post_init__(self) -> None:
        try:
            re.compile(self.match or "")
        except re.error as error:
            raise ValueError(f"match is not a regular expression: {self.match!r} ({error})") from error


class ScriptedOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    replies: tuple[ScriptedReply, ...] = ()
    format: str = "plain"
    """The syntax of the script, one of `formats`; plain is text and nothing else."""
    chunk: Count = 4
    burst: Count = 1
    """Tokens that become ready together, as from an engine that makes several in one step."""
    tokens_per_second: Annotated[float, msgspec.Meta(gt=0)] | None = None
    prefill_seconds: Annotated[float, msgspec.Meta(ge=0)] = 0
    dimensions: Count = 384
    """Of the vectors."""
    context: Count | None = None
    slots: Count | None = None
    fail_after: Number | None = None
    hang_after: Number | None = None
    crash_after: Number | None = None


class ScriptedEngine(Engine):
    Options = ScriptedOptions
    streams_events = True

    def __init__(self, name: str = "scripted", options: ScriptedOptions | None = None) -> None:
        self.name = name
        self.options = options = options or ScriptedOptions()
        self.slots = options.slots
        self.syntax = named(options.format)
        self._models = (ModelInfo(name, context=options.context, format=self.syntax.name),)
        faults = (options.fail_after, options.hang_after, options.crash_after)
        self.first_fault = min((at for at in faults if at is not None), default=None)
        self.replies = [(re.compile(reply.match or ""), reply.output) for reply in options.replies]

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

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Sequence[Event], None]:
        output = self._output(request.last_user_text)
        thinking = bool(request.messages) and begins_in_thought(self.syntax, output)
        output = self._within_budget(output, thinking, request.thinking)
        chunk = self.options.chunk
        kept = _pieces(output, chunk) if len(output) <= KEPT_CHARACTERS else None
        prompt_tokens = self._prompt_tokens(request)
        room = self._room(request, prompt_tokens)
        tokens = -(-len(output) // chunk)
        played = tokens if room is None else min(tokens, room)
        fault = self._fault_at(played)
        told = played if fault is None else fault
        if self.options.prefill_seconds:
            await asyncio.sleep(self.options.prefill_seconds)
        begun, burst, rate = time.monotonic(), self.options.burst, self.options.tokens_per_second
        ready: tuple[Event, ...] = (Started(prompt_tokens, thinking=thinking),)
        for at in range(0, told, burst):
            if at:
                yield ready
                ready = ()
            await (_turn() if rate is None else asyncio.sleep(self._delay(begun, at, rate)))
            end = min(at + burst, told)
            ready += _cut(output, chunk, at, end) if kept is None else kept[at:end]
        if fault is not None:
            yield ready
            await self._fault(fault)
        reason: FinishReason = "length" if played < tokens else "stop"
        yield (*ready, Finished(reason, usage=Usage(prompt=prompt_tokens, completion=played)))

    def count_tokens(self, request: GenerationRequest) -> int:
        return self._prompt_tokens(request)

    def embed(self, inputs: Sequence[Input]) -> Sequence[Embedding]:
        return each(inputs, self._embedding)

    def _embedding(self, entry: Input) -> Embedding:
        if isinstance(entry, str):
            words, tokens = Counter(re.findall(r"\w+", entry.lower()) or [entry]), -(-len(entry) // self.options.chunk)
        else:
            words, tokens = Counter(map(str, entry)), len(entry)
        context = self.options.context
        if context is not None and tokens > context:
            raise _too_long(context, tokens, context, "input")
        total = [0.0] * self.options.dimensions
        for word, times in words.items():
            hashed = hashlib.shake_128(word.encode("utf-8", "replace")).digest(len(total))
            total = [so_far + times * (byte - 127.5) for so_far, byte in zip(total, hashed, strict=True)]
        return Embedding.of(total, tokens)

    def _output(self, text: str) -> str:
        for pattern, output in self.replies:
            if pattern.search(text):
                return output
        return text

    def _within_budget(self, output: str, thinking: bool, asked: Thinking) -> str:
        """The output with its first thought cut to what the request allows."""
        budget = 0 if asked.is_off else asked.budget_tokens
        if budget is None:
            return output
        tags = next((tags for tags in self.syntax.thoughts if tags.close in output), None)
        opener = 0 if tags is None or thinking else output.find(tags.open) + len(tags.open)
        if tags is None or (not thinking and tags.open not in output):
            return output
        closer = output.index(tags.close, opener)
        return output[: min(opener + budget * self.options.chunk, closer)] + output[closer:]

    def _prompt_tokens(self, request: GenerationRequest) -> int:
        size, prompt = self.options.chunk, request.prompt
        if isinstance(prompt, str):
            return -(-len(prompt) // size)
        if prompt is not None:
            return len(prompt)
        return sum([-(-len(message.text) // size) for message in request.messages])

    def _room(self, request: GenerationRequest, prompt_tokens: int) -> int | None:
        """Tokens the reply may have at the most."""
        context = self.options.context
        if context is None:
            return request.max_tokens
        if prompt_tokens >= context:
            raise _too_long(context, prompt_tokens, context - 1, "messages" if request.messages else "prompt")
        left = context - prompt_tokens
        return left if request.max_tokens is None else min(left, request.max_tokens)

    def _fault_at(self, tokens: int) -> int | None:
        """After how many of the reply's tokens something goes wrong."""
        fault = self.first_fault
        return fault if fault is not None and fault <= tokens else None

    def _delay(self, begun: float, at: int, rate: float) -> float:
        return max(0.0, begun + (at + self.options.burst) / rate - time.monotonic())

    async def _fault(self, at: int) -> None:
        options = self.options
        if at == options.crash_after:
            # What was played before the crash has to get out of the process first.
            await asyncio.sleep(0.05)
            os.kill(os.getpid(), signal.SIGKILL)
        if at == options.hang_after:
            await asyncio.Event().wait()
        raise EngineFailed(f"the script fails after {options.fail_after} tokens")


@types.coroutine
def _turn() -> Generator[None, None, None]:
    """Everybody else goes first: what `asyncio.sleep(0)` comes to, without the coroutine around it."""
    yield


def _too_long(context: int, tokens: int, limit: int, param: str) -> ContextTooLong:
    what = "input" if param == "input" else "prompt"
    words = f"this model's maximum context length is {context} tokens, but the {what} has {tokens}"
    return ContextTooLong(words, param=param, tokens=tokens, limit=limit)


@lru_cache(maxsize=64)
def _pieces(text: str, size: int) -> tuple[TextDelta, ...]:
    """A script is played again and again, and cut once."""
    return _cut(text, size, 0, -(-len(text) // size))


def _cut(text: str, size: int, start: int, end: int) -> tuple[TextDelta, ...]:
    """The tokens of a text from index `start` to index `end`, each with `size` characters."""
    return tuple([TextDelta(text[at * size : (at + 1) * size]) for at in range(start, end)])
