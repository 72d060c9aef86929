"""Builds vLLM requests. Runs in threads, not the event loop.

Rules
1. Sampling defaults come from the model's generation config, then from vLLM.
2. vLLM validates a request; a rejected one is a 400. Grammars are tried and compiled here first, and vLLM's llguidance
   then enforces them.
3. A constrained reply ends where its grammar ends: stop tokens and `ignore_eos` do not apply.
4. Optional tools that are not strict do not constrain the reply unless the option `strict_tools` is set.
5. A thinking budget of 0 is applied by closing the reasoning in the prompt. In a constrained reply, a larger budget is
   reported as ignored.
6. vLLM masks disallowed tokens before it computes log probabilities, so those of a constrained reply are not the
   model's own. They are returned and reported as ignored.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from dragoman.core.errors import BadRequest
from dragoman.core.request import GenerationRequest, Sampling
from dragoman.engines.prompt_reader import PromptReader, PromptTokens
from dragoman.engines.vllm.generation import ReplySettings, VllmGeneration
from dragoman.engines.vllm.vllm_api import VllmApi
from dragoman.engines.vllm.vocabulary import HfVocabulary
from dragoman.formats.syntax import ModelFormat
from dragoman.grammar.constraints import CompiledConstraint, ConstraintCompiler
from dragoman.grammar.reply_grammar import ReplyGrammar

SEED_COUNT = 2**32
MIN_TOP_P = 1e-6
"""Replaces 0, which vLLM rejects; it keeps only the most likely token, as 0 should."""
MAX_BIAS = 100.0

SAMPLING_PARAMS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
"""Parameters with the same name here and in vLLM."""


class VllmRequestBuilder(PromptReader):
    def __init__(
        self,
        api: VllmApi,
        processor: Any,
        tasks: Sequence[str],
        vocabulary: HfVocabulary,
        context: int,
        syntax: ModelFormat,
        template_options: Sequence[str],
        *,
        defaults: Mapping[str, Any],
        loras: Mapping[str, Any],
        isolate: bool,
        strict_tools: bool,
    ) -> None:
        """`loras` are vLLM's adapter objects by model name."""
        super().__init__(vocabulary, context, syntax, template_options)
        self.api = api
        self.processor = processor
        self.tasks = tuple(tasks)
        self.vocabulary = vocabulary
        self.defaults = {name: value for name, value in defaults.items() if name in SAMPLING_PARAMS}
        self.loras = loras
        self.isolate = isolate
        self.strict_tools = strict_tools
        self.ids = itertools.count()
        self.constraints = (
            None
            if vocabulary.kind is None
            else ConstraintCompiler(self.speaker, vocabulary.pieces, vocabulary.hidden, self.tokenize_inner_text)
        )

    def is_constrained(self, request: GenerationRequest) -> bool:
        """Constrain only if needed: the CPU computes masks between GPU steps, which delays all requests."""
        if not super().is_constrained(request):
            return False
        strict = self.strict_tools or any(tool.strict for tool in request.tools)
        return strict or request.constraint is not None or request.tool_choice.mode != "auto"

    def read_and_build(self, key: int, request: GenerationRequest) -> VllmGeneration:
        return self.build(key, request, self.read(request))

    async def constrain(self, request: GenerationRequest, prompt: PromptTokens) -> CompiledConstraint | None:
        """Compile the constraint. Runs in the event loop; other processes and threads do the work."""
        if self.constraints is None or not self.is_constrained(request):
            return None
        opened = prompt.opener is not None and not self._head(request, prompt)
        return await self.constraints.constrain(request, thinks=self.may_think(request), opened=opened)

    def _head(self, request: GenerationRequest, prompt: PromptTokens) -> tuple[int, ...]:
        """Tokens that close the reasoning before the model generates."""
        budget = self.budget(request, prompt.opener)
        return () if budget is None else tuple(budget.closing[: self.limit(request, len(prompt.tokens))])

    def build(
        self, key: int, request: GenerationRequest, prompt: PromptTokens, constrained: CompiledConstraint | None = None
    ) -> VllmGeneration:
        budget = self.budget(request, prompt.opener)
        limit = self.limit(request, len(prompt.tokens))
        head = self._head(request, prompt)
        if budget is not None and head:
            budget.closed()
        shape = None if constrained is None else constrained.shape
        has_captures = shape is not None and bool(shape.checks or shape.calls)
        guide = constrained.guide if constrained is not None and has_captures else None
        ignores_budget = shape is not None and budget is not None and request.thinking.budget_tokens and not head
        logprobs = request.logprobs
        settings = ReplySettings(
            prompt=prompt.tokens,
            limit=limit,
            head=head,
            top=None if logprobs is None else logprobs.top,
            prompt_top=None if logprobs is None or not logprobs.prompt else logprobs.top,
            prompt_text=self._prompt_text(request) if request.echo else None,
            guide=guide,
            checks=() if shape is None else shape.checks,
            calls=shape is not None and shape.calls,
            budget=None if shape is not None else budget,
            thinking=prompt.opener is not None,
            ignored=(*prompt.ignored, *_ignored(request, shape, bool(ignores_budget))),
        )
        vllm_request = self._build_request(request, (*prompt.tokens, *head), limit - len(head), settings, shape)
        return VllmGeneration(key, self.vocabulary, settings, vllm_request)

    def resume(self, generation: VllmGeneration) -> Any:
        """Return the vLLM request that continues after the tokens that close the reasoning."""
        request = generation.request
        params = request.sampling_params
        params.max_tokens = max(generation.settings.limit - generation.count, 1)
        # The log probabilities of the prompt have been delivered.
        params.prompt_logprobs = None
        request.request_id = str(next(self.ids))
        request.prompt_token_ids = [*generation.settings.prompt, *generation.reply_tokens]
        return request

    def _prompt_text(self, request: GenerationRequest) -> str | None:
        prompt = request.prompt
        return self.model.detokenize(prompt) if isinstance(prompt, tuple) else prompt

    def _build_request(
        self,
        request: GenerationRequest,
        prompt: Sequence[int],
        limit: int,
        settings: ReplySettings,
        shape: ReplyGrammar | None,
    ) -> Any:
        salt = request.principal if self.isolate else None
        try:
            built = self.processor.process_inputs(
                str(next(self.ids)),
                self.api.tokens_input(list(prompt), cache_salt=salt),
                self._params(request, limit, settings, shape),
                supported_tasks=self.tasks,
                lora_request=self.loras.get(request.model),
            )
        except self.api.request_errors as error:
            raise BadRequest(str(error), param=getattr(error, "parameter", None)) from error
        if shape is not None:
            structured_outputs = self.api.structured_outputs(grammar=merge_grammars(shape.grammar))
            # vLLM would set this while validating the grammar, but its validation lacks the model's control tokens.
            structured_outputs._backend = "guidance"
            built.sampling_params.structured_outputs = structured_outputs
        return built

    def _params(
        self, request: GenerationRequest, limit: int, settings: ReplySettings, shape: ReplyGrammar | None
    ) -> Any:
        params = {**self.defaults, **_given_params(request.sampling)}
        if "top_p" in params:
            params["top_p"] = max(params["top_p"], MIN_TOP_P)
        return self.api.sampling(
            **params,
            seed=None if request.sampling.seed is None else request.sampling.seed % SEED_COUNT,
            logit_bias=_clamp_bias(request.sampling),
            stop_token_ids=list(request.stop_token_ids) if shape is None else [],
            ignore_eos=request.ignore_eos and shape is None,
            max_tokens=max(limit, 1),
            logprobs=settings.top,
            prompt_logprobs=settings.prompt_top,
            detokenize=False,
            skip_clone=True,
        )


