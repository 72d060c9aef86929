"""Builds the template variables other than messages and tools.

enable_thinking, thinking      from a switch or an effort
reasoning_effort               none, minimal, low, medium, high, if the template supports the level
date_string                    today, for templates that would otherwise print the date of their release
documents                      the documents of the request
add_generation_prompt          whether the prompt ends with what comes before a reply
other                          options of the request that the operator allows
"""

from collections.abc import Iterable, Mapping
from typing import Any

from dragoman.core.errors import BadRequest
from dragoman.core.features import Feature
from dragoman.core.request import GenerationRequest, Thinking
from dragoman.prompt.sandbox import CompiledTemplate, strftime_now
from dragoman.prompt.template_messages import Capabilities

SWITCHES = ("enable_thinking", "thinking")
THINKING_VARIABLES = frozenset({*SWITCHES, "reasoning_effort"})


def build_variables(
    request: GenerationRequest,
    compiled: CompiledTemplate,
    capabilities: Capabilities,
    thinks: bool,
    allowed: Iterable[str],
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the variables, and the requested parameters that the template does not support. `thinks`: it supports
    reasoning."""
    options = _requested_options(request, allowed)
    values: dict[str, Any] = {"date_string": strftime_now("%d %b %Y")}
    values |= _thinking_variables(request.thinking, compiled, capabilities) | options
    if request.documents:
        values["documents"] = list(request.documents)
    values["add_generation_prompt"] = request.add_generation_prompt
    known = {name: value for name, value in values.items() if name in compiled.variables}
    lost = [] if request.add_generation_prompt or "add_generation_prompt" in known else ["add_generation_prompt"]
    lost += [f"chat_template_kwargs.{name}" for name in options if name not in known]
    lost += ["documents"] if request.documents and "documents" not in known else []
    return known, (*_ignored_thinking_params(request, known, thinks), *lost)


def _requested_options(request: GenerationRequest, allowed: Iterable[str]) -> dict[str, Any]:
    options = dict(request.template_options)
    for name in options.keys() - set(allowed):
        path = f"chat_template_kwargs.{name}"
        raise BadRequest(f"{path}: this server does not allow requests to set this variable", param=path)
    return options


def _thinking_variables(requested: Thinking, compiled: CompiledTemplate, capabilities: Capabilities) -> dict[str, Any]:
    on = _is_thinking_requested(requested)
    if on is None:
        return {}
    level = "none" if not on else None if requested.effort == "none" else requested.effort
    if level == "minimal" and level not in capabilities.effort_levels:
        level = "low"
    if level is None and "none" in capabilities.effort_levels and compiled.variables.isdisjoint(SWITCHES):
        # This template has no other switch and does not reason by default.
        level = "high"
    variables: dict[str, Any] = dict.fromkeys(SWITCHES, on)
    return variables | ({"reasoning_effort": level} if level in capabilities.effort_levels else {})


def _is_thinking_requested(requested: Thinking) -> bool | None:
    """None if the request does not say."""
    return None if requested.enabled is None and requested.effort is None else not requested.is_off


def _ignored_thinking_params(request: GenerationRequest, known: Mapping[str, Any], thinks: bool) -> list[str]:
    """Return the reasoning parameters that have no effect. Disabling reasoning and limiting it always work, because the
    engine closes the reasoning itself."""
    if not _is_thinking_requested(request.thinking):
        return []
    params = [requested.param for requested in request.asked if requested.feature == Feature.THINKING]
    efforts = [param for param in params if "effort" in param]
    switches = [param for param in params if param not in efforts and not ("budget" in param or "max_" in param)]
    lost = [] if "reasoning_effort" in known or request.thinking.effort is None else efforts
    return lost if thinks else [*lost, *switches]
