"""Embedding requests. Each text is one vLLM request, whose pooler returns one vector."""

import asyncio
import itertools
import logging
from collections.abc import Sequence
from typing import Any

from dragoman.core.embeddings import Embedding, Input, map_inputs
from dragoman.core.errors import BadRequest, ContextTooLong, EngineFailed
from dragoman.engines.prompt_reader import check_tokens
from dragoman.engines.vllm.vllm_api import ABORT, ERROR, StepOutput, VllmApi
from dragoman.engines.vllm.vocabulary import HfVocabulary
from dragoman.pipeline.event_stream import engine_failure

log = logging.getLogger("dragoman.engine")


class PendingEmbedding:
    """One text that was submitted to vLLM."""

    def __init__(self, request: Any, future: "asyncio.Future[Embedding]") -> None:
        self.request = request
        self.future = future

    def resolve(self, output: StepOutput) -> None:
        if self.future.done():
            return
        if output.finish_reason in (ABORT, ERROR) or output.pooling_output is None:
            self.future.set_exception(EngineFailed("vLLM returned no embedding; see its log"))
            return
        try:
            values = output.pooling_output.flatten().tolist()
            self.future.set_result(Embedding.of(values, len(self.request.prompt_token_ids)))
        except Exception as error:
            # For example, half-precision poolers may return NaN.
            log.exception("an embedding of vLLM could not be read")
            self.future.set_exception(engine_failure(error))


class EmbeddingRequestBuilder:
    """Builds vLLM requests from inputs. Runs in threads, not the event loop."""

    def __init__(
        self, api: VllmApi, processor: Any, tasks: Sequence[str], vocabulary: HfVocabulary, context: int
    ) -> None:
        self.api = api
        self.processor = processor
        self.tasks = tuple(tasks)
        self.vocabulary = vocabulary
        self.context = context
        self.ids = itertools.count()

    def build(self, inputs: Sequence[Input]) -> list[Any]:
        return map_inputs(inputs, lambda entry: self._build_request(self._tokenize(entry)))

    def _tokenize(self, entry: Input) -> Sequence[int]:
        if isinstance(entry, str):
            minimum = -(-len(entry.encode("utf-8", "replace")) // self.vocabulary.longest_piece)
            if minimum > self.context:
                raise self._too_long(minimum, "at least ")
            tokens: Sequence[int] = self.vocabulary.tokenize_text(entry)
        else:
            check_tokens(self.vocabulary, entry, "input")
            tokens = entry
        if len(tokens) > self.context:
            raise self._too_long(len(tokens))
        return tokens

    def _too_long(self, tokens: int, prefix: str = "") -> ContextTooLong:
        message = f"this model's maximum context length is {self.context} tokens, but the input has {prefix}{tokens}"
        return ContextTooLong(message, param="input", tokens=tokens, limit=self.context)

    def _build_request(self, tokens: Sequence[int]) -> Any:
        try:
            return self.processor.process_inputs(
                f"v{next(self.ids)}",
                self.api.tokens_input(list(tokens)),
                self.api.pooling(task="embed"),
                supported_tasks=self.tasks,
            )
        except self.api.request_errors as error:
            raise BadRequest(str(error), param="input") from error
