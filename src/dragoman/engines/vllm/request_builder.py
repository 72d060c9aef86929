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
7. vLLM applies a grammar from the first token of the reply. So a reply that continues a text cannot be constrained.
8. Batch requests have a lower priority in vLLM, if the operator chose its scheduling policy `priority`.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from dragoman.core.embeddings import Input, map_inputs
from dragoman.core.errors import NotSupported
from dragoman.core.features import Feature
from dragoman.core.request import GenerationRequest, Sampling
from dragoman.engines.prompt_reader import PromptTokens, read_embedding_input
from dragoman.engines.reply_limits import ThinkingBudget
from dragoman.engines.token_engine import RequestBuilder
from dragoman.engines.vllm.generation import VllmGeneration, VllmReplySettings
from dragoman.engines.vllm.loaded_model import LoadedModel
from dragoman.engines.vllm.options import VllmOptions, find_arg
from dragoman.formats import detect_format, get_format
from dragoman.grammar.constraints import CompiledConstraint, ConstraintCompiler
from dragoman.grammar.reply_grammar import ReplyGrammar, constraint_param

SEED_COUNT = 2**32
MIN_TOP_P = 1e-6
"""Replaces 0, which vLLM rejects; it keeps only the most likely token, as 0 should."""
MAX_BIAS = 100.0

INTERACTIVE, BATCH = 0, 1
"""Priorities in vLLM, which runs lower numbers first."""
SAMPLING_PARAMS = frozenset(Sampling.__struct_fields__) - {"seed", "logit_bias"}
"""Parameters that are the same here and in vLLM."""


