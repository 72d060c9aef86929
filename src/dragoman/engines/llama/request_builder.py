"""From a request to a generation: its prompt read, its grammar compiled, its sampling complete."""

from collections.abc import Sequence

from dragoman.core.request import GenerationRequest
from dragoman.engines.llama import sampling
from dragoman.engines.llama.binding import Model
from dragoman.engines.llama.generation import Bearings, Generation
from dragoman.engines.llama.speculation import Lookup
from dragoman.engines.prompt_reader import Read, Reading
from dragoman.formats.syntax import ModelFormat
from dragoman.grammar.constraints import Constrained, Constraints


class Intake(Reading):
    def __init__(
        self,
        model: Model,
        context: int,
        syntax: ModelFormat,
        template_options: Sequence[str] = (),
        *,
        speculation: bool = False,
    ) -> None:
        super().__init__(model, context, syntax, template_options)
        self.weights = model
        self.speculation = speculation
        self.defaults = sampling.defaults(model.metadata)
        self.constraints = Constraints(self.speaker, model.pieces, model.hidden, self.inner_tokens)

    def drafts(self, request: GenerationRequest) -> bool:
        """How many rows are decoded together decides how they are rounded, and the clock decides how many are drafted.
        Whoever gives a seed wants the same text again, and chance turns what is rounded away into other words."""
        return self.speculation and request.sampling.seed is None

    def least(self, request: GenerationRequest) -> int:
        return 0 if request.max_tokens == 0 else 1

    async def constrain(self, request: GenerationRequest, read: Read) -> Constrained | None:
        """The compiled constraint on the reply. Runs in the event loop; other processes and threads do the work."""
        if not self.is_shaped(request):
            return None
        thinks, opened = self.may_think(request), read.opener is not None
        return await self.constraints.constrain(request, thinks=thinks, opened=opened)

    def generation(self, request: GenerationRequest, read: Read, constrained: Constrained | None = None) -> Generation:
        recipe = sampling.recipe(request.sampling, self.defaults, self.weights.suppressed)
        kept = None if constrained is None else constrained.shape
        bearings = Bearings(
            limit=self.limit(request, len(read.tokens)),
            guide=None if constrained is None else constrained.guide,
            checks=() if kept is None else kept.checks,
            calls=kept is not None and kept.calls,
            budget=self.budget(request, read.opener),
            thinking=read.opener is not None,
            ignored=(*read.ignored, *(() if kept is None else kept.relaxed)),
        )
        # Here, because indexing a long prompt takes its time, and others decode meanwhile.
        lookup = Lookup(read.tokens) if self.drafts(request) else None
        return Generation(request, self.weights, recipe, read.tokens, bearings, lookup)
