"""The tokens and times of one request, whole or broken off."""

from dragoman.events import Finished, ReasoningDelta, Started, TextDelta, ToolCallDelta, ToolCallStart, Usage
from dragoman.telemetry.meter import Meter
from dragoman.telemetry.metrics import ModelMetrics
from dragoman.telemetry.record import RequestRecord


def made() -> tuple[Meter, RequestRecord, ModelMetrics]:
    record, metrics = RequestRecord("id", "POST /x"), ModelMetrics()
    return Meter(record, metrics, 100.0), record, metrics


def test_a_reply() -> None:
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


def test_what_breaks_off_is_counted_apart() -> None:
    meter, record, _ = made()
    meter.note(0, [Started(7), TextDelta("a"), TextDelta("b", count=3)], 101)
    meter.close()
    meter.close()
    assert (record.prompt_tokens, record.completion_tokens) == (0, 0)
    assert record.unfinished_tokens == record.spent_tokens == 11


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
