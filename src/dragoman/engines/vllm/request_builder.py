"""From a request to what vLLM's engine takes. Never runs in the event loop.

Rules
1. What a request leaves open comes from the folder's generation settings, then from vLLM's own defaults.
2. vLLM checks what it is given, and what it refuses is a 400. A grammar is tried and compiled here before vLLM sees it:
   vLLM compiles only grammars that passed a trial. vLLM's llguidance then enforces them.
3. A reply that is kept to a shape ends where the shape does: neither stop tokens nor `ignore_eos` change that.
4. Tools that may be called and are not strict shape nothing, unless the operator wants that: the model writes its calls
   as it has learnt to.
5. A thought whose budget is 0 is closed in the prompt. Where a reply is kept to a shape, a larger one is
   named among what was ignored.
6. vLLM takes away what a shape does not allow before it computes log probabilities: those of such a reply are among
   what is allowed, not the model's own. They are given, and whoever asked for them is told.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from dragoman.core.errors import BadRequest
from dragoman.core.request import GenerationRequest, Sampling
from dragoman.engines.prompt_reader import Read, Reading
from dragoman.engines.vllm.generation import Bearings, Work
from dragoman.engines.vllm.vllm_api import Parts
from dragoman.engines.vllm.vocabulary import Tokens
from dragoman.formats.syntax import ModelFormat
from dragoman.grammar.constraints import Constrained, Constraints
from dragoman.grammar.reply_grammar import Shape

SEEDS = 2**32
LEAST_TOP_P = 1e-6
"""vLLM takes no 0; so little leaves the likeliest token, as 0 should."""
GREATEST_BIAS = 100.0

SAMPLED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
"""Called the same here and there."""


class Intake(Reading):
    def __init__(
        self,
        parts: Parts,
        processor: Any,
        tasks: Sequence[str],
        model: Tokens,
        context: int,
        syntax: ModelFormat,
        template_options: Sequence[str],
        *,
        defaults: Mapping[str, Any],
        loras: Mapping[str, Any],
        isolate: bool,
        strict_tools: bool,
    ) -> None:
        """`loras` are vLLM's values for the adapters, by the name of the model that each makes."""
        super().__init__(model, context, syntax, template_options)
        self.parts = parts
        self.processor = processor
        self.tasks = tuple(tasks)
        self.tokens = model
        self.defaults = {name: value for name, value in defaults.items() if name in SAMPLED}
        self.loras = loras
        self.isolate = isolate
        self.strict_tools = strict_tools
        self.ids = itertools.count()
        self.constraints = (
            None if model.kind is None else Constraints(self.speaker, model.pieces, model.hidden, self.inner_tokens)
        )

    def is_shaped(self, request: GenerationRequest) -> bool:
        """Masks are made by the processor between two steps of the GPU, for each token: all wait for those of one."""
        if not super().is_shaped(request):
            return False
        strict = self.strict_tools or any(tool.strict for tool in request.tools)
        return strict or request.constraint is not None or request.tool_choice.mode != "auto"

    def read_work(self, key: int, request: GenerationRequest) -> Work:
        """Both steps in one."""
        return self.work(key, request, self.read(request))

    async def constrain(self, request: GenerationRequest, read: Read) -> Constrained | None:
        """The compiled constraint on the reply. Runs in the event loop; other processes and threads do the work."""
        if self.constraints is None or not self.is_shaped(request):
            return None
        opened = read.opener is not None and not self._head(request, read)
        return await self.constraints.constrain(request, thinks=self.may_think(request), opened=opened)

    def _head(self, request: GenerationRequest, read: Read) -> tuple[int, ...]:
        """Tokens that close a thought before the model generates."""
        budget = self.budget(request, read.opener)
        return () if budget is None else tuple(budget.closing[: self.limit(request, len(read.tokens))])

    def work(self, key: int, request: GenerationRequest, read: Read, constrained: Constrained | None = None) -> Work:
        budget = self.budget(request, read.opener)
        limit = self.limit(request, len(read.tokens))
        head = self._head(request, read)
        if budget is not None and head:
            budget.closed()
        kept = None if constrained is None else constrained.shape
        has_captures = kept is not None and bool(kept.checks or kept.calls)
        guide = constrained.guide if constrained is not None and has_captures else None
        shaped_thought = kept is not None and budget is not None and request.thinking.budget_tokens and not head
        logprobs = request.logprobs
        bearings = Bearings(
            prompt=read.tokens,
            limit=limit,
            head=head,
            top=None if logprobs is None else logprobs.top,
            prompt_top=None if logprobs is None or not logprobs.prompt else logprobs.top,
            prompt_text=self._prompt_text(request) if request.echo else None,
            guide=guide,
            checks=() if kept is None else kept.checks,
            calls=kept is not None and kept.calls,
            budget=None if kept is not None else budget,
            thinking=read.opener is not None,
            ignored=(*read.ignored, *_ignored(request, kept, bool(shaped_thought))),
        )
        made = self._request(request, (*read.tokens, *head), limit - len(head), bearings, kept)
        return Work(key, self.tokens, bearings, made)

    def resumed(self, work: Work) -> Any:
        """What vLLM is given to go on behind the tokens that close a thought."""
        before = work.request
        params = before.sampling_params
        params.max_tokens = max(work.bearings.limit - work.count, 1)
        # What the prompt's tokens were worth has been told.
        params.prompt_logprobs = None
        before.request_id = self._id()
        before.prompt_token_ids = [*work.bearings.prompt, *work.said]
        return before

    def _id(self) -> str:
        return str(next(self.ids))

    def _prompt_text(self, request: GenerationRequest) -> str | None:
        prompt = request.prompt
        return self.model.detokenize(prompt) if isinstance(prompt, tuple) else prompt

    def _request(
        self, request: GenerationRequest, prompt: Sequence[int], limit: int, bearings: Bearings, kept: Shape | None
    ) -> Any:
        salt = request.principal if self.isolate else None
        try:
            made = self.processor.process_inputs(
                self._id(),
                self.parts.tokens_input(list(prompt), cache_salt=salt),
                self._params(request, limit, bearings, kept),
                supported_tasks=self.tasks,
                lora_request=self.loras.get(request.model),
            )
        except self.parts.refusals as error:
            raise BadRequest(str(error), param=getattr(error, "parameter", None)) from error
        if kept is not None:
            made.sampling_params.structured_outputs = self._shape_for_vllm(kept)
        return made

    def _params(self, request: GenerationRequest, limit: int, bearings: Bearings, kept: Shape | None) -> Any:
        asked = {**self.defaults, **_asked(request.sampling)}
        if "top_p" in asked:
            asked["top_p"] = max(asked["top_p"], LEAST_TOP_P)
        return self.parts.sampling(
            **asked,
            seed=None if request.sampling.seed is None else request.sampling.seed % SEEDS,
            logit_bias=_bias(request.sampling),
            stop_token_ids=list(request.stop_token_ids) if kept is None else [],
            ignore_eos=request.ignore_eos and kept is None,
            max_tokens=max(limit, 1),
            logprobs=bearings.top,
            prompt_logprobs=bearings.prompt_top,
            detokenize=False,
            skip_clone=True,
        )

    def _shape_for_vllm(self, kept: Shape) -> Any:
        shape = self.parts.shape(grammar=in_one(kept.grammar))
        # What vLLM would choose and set while it checks the grammar, which it cannot: it does not know the model's
        # control tokens there.
        shape._backend = "guidance"
        return shape