def merge_grammars(grammar: str) -> str:
    """Merge several grammars into one Lark grammar, as vLLM requires. The client's grammar is nested in ours."""
    if not grammar.startswith("{"):
        return grammar
    first, *others = msgspec.json.decode(grammar)["grammars"]
    text: str = first["lark_grammar"]
    for other in others:
        name = f"callers_{other['name']}"
        text = text.replace(f"@{other['name']}", name) + f"\n{name}: %lark {{\n{other['lark_grammar']}\n}}\n"
    return text


def _given_params(sampling: Sampling) -> dict[str, Any]:
    values = msgspec.structs.asdict(sampling)
    return {name: values[name] for name in SAMPLING_PARAMS if values[name] is not None}


def _clamp_bias(sampling: Sampling) -> dict[int, float] | None:
    bias = {token: max(-MAX_BIAS, min(MAX_BIAS, value)) for token, value in sampling.logit_bias.items()}
    return bias or None


def _ignored(request: GenerationRequest, shape: ReplyGrammar | None, ignores_budget: bool) -> tuple[str, ...]:
    if shape is None:
        return ()
    stops = ("stop_token_ids",) if request.stop_token_ids else ()
    budgets = [asked.param for asked in request.asked if asked.feature == "thinking"] if ignores_budget else []
    return (*shape.relaxed, *stops, *budgets, *_masked_logprobs(request))


def _masked_logprobs(request: GenerationRequest) -> list[str]:
    """The request fields that ask for log probabilities. `best_of` only compares replies, so it does not count."""
    asked = [asked for asked in request.asked if asked.feature in ("logprobs", "prompt_logprobs")]
    return [entry.param for entry in asked if entry.param != "best_of"]
