"""Token counts and times of one request."""

import pytest

from dragoman.core.events import Finished, ReasoningDelta, Started, TextDelta, ToolCallDelta, ToolCallStart, Usage
from dragoman.server.telemetry.meter import Meter
from dragoman.server.telemetry.metrics import ModelMetrics, RequestRecord


def made() -> tuple[Meter, RequestRecord, ModelMetrics]:
    record, metrics = RequestRecord("id", "POST /x"), ModelMetrics()
    return Meter(record, metrics, 100.0), record, metrics


def test_tokens_and_times_of_a_reply() -> None:
    meter, record, metrics = made()
    meter.note(0, [Started(7)], 100.5)
    meter.note(0, [TextDelta("a")], 101.0)
    meter.note(0, [TextDelta("b")], 101.02)
    meter.note(0, [ReasoningDelta("c", count=2), TextDelta("d", count=0)], 101.04)
    usage = Usage(prompt=7, completion=5, cached=2, reasoning=2)
    meter.note(0, [ToolCallStart("x", "f"), ToolCallDelta("{}", count=1), Finished(usage=usage)], 101.05)
    meter.close()
    assert (record.first_event_us, record.first_token_us) == (500_000, 1_000_000)
    assert (record.prompt_tokens, record.completion_tokens, record.cached_tokens) == (7, 5, 2)
    assert (record.unfinished_tokens, record.spent_tokens, record.finish) == (0, 12, "stop")
    assert metrics.gaps.count == 4


def test_unfinished_choice_is_counted_separately() -> None:
    meter, record, _ = made()
    meter.note(0, [Started(7), TextDelta("a"), TextDelta("b", count=3)], 101)
    meter.close()
    meter.close()
    assert (record.prompt_tokens, record.completion_tokens) == (0, 0)
    assert record.unfinished_tokens == record.spent_tokens == 11


def passed_on(*ends: Finished) -> tuple[RequestRecord, ModelMetrics]:
    """A reply whose server reports usage at its end, or not at all."""
    record, metrics = RequestRecord("id", "POST /x"), ModelMetrics()
    meter = Meter(record, metrics, 100.0, lambda: 50)
    meter.note(0, [Started()], 100.5)
    meter.note(0, [ReasoningDelta("", 0, (), (), "signed")], 100.7)
    meter.note(0, [ReasoningDelta("hm", 0)], 101.0)
    meter.note(0, [TextDelta("a" * 40, 0)], 101.02)
    meter.note(0, [ToolCallStart("x", "f"), ToolCallDelta("{}"), ToolCallDelta("")], 101.03)
    for end in ends:
        meter.note(0, [end], 101.05)
    meter.close()
    meter.close()
    return record, metrics


def test_times_without_token_counts() -> None:
    record, metrics = passed_on(Finished(usage=Usage(prompt=7, completion=5)))
    assert (record.first_event_us, record.first_token_us) == (500_000, 1_000_000)
    assert (metrics.gaps.count, round(metrics.gaps.total, 6)) == (11, 0.03)
    assert (record.prompt_tokens, record.completion_tokens, record.unfinished_tokens) == (7, 5, 0)


@pytest.mark.parametrize("ends", [[], [Finished()], [Finished(usage=Usage())]], ids=["cut off", "uncounted", "zeros"])
def test_tokens_are_estimated_without_counts(ends: list[Finished]) -> None:
    record, _ = passed_on(*ends)
    assert (record.prompt_tokens, record.completion_tokens) == (0, 0)
    assert record.unfinished_tokens == record.spent_tokens == 50 + 1 + 10 + 1


def test_usage_replaces_estimate() -> None:
    meter, record, _ = made()
    meter.note(0, [Started(7)], 100.5)
    meter.note(0, [TextDelta("held", 0)], 101.0)
    meter.note(0, [TextDelta("back", 2)], 101.5)
    meter.close()
    assert record.unfinished_tokens == 9
    assert record.first_token_us == 1_000_000


def test_several_choices() -> None:
    meter, record, metrics = made()
    for choice in (0, 1):
        meter.note(choice, [Started(7), TextDelta("a")], 101 + choice)
    meter.note(0, [TextDelta("b"), Finished(usage=Usage(prompt=7, completion=2))], 101.5)
    meter.note(1, [TextDelta("b")], 102.5)
    meter.close()
    assert (record.prompt_tokens, record.completion_tokens, record.unfinished_tokens) == (7, 2, 2)
    assert metrics.gaps.count == 2
    assert metrics.gaps.total == 1.0


@pytest.mark.parametrize("is_finished", [False, True])
def test_generations_of_a_request_add_up(is_finished: bool) -> None:
    """A summary of the conversation, then a second one or the reply, which may be cut off."""
    first, record, metrics = made()
    first.note(0, [Started(100), TextDelta("a", 3), Finished(usage=Usage(100, 3))], 101)
    first.close()
    second = Meter(record, metrics, 100.0)
    second.note(0, [Started(20), TextDelta("b", 2)], 102)
    if is_finished:
        second.note(0, [Finished(usage=Usage(20, 2))], 103)
    second.close()
    assert record.spent_tokens == 125
    assert (record.used_prompt, record.used_completion) == (120, 5)
    assert record.unfinished_tokens == (0 if is_finished else 22)
