"""Decoding of the fields that control reasoning."""

from functools import partial
from typing import Any

import pytest

from dragoman.core.request import Thinking
from tests.protocols import wire
from tests.protocols.wire import features, invalid, rejected_param

decode = partial(wire.decode, "chat")


KWARGS = "chat_template_kwargs"
CASES: list[tuple[dict[str, Any], Thinking, list[str]]] = [
    ({}, Thinking(), []),
    ({"reasoning_effort": "low"}, Thinking(effort="low"), ["reasoning_effort"]),
    ({"reasoning_effort": "xhigh"}, Thinking(effort="high"), ["reasoning_effort"]),
    ({"reasoning_effort": "none"}, Thinking(enabled=False, effort="none"), ["reasoning_effort"]),
    ({"reasoning": {"effort": "minimal"}}, Thinking(effort="minimal"), ["reasoning.effort"]),
    ({"reasoning": {"max_tokens": 9}}, Thinking(budget_tokens=9), ["reasoning.max_tokens"]),
    ({"reasoning": {"enabled": True, "effort": None}}, Thinking(enabled=True), ["reasoning.enabled"]),
    (
        {"thinking": {"type": "enabled", "budget_tokens": 9}},
        Thinking(enabled=True, budget_tokens=9),
        ["thinking.type", "thinking.budget_tokens"],
    ),
    ({"thinking": {"type": "disabled"}}, Thinking(enabled=False), ["thinking.type"]),
    ({"thinking": {"type": "adaptive"}}, Thinking(), []),
    ({"thinking_budget": 9}, Thinking(budget_tokens=9), ["thinking_budget"]),
    ({"thinking_token_budget": 9}, Thinking(budget_tokens=9), ["thinking_token_budget"]),
    ({"reasoning_budget": 9}, Thinking(budget_tokens=9), ["reasoning_budget"]),
    ({"reasoning_budget": -1}, Thinking(), []),
    ({"reasoning_budget": 0}, Thinking(enabled=False, budget_tokens=0), ["reasoning_budget"]),
    ({"enable_thinking": False}, Thinking(enabled=False), ["enable_thinking"]),
    ({"enable_thinking": None}, Thinking(), []),
    ({KWARGS: {"enable_thinking": True}}, Thinking(enabled=True), [f"{KWARGS}.enable_thinking"]),
    ({KWARGS: {"thinking": False}}, Thinking(enabled=False), [f"{KWARGS}.thinking"]),
    ({KWARGS: {"reasoning_effort": "high"}}, Thinking(effort="high"), [f"{KWARGS}.reasoning_effort"]),
    ({KWARGS: {"thinking_budget": 9}}, Thinking(budget_tokens=9), [f"{KWARGS}.thinking_budget"]),
    ({KWARGS: None}, Thinking(), []),
]


@pytest.mark.parametrize(("fields", "thinking", "params"), CASES)
def test_thinking_fields(fields: dict[str, Any], thinking: Thinking, params: list[str]) -> None:
    request = decode(**fields)
    assert request.thinking == thinking
    assert features(request) == {("thinking", param) for param in params}
    assert request.template_options == {}


@pytest.mark.parametrize(
    ("fields", "thinking"),
    [
        ({"enable_thinking": False, "reasoning_effort": "high"}, Thinking(enabled=False)),
        ({"enable_thinking": False, "thinking_budget": 9}, Thinking(enabled=False)),
        ({"enable_thinking": False, "thinking_budget": 0}, Thinking(enabled=False, budget_tokens=0)),
        ({"enable_thinking": True, "reasoning_effort": "none"}, Thinking(enabled=True)),
        ({"enable_thinking": True, "thinking_budget": 0}, Thinking(enabled=True)),
        ({"enable_thinking": True, KWARGS: {"enable_thinking": False}}, Thinking(enabled=True)),
        ({"reasoning_effort": "none", "thinking_budget": 9}, Thinking(enabled=False, effort="none")),
        ({"reasoning_effort": "low", "reasoning": {"effort": "high"}}, Thinking(effort="low")),
    ],
)
def test_precedence_of_fields(fields: dict[str, Any], thinking: Thinking) -> None:
    assert decode(**fields).thinking == thinking


def test_exclude_is_reported_as_unsupported() -> None:
    assert features(decode(reasoning={"exclude": True})) == {("unknown", "reasoning.exclude")}
    assert features(decode(reasoning={"exclude": False})) == set()


def test_template_options() -> None:
    request = decode(chat_template_kwargs={"enable_thinking": True, "style": "brief", "deep": {"a": [1]}, "no": None})
    assert request.template_options == {"style": "brief", "deep": {"a": [1]}}
    options = {("template_options", f"{KWARGS}.{name}") for name in ("style", "deep")}
    assert features(request) == {("thinking", f"{KWARGS}.enable_thinking"), *options}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"reasoning_effort": "enormous"}, "reasoning_effort"),
        ({"reasoning": {"effort": 3}}, "reasoning.effort"),
        ({"reasoning": "high"}, "reasoning"),
        ({"thinking": {"type": "sometimes"}}, "thinking.type"),
        *invalid("thinking_budget", "thinking_budget", -2, True),
        ({"enable_thinking": "yes"}, "enable_thinking"),
        ({KWARGS: {"enable_thinking": 1}}, f"{KWARGS}.enable_thinking"),
        ({KWARGS: [1]}, KWARGS),
        ({KWARGS: {"__class__.x": 1}}, KWARGS),
        ({KWARGS: {f"x{at}": 1 for at in range(100)}}, KWARGS),
        ({KWARGS: {"long": "x" * 10_000}}, f"{KWARGS}.long"),
        *invalid("chat_template", "chat_template", "{{ messages }}", ""),
    ],
)
def test_invalid_field_is_named(fields: dict[str, Any], param: str) -> None:
    assert rejected_param("chat", **fields) == param
