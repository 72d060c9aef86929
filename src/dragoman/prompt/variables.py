"""What a template is told besides messages and tools: how to think, the date, what an operator lets requests set.

switch  enable_thinking, thinking      from a switch, or from an effort
level   reasoning_effort               none, minimal, low, medium, high, where the template takes it
date    date_string                    today, for templates that would otherwise print the day they were made
texts   documents                      what the answer is to be taken from
"""

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from dragoman.core.errors import BadRequest
from dragoman.core.request import GenerationRequest, Thinking
from dragoman.prompt.sandbox import Compiled, strftime_now
from dragoman.prompt.template_capabilities import Habits

SWITCHES = ("enable_thinking", "thinking")
ABOUT_THINKING = frozenset({*SWITCHES, "reasoning_effort"})


class Variables(msgspec.Struct, frozen=True):
    given: Mapping[str, Any]
    ignored: tuple[str, ...]


def variables(
    request: GenerationRequest, compiled: Compiled, habits: Habits, thinks: bool, allowed: Iterable[str]
) -> Variables:
    """`thinks`: the template knows of thoughts."""
    options = _options(request, allowed)
    given = {"date_string": strftime_now("%d %b %Y")} | _thinking(request.thinking, compiled, habits) | options
    if request.documents:
        given["documents"] = list(request.documents)
    known = {name: value for name, value in given.items() if name in compiled.variables}
    lost = [f"chat_template_kwargs.{name}" for name in options if name not in known]
    lost += ["documents"] if request.documents and "documents" not in known else []
    return Variables(known, (*_unheard(request, known, thinks), *lost))


def _options(request: GenerationRequest, allowed: Iterable[str]) -> dict[str, Any]:
    options = dict(request.template_options)
    for name in options.keys() - set(allowed):
        path = f"chat_template_kwargs.{name}"
        raise BadRequest(f"{path}: the operator of this server does not let requests set this", param=path)
    return options


def _thinking(asked: Thinking, compiled: Compiled, habits: Habits) -> dict[str, Any]:
    on = _switched(asked)
    if on is None:
        return {}
    level = "none" if not on else None if asked.effort == "none" else asked.effort
    if level == "minimal" and level not in habits.levels:
        level = "low"
    if level is None and "none" in habits.levels and compiled.variables.isdisjoint(SWITCHES):
        # Such a template has no other switch, and does not think unless it is told to.
        level = "high"
    told: dict[str, Any] = dict.fromkeys(SWITCHES, on)
    return told | ({"reasoning_effort": level} if level in habits.levels else {})


def _switched(asked: Thinking) -> bool | None:
    """None: the request leaves it to the model."""
    return None if asked.enabled is None and asked.effort is None else not asked.is_off


def _unheard(request: GenerationRequest, known: Mapping[str, Any], thinks: bool) -> list[str]:
    """Not to think is always possible: where the template has no switch, the engine closes the thought at once. And
    no thought is longer than its budget."""
    if not _switched(request.thinking):
        return []
    params = [asked.param for asked in request.asked if asked.feature == "thinking"]
    efforts = [param for param in params if "effort" in param]
    switches = [param for param in params if param not in efforts and not ("budget" in param or "max_" in param)]
    lost = [] if "reasoning_effort" in known or request.thinking.effort is None else efforts
    return lost if thinks else [*lost, *switches]
