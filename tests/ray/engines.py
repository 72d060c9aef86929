"""An engine that replies with its process id and leaves traces of its calls in a folder."""

import asyncio
import os
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Self

import msgspec

from dragoman.core.engine import Engine, ModelInfo
from dragoman.core.request import GenerationRequest, Text


class TracingOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    folder: str


class TracingEngine(Engine):
    """`WAIT` in a prompt delays the reply; `ON` makes it long."""

    Options = TracingOptions

    def __init__(self, name: str, folder: Path) -> None:
        self._name = name
        self._folder = folder

    @classmethod
    def configured(cls, name: str, options: msgspec.Struct) -> Self:
        assert isinstance(options, TracingOptions)
        return cls(name, Path(options.folder))

    def models(self) -> list[ModelInfo]:
        return [ModelInfo(self._name)]

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[str, None]:
        text = "".join(part.text for part in request.messages[-1].parts if isinstance(part, Text))
        self._trace("asked")
        try:
            if "WAIT" in text:
                await asyncio.sleep(3)
            yield str(os.getpid())
            for _ in range(600 if "ON" in text else 0):
                await asyncio.sleep(0.1)
                yield " on"
        except (asyncio.CancelledError, GeneratorExit):
            self._trace("cancelled")
            raise

    def _trace(self, what: str) -> None:
        (self._folder / f"{what}.{os.getpid()}").touch()
