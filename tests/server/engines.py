"""Engines for the tests of loading; the servers import them from here."""

import asyncio
from collections.abc import Iterator

from dragoman.conversation import GenerationRequest
from dragoman.engines.interface import Engine, ModelInfo, Output


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