class VllmRequestBuilder(RequestBuilder[VllmGeneration]):
    def __init__(self, model: LoadedModel, options: VllmOptions, loras: Mapping[str, Any]) -> None:
        """`loras` are vLLM's LoRA requests by model name."""
        vocabulary = model.vocabulary
        syntax = get_format(options.format or detect_format(vocabulary.chat_template, Path(options.path).name))
        super().__init__(vocabulary, model.context, syntax, options.template_options)
        self.loaded = model
        self.options = options
        self.loras = loras
        self.has_priorities = find_arg(options, "scheduling_policy") == "priority"
        defaults: Mapping[str, Any] = model.llm.model_config.get_diff_sampling_param() or {}
        self.defaults = {name: value for name, value in defaults.items() if name in SAMPLING_PARAMS}
        self.constraints = (
            None
            if vocabulary.kind is None
            else ConstraintCompiler(self.grammar_model, vocabulary.pieces, vocabulary.hidden, self.tokenize_inner_text)
        )

    def is_constrained(self, request: GenerationRequest) -> bool:
        """Constrain only if needed: the CPU computes masks between GPU steps, which delays all requests."""
        if not super().is_constrained(request):
            return False
        strict = self.options.strict_tools or any(tool.strict for tool in request.tools)
        return strict or request.constraint is not None or request.tool_choice.mode != "auto"

    async def constrain(self, request: GenerationRequest, prompt: PromptTokens) -> CompiledConstraint | None:
        if self.constraints is None or not self.is_constrained(request):
            return None
        if request.continues_last:
            param = request.prefill_path
            message = (
                f"{param}: this model's engine cannot continue a message together with {constraint_param(request)}"
            )
            raise NotSupported(message, param=param)
        budget = self.create_thinking_budget(request, prompt.opener)
        is_closed = bool(self._head(request, prompt, budget))
        begins = self.grammar_beginning(request, None if is_closed else prompt.opener)
        return await self.constraints.constrain(request, thinks=self.may_think(request), begins=begins)

    def _head(self, request: GenerationRequest, prompt: PromptTokens, budget: ThinkingBudget | None) -> tuple[int, ...]:
        """Tokens that close the reasoning before the model generates."""
        limit = self.max_reply_tokens(request, len(prompt.tokens))
        return () if budget is None else tuple(budget.closing_tokens[:limit])

    def build(
        self, request: GenerationRequest, prompt: PromptTokens, constrained: CompiledConstraint | None = None
    ) -> VllmGeneration:
        budget = self.create_thinking_budget(request, prompt.opener)
        limit = self.max_reply_tokens(request, len(prompt.tokens))
        head = self._head(request, prompt, budget)
        if budget is not None and head:
            budget.mark_closed()
        shape = None if constrained is None else constrained.shape
        has_captures = shape is not None and bool(shape.checks or shape.calls)
        guide = constrained.guide if constrained is not None and has_captures else None
        ignores_budget = budget is not None and bool(request.thinking.budget_tokens) and not head
        settings = VllmReplySettings(
            prompt=prompt.tokens,
            limit=limit,
            head=head,
            logprobs=request.logprobs,
            prompt_text=self.prompt_text(request),
            shows_prompt=request.delivery.token_ids,
            guide=guide,
            checks=() if shape is None else shape.checks,
            calls=shape is not None and shape.calls,
            budget=None if shape is not None else budget,
            thinking=prompt.opener is not None,
            ignored=(*prompt.ignored, *_ignored(request, shape, ignores_budget)),
        )
        built = self.loaded.build_request(
            (*prompt.tokens, *head),
            partial(self._params, request, limit - len(head), shape is not None),
            cache_salt=request.principal if self.options.isolate else None,
            lora=self.loras.get(request.model),
            priority=BATCH if request.priority == "batch" and self.has_priorities else INTERACTIVE,
        )
        if shape is not None:
            structured_outputs = self.loaded.api.structured_outputs(grammar=merge_grammars(shape.grammar))
            # vLLM would set this while validating the grammar, but its validation lacks the model's control tokens.
            structured_outputs._backend = "guidance"
            built.sampling_params.structured_outputs = structured_outputs
        return VllmGeneration(self.loaded.vocabulary, settings, built)

    def _params(self, request: GenerationRequest, limit: int, is_constrained: bool) -> Any:
        sampling, logprobs = request.sampling, request.logprobs
        given = {name: value for name in SAMPLING_PARAMS if (value := getattr(sampling, name)) is not None}
        params = {**self.defaults, **given}
        if "top_p" in params:
            params["top_p"] = max(params["top_p"], MIN_TOP_P)
        bias = {token: max(-MAX_BIAS, min(MAX_BIAS, value)) for token, value in sampling.logit_bias.items()}
        return self.loaded.api.sampling(
            **params,
            seed=None if sampling.seed is None else sampling.seed % SEED_COUNT,
            logit_bias=bias or None,
            stop_token_ids=[] if is_constrained else list(request.stop_token_ids),
            ignore_eos=request.ignore_eos and not is_constrained,
            max_tokens=max(limit, 1),
            logprobs=None if logprobs is None else logprobs.top,
            prompt_logprobs=None if logprobs is None else logprobs.prompt,
            detokenize=False,
            skip_clone=True,
        )


def build_embedding_requests(model: LoadedModel, inputs: Sequence[Input]) -> list[Any]:
    """Return one vLLM request per input, whose pooler returns one vector."""

    def build(entry: Input) -> Any:
        tokens = read_embedding_input(model.vocabulary, entry, model.context)
        return model.build_request(tokens, partial(model.api.pooling, task="embed"), param="input")

    return map_inputs(inputs, build)


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


def _ignored(request: GenerationRequest, shape: ReplyGrammar | None, ignores_budget: bool) -> tuple[str, ...]:
    if shape is None:
        return ()
    stops = ("stop_token_ids",) if request.stop_token_ids else ()
    features = {Feature.LOGPROBS, Feature.PROMPT_LOGPROBS, *([Feature.THINKING] if ignores_budget else [])}
    # `best_of` also asks for log probabilities, but only to compare replies.
    params = [asked.param for asked in request.asked if asked.feature in features and asked.param != "best_of"]
    return (*shape.relaxed, *stops, *params)
