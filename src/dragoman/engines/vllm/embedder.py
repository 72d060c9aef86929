"""Texts on their way to vectors: each is a request of its own to vLLM, whose pooler makes one vector of it."""

import asyncio
import itertools
import logging
from collections.abc import Sequence
from typing import Any

from dragoman.core.embeddings import Embedding, Input, each
from dragoman.core.errors import BadRequest, ContextTooLong, EngineFailed
from dragoman.engines.prompt_reader import check_tokens
from dragoman.engines.vllm.vllm_api import ABORT, ERROR, Output, Parts
from dragoman.engines.vllm.vocabulary import Tokens
from dragoman.pipeline.event_stream import failed

log = logging.getLogger("dragoman.engine")


class Pooled:
    """One text that vLLM has."""

    def __init__(self, request: Any, future: "asyncio.Future[Embedding]") -> None:
        self.request = request
        self.future = future

    def take(self, output: Output) -> None:
        if self.future.done():
            return
        if output.finish_reason in (ABORT, ERROR) or output.pooling_output is None:
            self.future.set_exception(EngineFailed("vLLM made no vector; its log may say why"))
            return
        try:
            values = output.pooling_output.flatten().tolist()
            self.future.set_result(Embedding.of(values, len(self.request.prompt_token_ids)))
        except Exception as error:
            # In half floats, for one, a pooler gets to numbers that are none.
            log.exception("a vector could not be read")
            self.future.set_exception(failed(error))


class Texts:
    """From inputs to what vLLM's engine takes. Never runs in the event loop."""

    def __init__(self, parts: Parts, processor: Any, tasks: Sequence[str], model: Tokens, context: int) -> None:
        self.parts = parts
        self.processor = processor
        self.tasks = tuple(tasks)
        self.model = model
        self.context = context
        self.ids = itertools.count()

    def read(self, inputs: Sequence[Input]) -> list[Any]:
        return each(inputs, lambda entry: self._request(self._tokens(entry)))

    def _tokens(self, entry: Input) -> Sequence[int]:
        if isinstance(entry, str):
            least = -(-len(entry.encode("utf-8", "replace")) // self.model.longest_piece)
            if least > self.context:
                raise self._too_long(least, "at least ")
            tokens: Sequence[int] = self.model.tokenize_whole(entry)
        else:
            check_tokens(self.model, entry, "input")
            tokens = entry
        if len(tokens) > self.context:
            raise self._too_long(len(tokens))
        return tokens

    def _too_long(self, tokens: int, about: str = "") -> ContextTooLong:
        words = f"this model's maximum context length is {self.context} tokens, but the input has {about}{tokens}"
        return ContextTooLong(words, param="input", tokens=tokens, limit=self.context)

    def _request(self, tokens: Sequence[int]) -> Any:
        try:
            return self.processor.process_inputs(
                f"v{next(self.ids)}",
                self.parts.tokens_input(list(tokens)),
                self.parts.pooling(task="embed"),
                supported_tasks=self.tasks,
            )
        except self.parts.refusals as error:
            raise BadRequest(str(error), param="input") from error
