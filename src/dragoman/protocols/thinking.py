"""Decodes the fields that control reasoning. Servers use different names for them; all are accepted.

    switch := enable_thinking | chat_template_kwargs.enable_thinking | chat_template_kwargs.thinking
            | thinking.type | reasoning.enabled
    effort := reasoning_effort | chat_template_kwargs.reasoning_effort | reasoning.effort | output_config.effort
    budget := thinking_budget | thinking_token_budget | reasoning_budget | chat_template_kwargs.thinking_budget
            | thinking.budget_tokens | reasoning.max_tokens

Rules
1. If several fields set the same thing, the first in this order counts.
2. A switch overrides a contradicting effort or budget.
3. Without a switch, effort `none` or a budget of 0 turns thinking off.
4. A budget of -1 means unlimited, and `adaptive` leaves the decision to the model: neither requests anything.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec

from dragoman.core.features import Feature
from dragoman.core.request import Asked, Thinking
from dragoman.protocols import json_body

EffortField = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
Budget = Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)]


class ReasoningSwitch(msgspec.Struct, frozen=True):
    effort: EffortField | None = None
    max_tokens: Budget | None = None
    enabled: bool | None = None
    exclude: bool | None = None


class ThinkingSwitch(msgspec.Struct, frozen=True):
    type: Literal["enabled", "disabled", "adaptive"] | None = None
    budget_tokens: Budget | None = None


class TemplateSwitches(msgspec.Struct, frozen=True):
    """The chat template variables that control thinking."""

    enable_thinking: bool | None = None
    thinking: bool | None = None
    reasoning_effort: EffortField | None = None
    thinking_budget: Budget | None = None


class ThinkingFields(msgspec.Struct, frozen=True):
    reasoning_effort: EffortField | None = None
    reasoning: ReasoningSwitch | None = None
    thinking: ThinkingSwitch | None = None
    thinking_budget: Budget | None = None
    thinking_token_budget: Budget | None = None
    reasoning_budget: Budget | None = None
    enable_thinking: bool | None = None
    chat_template_kwargs: TemplateSwitches | None = None


FIELDS = frozenset(ThinkingFields.__struct_fields__)
SWITCHES = (
    "enable_thinking",
    "chat_template_kwargs.enable_thinking",
    "chat_template_kwargs.thinking",
    "thinking.type",
    "reasoning.enabled",
)
EFFORTS = ("reasoning_effort", "chat_template_kwargs.reasoning_effort", "reasoning.effort", "output_config.effort")
BUDGETS = (
    "thinking_budget",
    "thinking_token_budget",
    "reasoning_budget",
    "chat_template_kwargs.thinking_budget",
    "thinking.budget_tokens",
    "reasoning.max_tokens",
)
NORMALIZED: dict[object, Any] = {
    "enabled": True,
    "disabled": False,
    "adaptive": None,
    "between_tools": None,
    "xhigh": "high",
    "max": "high",
    -1: None,
}
"""Wire values that are replaced by another value."""


def decode(parsed: dict[str, Any], asked: list[Asked]) -> Thinking:
    if parsed.keys().isdisjoint(FIELDS):
        return Thinking()
    json_body.convert(parsed, ThinkingFields)
    thinking = resolve(parsed, asked)
    if json_body.get_path(parsed, "reasoning.exclude"):
        asked.append(Asked(Feature.UNKNOWN, "reasoning.exclude"))
    return thinking


def resolve(parsed: dict[str, Any], asked: list[Asked]) -> Thinking:
    """Apply the rules to fields that have been checked."""
    switch = _first(parsed, SWITCHES, asked)
    effort = _first(parsed, EFFORTS, asked)
    budget = _first(parsed, BUDGETS, asked)
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
    """Return the first value that is set. Every path with a value is added to `asked`."""
    values = {path: NORMALIZED.get(value := json_body.get_path(parsed, path), value) for path in paths}
    found = [path for path in paths if values[path] is not None]
    asked += [Asked(Feature.THINKING, path) for path in found]
    return values[found[0]] if found else None
