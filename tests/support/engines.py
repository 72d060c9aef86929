"""Engines for tests. Test servers import them by name."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Self

import msgspec

from dragoman.core.engine import Engine, ModelInfo, Output, RenderedPrompt
from dragoman.core.errors import ContextTooLong
from dragoman.core.events import Finished, ReasoningDelta, Started, TextDelta, ToolCallDelta, ToolCallStart
from dragoman.core.request import GenerationRequest


class Exploding(Engine):
    async def start(self) -> None:
        raise RuntimeError("no such device")

    def generate(self, request: GenerationRequest) -> Iterator[Output]:
        yield "never"


class Unweighable(Engine):
    @classmethod
    def needs_worker(cls, options: msgspec.Struct) -> bool:
        raise RuntimeError("its memory was not estimated")

    def generate(self, request: GenerationRequest) -> Iterator[Output]:
        yield "never"


class SlowToLoad(Engine):
    async def start(self) -> None:
        await asyncio.sleep(1)

    def generate(self, request: GenerationRequest) -> Iterator[Output]:
        yield "at last"


class NeverStops(Engine):
    async def stop(self) -> None:
        await asyncio.Event().wait()

    def generate(self, request: GenerationRequest) -> Iterator[Output]:
        yield "here"


class SlowToStop(Engine):
    async def stop(self) -> None:
        await asyncio.sleep(2)

    def generate(self, request: GenerationRequest) -> Iterator[Output]:
        yield "here"


class Nameless(Engine):
    def models(self) -> list[ModelInfo]:
        return []

    def generate(self, request: GenerationRequest) -> Iterator[Output]:
        yield "who"


class Counting(Engine):
    """Generates without end, and reports how much it has generated."""

    def __init__(self) -> None:
        self.made = 0

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Output]:
        while True:
            self.made += 1
            yield "word "
            await asyncio.sleep(0)

    def count_tokens(self, request: GenerationRequest) -> int:
        return self.made


class Showing(Engine):
    """Renders prompts: a line per message, a token per character."""

    def models(self) -> Sequence[ModelInfo]:
        return [ModelInfo("showing", context=100, format="hermes")]

    def supports(self) -> frozenset[str]:
        return super().supports() | {"tools", "temperature"}

    def render(self, request: GenerationRequest) -> RenderedPrompt:
        lines = [f"{message.role}: {message.text}\n" for message in request.messages]
        text = "".join([*(f"tool: {tool.name}\n" for tool in request.tools), *lines])
        if len(text) > 100:
            raise ContextTooLong("the maximum context length is 100", param="messages")
        return RenderedPrompt(text, tuple(map(ord, text)), "hermes")

    def generate(self, request: GenerationRequest) -> Iterator[Output]:
        raise AssertionError("generate must not be called")


class ShowingFromAfar(Showing):
    def models(self) -> Sequence[ModelInfo]:
        return [ModelInfo("showing-from-afar", format="hermes")]

    @classmethod
    def needs_worker(cls, options: msgspec.Struct) -> bool:
        return True


class WeightyOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    mebibytes: int = 1
    hold: str = ""
    pace: float = 0.01
    words: int = 5
    slots: int = 4


class Weighty(Engine):
    """Uses memory in its own process, and time for each word. It does not load while the file `hold` exists."""

    Options = WeightyOptions

    def __init__(self, name: str, options: WeightyOptions) -> None:
        self.name = name
        self.options = options
        self.slots = options.slots
        self.weight = b""

    @classmethod
    def configured(cls, name: str, options: msgspec.Struct) -> Self:
        assert isinstance(options, WeightyOptions)
        return cls(name, options)

    @classmethod
    def needs_worker(cls, options: msgspec.Struct) -> bool:
        return True

    def models(self) -> Sequence[ModelInfo]:
        return [ModelInfo(self.name)]

    async def start(self) -> None:
        self.weight = b"x" * (self.options.mebibytes << 20)
        self.progress = 0.5
        while self.options.hold and Path(self.options.hold).exists():  # noqa: ASYNC110, ASYNC240 (a test removes it)
            await asyncio.sleep(0.01)

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Output]:
        if request.last_user_text == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        for _ in range(self.options.words):
            yield f"{self.name} "
            await asyncio.sleep(self.options.pace)


class Sampled(Engine):
    """Replies with its sampling parameters."""

    def supports(self) -> frozenset[str]:
        return super().supports() | {"temperature", "top_p"}

    def generate(self, request: GenerationRequest) -> Iterator[Output]:
        yield f"{request.sampling.temperature} {request.sampling.top_p} {request.max_tokens}"


class Calling(Engine):
    """Emits reasoning, text and one call of the first tool per word, as events."""

    def supports(self) -> frozenset[str]:
        return super().supports() | {"tools"}

    def generate(self, request: GenerationRequest) -> Iterator[Output]:
        yield [ReasoningDelta("I had "), ReasoningDelta("better ask.")]
        yield TextDelta("Let me see.")
        words = request.last_user_text.split()
        for at, word in enumerate(words if request.tool_choice.parallel else words[:1]):
            yield ToolCallStart(f"call_{at}", request.tools[0].name)
            yield from (ToolCallDelta(piece) for piece in ('{"cit', 'y": "', word, '"}'))
        yield Finished("tool_calls")


class History(Engine):
    """Says how many messages the conversation has, and the text of the first one."""

    def generate(self, request: GenerationRequest) -> Iterator[Output]:
        yield f"{len(request.messages)} messages: {request.messages[0].text}"


class Reader(Engine):
    """Repeats the conversation, a line for each message, with four characters per token. It summarises every transcript
    as "They met."."""

    def models(self) -> Sequence[ModelInfo]:
        return [ModelInfo("reader")]

    def supports(self) -> frozenset[str]:
        return super().supports() | {"tools"}

    def count_tokens(self, request: GenerationRequest) -> int:
        return sum(-(-len(message.text) // 4) for message in request.messages)

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Output]:
        yield Started(self.count_tokens(request))
        if "<conversation>" in request.last_user_text:
            yield "They met."
        for message in request.messages if "<conversation>" not in request.last_user_text else ():
            yield f"{message.role}: {message.text}\n"


class BlindReader(Reader):
    """The same, but it cannot count tokens."""

    def supports(self) -> frozenset[str]:
        return super().supports() - {"count_tokens"}
