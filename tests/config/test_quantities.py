"""Parsing and formatting of durations, sizes and costs."""

import math

import pytest

from dragoman.config.quantities import format_cost, format_size, parse_duration, parse_size, to_nano_units


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("5", 5), (5, 5), (0.5, 0.5), ("90s", 90), ("10m", 600), ("2 h", 7200), ("1d", 86400), ("forever", math.inf)],
)
def test_durations(text: object, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    ("text", "size_in_bytes"),
    [(5, 5), ("5B", 5), ("1kb", 1000), ("1 KiB", 1024), ("12GiB", 12 * 2**30), ("2tb", 2 * 10**12)],
)
def test_sizes(text: object, size_in_bytes: int) -> None:
    assert parse_size(text) == size_in_bytes


@pytest.mark.parametrize(
    ("count", "text"),
    [(5, "5 B"), (2048, "2.0 KiB"), (150 * 2**20, "150 MiB"), (3 * 2**29, "1.5 GiB"), (2**41, "2.0 TiB")],
)
def test_formatted_sizes(count: int, text: str) -> None:
    assert format_size(count) == text


@pytest.mark.parametrize(
    ("cost", "nano_units"),
    [(0.1, 10**8), (0.15, 150_000_000), (1e-9, 1), (4e-10, 0), (1e9, 10**18), (2.675, 2_675_000_000)],
)
def test_costs_are_as_exact_as_their_digits(cost: float, nano_units: int) -> None:
    assert to_nano_units(cost) == nano_units


@pytest.mark.parametrize(
    ("nano_units", "text"),
    [(0, "0.00"), (10**9, "1.00"), (1_250_000_000, "1.25"), (1, "0.000000001"), (1_234_000, "0.001234")],
)
def test_formatted_costs(nano_units: int, text: str) -> None:
    assert format_cost(nano_units) == text
