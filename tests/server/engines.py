"""Engines for the tests of loading, of prompts and of calls; the servers import them from here."""

import asyncio
from collections.abc import Iterator, Sequence

import msgspec

from dragoman.conversation import GenerationRequest
from dragoman.engines.interface import Engine, ModelInfo, Output, Rendered
from dragoman.errors import ContextTooLong
from dragoman.events import Finished, ReasoningDelta, TextDelta, ToolCallDelta, ToolCallStart


class Exploding(Engine):
    async def start(self) -> None:
        raise RuntimeError("no such device")

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


class Nameless(Engine):
    def models(self) -> list[ModelInfo]:
        return []

    def generate(self, request: GenerationRequest) -> Iterator[Output]:
        yield "who"


class Showing(Engine):
    """Tells its prompts: a line per message, a token per character."""

    def models(self) -> Sequence[ModelInfo]:
        return [ModelInfo("showing", context=100, format="hermes")]

    def supports(self) -> frozenset[str]:
        return super().supports() | {"tools", "temperature"}

    def render(self, request: GenerationRequest) -> Rendered:
        lines = [f"{message.role}: {message.text}\n" for message in request.messages]
        text = "".join([*(f"tool: {tool.name}\n" for tool in request.tools), *lines])
        if len(text) > 100:
            raise ContextTooLong("the maximum context length is 100", param="messages")
        return Rendered(text, tuple(map(ord, text)), "hermes")

    def generate(self, request: GenerationRequest) -> Iterator[Output]:
        raise AssertionError("nobody asked for an answer")


class ShowingFromAfar(Showing):
    def models(self) -> Sequence[ModelInfo]:
        return [ModelInfo("showing-from-afar", format="hermes")]

    @classmethod
    def needs_worker(cls, options: msgspec.Struct) -> bool:
        return True


class Calling(Engine):
    """Thinks, talks and calls the first tool once for every word, in events of its own."""

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
