"""How a caller says how much a model may think. Every server has words of its own for that; here all of them do.

    switch := enable_thinking | chat_template_kwargs.enable_thinking | chat_template_kwargs.thinking
            | thinking.type | reasoning.enabled
    effort := reasoning_effort | chat_template_kwargs.reasoning_effort | reasoning.effort
    budget := thinking_budget | thinking_token_budget | reasoning_budget | chat_template_kwargs.thinking_budget
            | thinking.budget_tokens | reasoning.max_tokens

Rules
1. Of several words for the same thing the first in this order counts.
2. A switch wins over an effort and a budget that say otherwise.
3. Effort `none` and a budget of 0 switch thinking off where no switch says anything.
4. A budget of -1 is none, and `adaptive` leaves it to the model: they ask for nothing.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec

from dragoman.core.request import Asked, Thinking
from dragoman.protocols import json_body

EffortField = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
Budget = Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)]


class ReasoningField(msgspec.Struct, frozen=True):
    effort: EffortField | None = None
    max_tokens: Budget | None = None
    enabled: bool | None = None
    exclude: bool | None = None


class ThinkingField(msgspec.Struct, frozen=True):
    type: Literal["enabled", "disabled", "adaptive"] | None = None
    budget_tokens: Budget | None = None


class TemplateSwitches(msgspec.Struct, frozen=True):
    """The variables of chat templates that are about thinking."""

    enable_thinking: bool | None = None
    thinking: bool | None = None
    reasoning_effort: EffortField | None = None
    thinking_budget: Budget | None = None


class ThinkingFields(msgspec.Struct, frozen=True):
    reasoning_effort: EffortField | None = None
    reasoning: ReasoningField | None = None
    thinking: ThinkingField | None = None
    thinking_budget: Budget | None = None
    thinking_token_budget: Budget | None = None
    reasoning_budget: Budget | None = None
    enable_thinking: bool | None = None
    chat_template_kwargs: TemplateSwitches | None = None


FIELDS = frozenset(ThinkingFields.__struct_fields__)
UNSAID = Thinking()

SWITCHES = (
    "enable_thinking",
    "chat_template_kwargs.enable_thinking",
    "chat_template_kwargs.thinking",
    "thinking.type",
    "reasoning.enabled",
)
EFFORTS = ("reasoning_effort", "chat_template_kwargs.reasoning_effort", "reasoning.effort")
BUDGETS = (
    "thinking_budget",
    "thinking_token_budget",
    "reasoning_budget",
    "chat_template_kwargs.thinking_budget",
    "thinking.budget_tokens",
    "reasoning.max_tokens",
)
MEANINGS: dict[object, Any] = {"enabled": True, "disabled": False, "adaptive": None, "xhigh": "high", -1: None}
"""Values that stand for another."""


def decode(parsed: dict[str, Any], asked: list[Asked]) -> Thinking:
    if parsed.keys().isdisjoint(FIELDS):
        return UNSAID
    json_body.convert(parsed, ThinkingFields)
    switch = _first(parsed, SWITCHES, asked)
    effort = _first(parsed, EFFORTS, asked)
    budget = _first(parsed, BUDGETS, asked)
    if json_body.at(parsed, "reasoning.exclude"):
        asked.append(Asked("unknown", "reasoning.exclude"))
    if switch is None and (effort == "none" or budget == 0):
        switch = False
    if switch is None:
        return Thinking(effort=effort, budget_tokens=budget)
    return Thinking(
        enabled=switch,
        effort=effort if switch is (effort != "none") else None,
        budget_tokens=budget if switch is (budget != 0) else None,
    )


def _first(parsed: dict[str, Any], paths: Sequence[str], asked: list[Asked]) -> Any:
    """The first value that says something. All that do are asked for."""
    values = {path: json_body.at(parsed, path) for path in paths}
    said = {path: MEANINGS.get(value, value) for path, value in values.items()}
    telling = [path for path in paths if said[path] is not None]
    asked += [Asked("thinking", path) for path in telling]
    return said[telling[0]] if telling else None
