"""Counts the tokens of prompts, if the engine can."""

from dragoman.core.engine import Engine, call_engine
from dragoman.core.errors import ContextTooLong, NotSupported
from dragoman.core.features import Feature
from dragoman.core.request import GenerationRequest


class TokenCounter:
    """For one request; `context` is that of its model."""

    def __init__(self, engine: Engine, model: str) -> None:
        self.context = engine.model_info(model).context
        self._engine = engine
        self.can_count = Feature.COUNT_TOKENS in engine.supports()
        self._last: tuple[GenerationRequest, int] | None = None

    async def count(self, request: GenerationRequest) -> int | None:
        """Return the tokens of the prompt; None if they cannot be counted. An obviously too long text is not tokenized:
        then it is a number above the context."""
        if self._last is not None and self._last[0] is request:
            return self._last[1]
        if not self.can_count:
            return None
        try:
            tokens = await call_engine(self._engine.count_tokens, request)
        except ContextTooLong as error:
            tokens = max(error.tokens or 0, (self.context or 0) + 1)
        except NotSupported:
            # An upstream server cannot count.
            self.can_count = False
            return None
        self._last = request, tokens
        return tokens
