import pytest

from dragoman.loadtest.figures import Sample, SampleUsage, summarize


def test_level_counts_tokens_from_usage_and_errors_by_message() -> None:
    samples = [
        Sample(3.0, (1.0, 1.5, 1.5, 3.0), SampleUsage(100, 9, 40), 200),
        Sample(2.0, (2.0,), SampleUsage(102, 1, 60), 200),
        Sample(0.1, (), None, 503, "503 full"),
        Sample(0.1, (), None, 503, "503 full"),
        Sample(0.5, (0.2,), None, 200, "the stream was cut off"),
    ]
    level = summarize(4, samples, 5.0, [0.001, 0.003])
    assert (level.requests, level.failed) == (5, 3)
    assert level.errors == {"503 full": 2, "the stream was cut off": 1}
    assert (level.ttft_p50, level.gap_p50) == (1.5, 0.5)
    assert level.gap_p99 == pytest.approx(1.48)
    assert (level.output_tokens_per_second, level.requests_per_second) == (2.0, 0.4)
    assert (level.prompt_tokens, level.output_tokens, level.cached_tokens) == (101, 5, 50)
    assert (level.token_p50, level.tokens_per_piece) == (0.25, 2.0)


def test_level_without_successful_requests() -> None:
    level = summarize(1, [Sample(0.1, (), None, None, "gone")], 1.0, [])
    assert (level.ttft_p50, level.gap_p99, level.prompt_tokens, level.late_p95) == (None, None, None, None)
    assert (level.output_tokens_per_second, level.failed) == (0, 1)
