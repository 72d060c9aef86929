"""Engines for the tests of workers; the worker imports them from here."""

import asyncio
import ctypes
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Self

import msgspec
import numpy as np

from dragoman.core.embeddings import Embedding as Made
from dragoman.core.embeddings import Input
from dragoman.core.engine import Engine, ModelInfo, Output, RenderedPrompt
from dragoman.core.errors import BadRequest, ConfigError
from dragoman.core.events import Finished, TextDelta
from dragoman.core.request import GenerationRequest


class Obedient(Engine):
    """Follows the command in the last user message."""

    device = "pretend"
    emits_tool_calls = True
    slots = 3

    def models(self) -> Sequence[ModelInfo]:
        return [ModelInfo("obedient", owner="tests", context=99)]

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Output]:
        command, _, rest = request.last_user_text.partition(" ")
        if command == "refuse":
            raise BadRequest(rest, param="messages[0]")
        if command == "raise":
            raise RuntimeError(rest)
        if command == "numpy":
            yield TextDelta("x", tokens=(np.int64(3),))  # type: ignore[arg-type]
        if command == "half":
            yield "\ud83d"
        if command == "complain":
            raise BadRequest("not \ud83d")
        if command == "numbers":
            yield ["a", 3]  # type: ignore[list-item]
        if command == "wrong":
            yield TextDelta(None)  # type: ignore[arg-type]
        if command == "eos":
            yield ["all ", Finished("eos")]  # type: ignore[arg-type]
        if command == "full":
            self.kv_used = "very"  # type: ignore[assignment]
            yield "x"
            await asyncio.sleep(1)
        if command == "die":
            os.kill(os.getpid(), signal.SIGSEGV)
        if command == "print":
            print("this must not be mixed with the messages", flush=True)
        for at in range(int(rest)):
            self.kv_used = (at + 1) / 100
            yield [TextDelta(f"{at} ", tokens=(at,))]
            await asyncio.sleep(0.01 if command == "slowly" else 0)

    def render(self, request: GenerationRequest) -> RenderedPrompt:
        command, _, rest = request.last_user_text.partition(" ")
        if command == "refuse":
            raise BadRequest(rest, param="messages[0]")
        if command == "raise":
            raise RuntimeError(rest)
        return RenderedPrompt(f"{request.tools[0].name}: {rest}", (1, 2), "hermes")

    def tokenize(self, text: str, special: bool) -> Sequence[int]:
        if text == "numpy":
            return list(np.array([1, 2, 3]))
        if text == "die":
            os.kill(os.getpid(), signal.SIGSEGV)
        if text == "words":
            return ["one"]  # type: ignore[list-item]
        if text == "hang":
            time.sleep(60)
        return [len(text), int(special)]

    def detokenize(self, tokens: Sequence[int]) -> str:
        if not tokens:
            raise BadRequest("nothing to detokenize", param="tokens")
        return " ".join(map(str, tokens))


class Apart(Obedient):
    """Runs in a worker."""

    @classmethod
    def needs_worker(cls, options: msgspec.Struct) -> bool:
        return True


class Embedding(Engine):
    """Computes embeddings and counts its running calls."""

    def __init__(self) -> None:
        self.working = 0

    async def embed(self, inputs: Sequence[Input]) -> Sequence[Made]:
        self.working += 1
        try:
            if inputs[0] == "wait":
                await asyncio.sleep(60)
            if inputs[0] == "working":
                return [Made.of([1], tokens=self.working)]
            if inputs[0] == "none":
                return []
            return [Made.of([len(entry), 0], tokens=len(entry)) for entry in inputs]
        finally:
            self.working -= 1


class Blocking(Engine):
    """Blocks its process, like a library that is stuck in native code."""

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Output]:
        yield "one "
        await asyncio.sleep(0.05)
        time.sleep(60)  # noqa: ASYNC251 (intended)


class Spinning(Engine):
    """Loops forever in Python."""

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Output]:
        yield "one "
        await asyncio.sleep(0.05)
        while True:
            pass


class Locking(Engine):
    """Is stuck in native code that holds Python's lock, so that no thread of its process runs."""

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Output]:
        yield "one "
        await asyncio.sleep(0.05)
        mutex, libc = ctypes.create_string_buffer(256), ctypes.PyDLL(None)
        libc.pthread_mutex_lock(mutex)
        libc.pthread_mutex_lock(mutex)


class Broken(Engine):
    async def start(self) -> None:
        raise ConfigError("this model file is not one")

    def generate(self, request: GenerationRequest) -> Iterator[Output]:
        yield ""


class Slow(Obedient):
    async def start(self) -> None:
        await asyncio.sleep(60)


class Incomprehensible(Obedient):
    """Describes itself with an invalid value."""

    slots = "many"  # type: ignore[assignment]


class BirthdayOptions(msgspec.Struct, frozen=True):
    greeting: str


class Configured(Engine):
    Options = BirthdayOptions

    def __init__(self, text: str) -> None:
        self.text = text

    @classmethod
    def configured(cls, name: str, options: msgspec.Struct) -> Self:
        assert isinstance(options, BirthdayOptions)
        return cls(f"{options.greeting} {name}")

    def generate(self, request: GenerationRequest) -> Iterator[Output]:
        yield self.text
