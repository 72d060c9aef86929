"""Parsing and formatting of durations and sizes."""

import math

import pytest

from dragoman.config.quantities import format_size, parse_duration, parse_size


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
