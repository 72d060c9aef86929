"""Counters, histograms and the Prometheus format."""

import math
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from dragoman.server.handlers.stats import ModelGauges, render_metrics
from dragoman.server.telemetry.metrics import GAPS, Histogram, Metrics, RecentRate, RequestRecord


@given(st.lists(st.floats(0, 10)))
def test_histogram_buckets(values: list[float]) -> None:
    histogram = Histogram(GAPS)
    for value in values:
        histogram.add(value)
    assert histogram.count == len(values)
    for at, bound in enumerate(GAPS):
        assert sum(histogram.counts[: at + 1]) == sum(value <= bound for value in values)


def test_gap_is_shared_by_tokens_that_arrive_together() -> None:
    histogram = Histogram(GAPS)
    histogram.add(0.08, 16)
    assert histogram.counts[GAPS.index(0.005)] == 16
    assert histogram.total == 0.08


def test_quantiles() -> None:
    histogram = Histogram((1.0, 2.0, 4.0))
    assert histogram.quantile(0.5) is None
    for value in (0.5, 1.5, 1.6, 3.0):
        histogram.add(value)
    assert histogram.quantile(0.5) == pytest.approx(1.5)
    assert histogram.quantile(1.0) == pytest.approx(4.0)
    histogram.add(100)
    assert histogram.quantile(1.0) == 4.0


@given(st.lists(st.floats(0, 1), min_size=1), st.sampled_from([0.5, 0.95, 0.99]))
def test_quantiles_are_consistent_with_the_sum(values: list[float], share: float) -> None:
    histogram = Histogram(GAPS)
    for value in values:
        histogram.add(value)
    quantile = histogram.quantile(share)
    assert quantile is not None
    at_least_as_large = len(values) - math.ceil(share * len(values)) + 1
    assert quantile * at_least_as_large <= histogram.total * 1.000001
    if len(values) == 1:
        assert quantile == values[0]


def test_recent_rate_covers_one_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    recent = RecentRate()
    recent.add(30)
    now[0] += 10
    recent.add(30)
    assert recent.per_second() == pytest.approx(6.0)
    now[0] += 50
    recent.add(60)
    assert recent.per_second() == pytest.approx(1.5)
    now[0] += 1000
    assert recent.per_second() == 0


def test_prometheus_exposition() -> None:
    metrics = Metrics()
    metrics.add(RequestRecord("a", "POST /x", scope="chat", model='odd"name', status=200, prompt_tokens=3))
    metrics.add(RequestRecord("b", "GET /nothing/at/all", status=404, error="not_found"))
    metrics.for_model('odd"name').gaps.add(0.3, 3)
    metrics.limited["tokens"] += 1
    page = render_metrics(metrics, {'odd"name': ModelGauges("ready", running=1, slots=4, memory=5)}, 1000).decode()
    families = {family.name: family for family in text_string_to_metric_families(page)}
    assert "/nothing" not in page
    requests = {
        (s.labels["model"], s.labels["route"], s.labels["status"]): s.value
        for s in families["dragoman_requests"].samples
    }
    assert requests == {('odd"name', "chat", "200"): 1, ("", "other", "404"): 1}
    gaps = families["dragoman_inter_token_seconds"]
    assert gaps.type == "histogram"
    counts = {sample.name: sample.value for sample in gaps.samples if "le" not in sample.labels}
    assert counts["dragoman_inter_token_seconds_count"] == 3
    assert counts["dragoman_inter_token_seconds_sum"] == pytest.approx(0.3)
    assert families["dragoman_slots"].samples[0].value == 4
    assert not families["dragoman_kv_used_ratio"].samples
    assert families["dragoman_errors"].samples[0].labels["code"] == "not_found"
    assert families["dragoman_limited"].samples[0].value == 1
