from bench.constraints import rate


def test_a_rate_counts_no_token_outside_its_time() -> None:
    """One stream begins long before the other: eighty tokens in the first eight seconds, forty in the last two."""
    assert rate([(0.0, 10.0, 100), (8.0, 10.0, 20)]) == 12.0
