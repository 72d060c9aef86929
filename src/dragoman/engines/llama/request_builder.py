"""Builds a generation from a request: reads the prompt, compiles the grammar and completes the sampling parameters."""

from collections.abc import Sequence

from dragoman.core.request import GenerationRequest
from dragoman.engines.llama.binding import LlamaModel
from dragoman.engines.llama.generation import Generation, GenerationParams
from dragoman.engines.llama.sampling import complete_sampling, default_sampling
from dragoman.engines.llama.speculation import DraftLookup
from dragoman.engines.prompt_reader import PromptReader, PromptTokens
from dragoman.formats.syntax import ModelFormat
from dragoman.grammar.constraints import CompiledConstraint, ConstraintCompiler


class LlamaRequestBuilder(PromptReader):
    def __init__(
        self,
        model: LlamaModel,
        context: int,
        syntax: ModelFormat,
        template_options: Sequence[str] = (),
        *,
        speculation: bool = False,
    ) -> None:
        super().__init__(model, context, syntax, template_options)
        self.weights = model
        self.speculation = speculation
        self.defaults = default_sampling(model.metadata)
        self.constraints = ConstraintCompiler(self.speaker, model.pieces, model.hidden, self.tokenize_inner_text)

    def drafts(self, request: GenerationRequest) -> bool:
        """Whether to draft tokens. Drafts change the rounding of logits, so a request with a seed has none."""
        return self.speculation and request.sampling.seed is None

    def least(self, request: GenerationRequest) -> int:
        return 0 if request.max_tokens == 0 else 1

    async def constrain(self, request: GenerationRequest, read: PromptTokens) -> CompiledConstraint | None:
        """Compile the constraint on the reply. Runs in the event loop and leaves the work to processes and threads."""
        if not self.is_constrained(request):
            return None
        thinks, opened = self.may_think(request), read.opener is not None
        return await self.constraints.constrain(request, thinks=thinks, opened=opened)

    def generation(
        self, request: GenerationRequest, read: PromptTokens, constrained: CompiledConstraint | None = None
    ) -> Generation:
        sampling = complete_sampling(request.sampling, self.defaults, self.weights.suppressed)
        shape = None if constrained is None else constrained.shape
        params = GenerationParams(
            limit=self.limit(request, len(read.tokens)),
            guide=None if constrained is None else constrained.guide,
            checks=() if shape is None else shape.checks,
            calls=shape is not None and shape.calls,
            budget=self.budget(request, read.opener),
            thinking=read.opener is not None,
            ignored=(*read.ignored, *(() if shape is None else shape.relaxed)),
        )
        # Indexing a long prompt takes time, so it is done here and not in the runner's thread.
        lookup = DraftLookup(read.tokens) if self.drafts(request) else None
        return Generation(request, self.weights, sampling, read.tokens, params, lookup)