def in_one(grammar: str) -> str:
    """One grammar in Lark's notation, which is what vLLM takes: the caller's own one is put inside ours."""
    if not grammar.startswith("{"):
        return grammar
    first, *others = msgspec.json.decode(grammar)["grammars"]
    text: str = first["lark_grammar"]
    for other in others:
        name = f"callers_{other['name']}"
        text = text.replace(f"@{other['name']}", name) + f"\n{name}: %lark {{\n{other['lark_grammar']}\n}}\n"
    return text


def _asked(sampling: Sampling) -> dict[str, Any]:
    values = msgspec.structs.asdict(sampling)
    return {name: values[name] for name in SAMPLED if values[name] is not None}


def _bias(sampling: Sampling) -> dict[int, float] | None:
    bias = {token: max(-GREATEST_BIAS, min(GREATEST_BIAS, value)) for token, value in sampling.logit_bias.items()}
    return bias or None


def _ignored(request: GenerationRequest, kept: Shape | None, thought: bool) -> tuple[str, ...]:
    if kept is None:
        return ()
    stops = ("stop_token_ids",) if request.stop_token_ids else ()
    budgets = [asked.param for asked in request.asked if asked.feature == "thinking"] if thought else []
    return (*kept.relaxed, *stops, *budgets, *_masked_logprobs(request))


def _masked_logprobs(request: GenerationRequest) -> list[str]:
    """The fields that asked for log probabilities, of which those that only compare replies do not count."""
    wanted = [asked for asked in request.asked if asked.feature in ("logprobs", "prompt_logprobs")]
    return [asked.param for asked in wanted if asked.param != "best_of"]
