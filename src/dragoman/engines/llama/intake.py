"""From a request to a generation: its prompt read, its sampling complete, its grammar compiled."""

from collections.abc import Sequence

from dragoman.constrain.compiled import Grammars, vocabulary
from dragoman.conversation import GenerationRequest
from dragoman.engines.llama import sampling
from dragoman.engines.llama.binding import Model
from dragoman.engines.llama.drafts import Lookup
from dragoman.engines.llama.generation import Bearings, Generation
from dragoman.engines.reading import Read, Reading
from dragoman.stages.syntax import ModelFormat


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
        self.grammars = Grammars(vocabulary(model.pieces, model.hidden, model.ends, self.inner_tokens))

    def drafts(self, request: GenerationRequest) -> bool:
        """How many rows are decoded together decides how they are rounded, and the clock decides how many are drafted.
        Whoever gives a seed wants the same text again, and chance turns what is rounded away into other words."""
        return self.speculation and request.sampling.seed is None

    def least(self, request: GenerationRequest) -> int:
        return 0 if request.max_tokens == 0 else 1

    def generation(self, request: GenerationRequest, read: Read) -> Generation:
        recipe = sampling.recipe(request.sampling, self.defaults, self.weights.suppressed)
        kept = self.shape(request, opened=read.opener is not None) if self.is_shaped(request) else None
        bearings = Bearings(
            limit=self.limit(request, len(read.tokens)),
            guide=None if kept is None else self.grammars.guide(kept.grammar, kept.param),
            checks=() if kept is None else kept.checks,
            calls=kept is not None and kept.calls,
            budget=self.budget(request, read.opener),
            thinking=read.opener is not None,
            ignored=(*read.ignored, *(() if kept is None else kept.relaxed)),
        )
        # Here, because indexing a long prompt takes its time, and others decode meanwhile.
        lookup = Lookup(read.tokens) if self.drafts(request) else None
        return Generation(request, self.weights, recipe, read.tokens, bearings, lookup)
