"""Retry decisions and delays."""

import pytest

from dragoman.protocols.retry import ConnectionFailure, ErrorResponse, Retries, retry_after

SOON = {"retry-after": "1"}


@pytest.mark.parametrize(
    ("failure", "generation", "is_idempotent"),
    [
        ("unreached", True, True),
        ("lost", False, True),
        (ErrorResponse(429), True, True),
        (ErrorResponse(429, SOON), True, True),
        (ErrorResponse(429, is_final=True), False, False),
        (ErrorResponse(529), True, True),
        (ErrorResponse(503), False, True),
        (ErrorResponse(503, SOON), True, True),
        (ErrorResponse(500), False, True),
        (ErrorResponse(500, SOON), False, True),
        (ErrorResponse(502), False, True),
        (ErrorResponse(504), False, True),
        (ErrorResponse(408), False, True),
        (ErrorResponse(400), False, False),
        (ErrorResponse(404), False, False),
        (ErrorResponse(500, {"x-should-retry": "true"}), True, True),
        (ErrorResponse(429, {"x-should-retry": "false"}), False, False),
        (ErrorResponse(429, {"retry-after": "3600"}), False, False),
    ],
)
def test_which_failures_are_retried(
    failure: ConnectionFailure | ErrorResponse, generation: bool, is_idempotent: bool
) -> None:
    retries = Retries()
    assert (retries.delay(failure, 1, False) is not None) == generation
    assert (retries.delay(failure, 1, True) is not None) == is_idempotent
    assert retries.delay(failure, 3, True) is None
    assert Retries(0).delay(failure, 1, True) is None


def test_delay_doubles_with_jitter() -> None:
    least, most = Retries(9, chance=lambda: 0.0), Retries(9, chance=lambda: 1.0)
    assert [least.delay("unreached", attempt, False) for attempt in (1, 2, 3, 9)] == [0.375, 0.75, 1.5, 6.0]
    assert [most.delay("unreached", attempt, False) for attempt in (1, 2, 3, 9)] == [0.625, 1.25, 2.5, 10.0]
    assert least.delay(ErrorResponse(429, {"retry-after": "3"}), 1, False) == 3


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, None),
        ({"retry-after": "2"}, 2),
        ({"retry-after": "0.5"}, 0.5),
        ({"retry-after": "-1"}, 0),
        ({"retry-after": "soon"}, None),
        ({"retry-after": "nan"}, None),
        ({"retry-after-ms": "250", "retry-after": "9"}, 0.25),
        ({"retry-after-ms": "?", "retry-after": "9"}, 9),
        ({"retry-after": "Thu, 01 Jan 1970 00:01:40 GMT"}, 90),
        ({"retry-after": "Thu, 01 Jan 1970 00:00:01 GMT"}, 0),
    ],
)
def test_retry_after_header(headers: dict[str, str], seconds: float | None) -> None:
    assert retry_after(headers, now=lambda: 10) == seconds
