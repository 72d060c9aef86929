import time

import pytest

from dragoman.core.reply import RateLimitState
from dragoman.protocols.registry import ANTHROPIC
from dragoman.protocols.wire_protocol import OPENAI

RATES = [RateLimitState("requests", 60, 59, 1.25), RateLimitState("tokens", 1000, 0, 61.0)]


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0ms"), (0.0201, "21ms"), (1, "1s"), (60, "1m0s"), (361.5, "6m1.5s")]
)
def test_openai_durations(seconds: float, text: str) -> None:
    assert OPENAI.format_reset(seconds) == text


def test_openai_headers() -> None:
    assert dict(OPENAI.rate_headers(RATES)) == {
        b"x-ratelimit-limit-requests": b"60",
        b"x-ratelimit-remaining-requests": b"59",
        b"x-ratelimit-reset-requests": b"1.25s",
        b"x-ratelimit-limit-tokens": b"1000",
        b"x-ratelimit-remaining-tokens": b"0",
        b"x-ratelimit-reset-tokens": b"1m1s",
    }


def test_anthropic_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 1_800_000_000.0)
    assert dict(ANTHROPIC.rate_headers(RATES)) == {
        b"anthropic-ratelimit-requests-limit": b"60",
        b"anthropic-ratelimit-requests-remaining": b"59",
        b"anthropic-ratelimit-requests-reset": b"2027-01-15T08:00:02Z",
        b"anthropic-ratelimit-tokens-limit": b"1000",
        b"anthropic-ratelimit-tokens-remaining": b"0",
        b"anthropic-ratelimit-tokens-reset": b"2027-01-15T08:01:01Z",
    }
