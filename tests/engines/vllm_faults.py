"""A vllm engine with injected faults; the worker process imports it from here."""

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import TypeVar

from dragoman.engines.vllm.engine import VllmEngine
from dragoman.engines.vllm.vllm_api import StepOutput
from dragoman.grammar.schema_check import find_violations

T = TypeVar("T")
BELL = "\a"


class Faulty(VllmEngine):
    """Fails to check replies, and to process a step that contains a bell character.

    `tokenize` returns the numbers of its generations and of its pending vLLM requests.
    """

    def _process_step(self, outputs: Sequence[StepOutput]) -> None:
        if any(ord(BELL) in output.new_token_ids for output in outputs):
            raise KeyError("injected fault")
        super()._process_step(outputs)

    async def _run_in_pool(self, function: Callable[..., T], *arguments: object, pool: Executor | None = None) -> T:
        if function is find_violations:
            raise KeyError("injected fault")
        return await super()._run_in_pool(function, *arguments, pool=pool)

    async def tokenize(self, text: str, special: bool) -> Sequence[int]:
        return [len(self._generations), len(self._pending)]
