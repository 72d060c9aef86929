"""A vllm engine with what nobody foresees, for its tests; the worker imports it from here."""

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import TypeVar

from dragoman.engines.vllm.engine import VllmEngine
from dragoman.engines.vllm.vllm_api import Output
from dragoman.grammar.schema_check import warnings

T = TypeVar("T")
BELL = "\a"


class Faulty(VllmEngine):
    """Cannot look at what could not be enforced, nor take a step in which somebody is told a bell. Instead of tokens it
    tells how many requests it has, by our keys and by vLLM's ids."""

    def _take(self, outputs: Sequence[Output]) -> None:
        if any(ord(BELL) in output.new_token_ids for output in outputs):
            raise KeyError("nobody foresaw it")
        super()._take(outputs)

    async def _aside(self, function: Callable[..., T], *arguments: object, pool: Executor | None = None) -> T:
        if function is warnings:
            raise KeyError("nobody foresaw it")
        return await super()._aside(function, *arguments, pool=pool)

    async def tokenize(self, text: str, special: bool) -> Sequence[int]:
        return [len(self.works), len(self.live)]
