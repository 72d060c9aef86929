"""A vllm engine with injected faults; the worker process imports it from here."""

from collections.abc import Sequence

from dragoman.core.events import Listener
from dragoman.engines.token_engine import TokenGeneration
from dragoman.engines.vllm.engine import VllmEngine
from dragoman.engines.vllm.vllm_api import StepOutput

BELL = "\a"


class Faulty(VllmEngine):
    """Fails to check replies, and to process a step that contains a bell character.

    `tokenize` returns the number of pending vLLM requests.
    """

    async def start(self) -> None:
        await super().start()
        model = self._require_model()
        process = model.process_step

        def process_step(outputs: Sequence[StepOutput]) -> None:
            if any(ord(BELL) in output.new_token_ids for output in outputs):
                raise KeyError("injected fault")
            process(outputs)

        model.process_step = process_step  # type: ignore[method-assign]

    async def deliver_checked(self, generation: TokenGeneration, listener: Listener) -> None:
        if generation.unchecked is not None:
            raise KeyError("injected fault")

    async def tokenize(self, text: str, special: bool) -> Sequence[int]:
        return [len(self._require_model().pending)]
