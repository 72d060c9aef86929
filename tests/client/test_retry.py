"""Who is asked again, and when."""

import pytest

from dragoman.protocols.client.retry import Refused, Retries, Trouble, retry_after

SOON = {"retry-after": "1"}


@pytest.mark.parametrize(
    ("trouble", "generation", "harmless"),
    [
        ("unreached", True, True),
        ("lost", False, True),
        (Refused(429), True, True),
        (Refused(429, SOON), True, True),
        (Refused(429, is_final=True), False, False),
        (Refused(529), True, True),
        (Refused(503), False, True),
        (Refused(503, SOON), True, True),
        (Refused(500), False, True),
        (Refused(500, SOON), False, True),
        (Refused(502), False, True),
        (Refused(504), False, True),
        (Refused(408), False, True),
        (Refused(400), False, False),
        (Refused(404), False, False),
        (Refused(500, {"x-should-retry": "true"}), True, True),
        (Refused(429, {"x-should-retry": "false"}), False, False),
        (Refused(429, {"retry-after": "3600"}), False, False),
    ],
)
def test_what_is_repeated(trouble: Trouble | Refused, generation: bool, harmless: bool) -> None:
    retries = Retries()
    assert (retries.wait(trouble, 1, False) is not None) == generation
    assert (retries.wait(trouble, 1, True) is not None) == harmless
    assert retries.wait(trouble, 3, True) is None
    assert Retries(0).wait(trouble, 1, True) is None


def test_waits_grow_give_or_take_a_quarter() -> None:
    least, most = Retries(9, chance=lambda: 0.0), Retries(9, chance=lambda: 1.0)
    assert [least.wait("unreached", attempt, False) for attempt in (1, 2, 3, 9)] == [0.375, 0.75, 1.5, 6.0]
    assert [most.wait("unreached", attempt, False) for attempt in (1, 2, 3, 9)] == [0.625, 1.25, 2.5, 10.0]
    assert least.wait(Refused(429, {"retry-after": "3"}), 1, False) == 3


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
def test_what_servers_ask_for(headers: dict[str, str], seconds: float | None) -> None:
    assert retry_after(headers, now=lambda: 10) == seconds
