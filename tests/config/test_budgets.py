"""Budgets and prices in a configuration."""

import pytest

from dragoman.config.sections import Budget, BudgetLimit, Price
from dragoman.core.errors import ConfigError
from tests.config.conftest import load


def test_budgets_and_prices() -> None:
    settings = load(
        """
        budgets:
          - {principal: "user:*", per: day, tokens: 100000}
          - {key: 3f9ab0c1d2e4, per: month, cost: 2.5, action: warn}
        prices:
          "gpt-*": {input: 2.5, cached_input: 1.25, output: 10}
          local: {input: 0}
        keys: {limits: {budgets: [{per: week, tokens: 5}]}}
        """
    )
    assert settings.budgets == (
        Budget(per="day", tokens=100_000, principal="user:*"),
        Budget(per="month", cost=2.5, action="warn", key="3f9ab0c1d2e4"),
    )
    assert settings.prices == {"gpt-*": Price(2.5, 10.0, 1.25), "local": Price(0.0)}
    assert settings.keys.limits.budgets == (BudgetLimit(per="week", tokens=5),)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("budgets: [{principal: a, per: day}]", r"budgets\[0\].*either tokens or cost"),
        ("budgets: [{principal: a, per: day, tokens: 1, cost: 1}]", r"budgets\[0\].*either tokens or cost"),
        ("budgets: [{per: day, tokens: 1}]", r"budgets\[0\].*either principal or key"),
        ("budgets: [{principal: a, key: b, per: day, tokens: 1}]", r"budgets\[0\].*either principal or key"),
        ("budgets: [{principal: a, per: year, tokens: 1}]", r"budgets\[0\]\.per"),
        ("budgets: [{principal: a, per: day, tokens: 0}]", r"budgets\[0\]\.tokens"),
        ("budgets: [{principal: a, per: day, cost: 0}]", r"budgets\[0\]\.cost"),
        ("budgets: [{principal: a, per: day, tokens: 1, action: stop}]", r"budgets\[0\]\.action"),
        ("budgets: [{principal: a, per: day, tokens: 1, limit: 1}]", r"budgets\[0\].*limit"),
        ("prices: {a: {input: -1}}", r"prices"),
        ("prices: {a: {output: 1}}", r"prices.*input"),
        ("prices: {a: {input: 1, cached: 1}}", r"prices.*cached"),
    ],
)
def test_invalid_budgets_and_prices(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        load(text)


def test_invalid_limit_of_a_budget_is_one_error() -> None:
    with pytest.raises(ConfigError) as failure:
        load("budgets: [{principal: a, per: day, tokens: -5}]")
    (message,) = failure.value.messages
    assert message.endswith("budgets[0].tokens: expected int >= 1")
