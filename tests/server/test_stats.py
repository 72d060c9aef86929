"""Metrics, statistics, logs and traces."""

import json
import threading
import time
from pathlib import Path
from typing import Any

import httpx
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from prometheus_client.parser import text_string_to_metric_families

from dragoman.config.model_spec import ModelSpec
from dragoman.config.sections import Jwt, Keys, Telemetry, Traces
from dragoman.config.settings import Settings
from dragoman.server.telemetry.recorder import without_secrets
from tests.security.echo_upstream import EchoUpstream
from tests.support.requests import (
    CHAT,
    COMPLETIONS,
    HELLO,
    ask,
    eventually,
    frames,
    recorded,
    refused,
    talking,
    text_of,
)
from tests.support.server_process import Running, Serving, server_fixture

CONFIG: dict[str, Any] = {
    "models": {
        "echo": {"engine": "scripted"},
        "thinker": {
            "engine": "scripted",
            "format": "hermes",
            "replies": [{"output": "<think>so many words to think of</think>yes"}],
        },
        "slow": {"engine": "scripted", "tokens_per_second": 50, "slots": 1, "replies": [{"output": "tick" * 12}]},
        "failing": {"engine": "scripted", "fail_after": 2, "replies": [{"output": "one two three four"}]},
        "in-worker": {"engine": "scripted", "crash_after": 1000},
    },
    "telemetry": {"log_format": "json", "log_requests": True},
}


LABELS = ("model", "route", "kind", "code", "state", "status", "limit", "version", "le")


watched = server_fixture(CONFIG)


def samples(client: httpx.Client) -> dict[str, dict[tuple[str, ...], float]]:
    reply = client.get("/metrics")
    assert reply.status_code == 200
    assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(reply.text):
        for sample in family.samples:
            labels = tuple(sample.labels[name] for name in LABELS if name in sample.labels)
            found.setdefault(sample.name, {})[labels] = sample.value
    return found


def stream(client: httpx.Client, **fields: Any) -> list[dict[str, Any]]:
    body = {"messages": HELLO, "stream": True, "stream_options": {"include_usage": True}, **fields}
    return [frame for frame in frames(client.post(CHAT, json=body).text) if frame != "[DONE]"]


def test_totals_equal_returned_usage(watched: Running) -> None:
    with talking(watched) as client:
        usages = [ask(client, CHAT, model="echo").json()["usage"]]
        usages.append(ask(client, COMPLETIONS, model="echo", n=3).json()["usage"])
        usages.append(ask(client, CHAT, model="thinker").json()["usage"])
        usages.append(ask(client, CHAT, model="in-worker").json()["usage"])
        usages.append(stream(client, model="slow")[-1]["usage"])
        message = {"model": "echo", "max_tokens": 9, "messages": HELLO}
        anthropic = client.post("/v1/messages", json=message).json()["usage"]
        usages.append({"prompt_tokens": anthropic["input_tokens"], "completion_tokens": anthropic["output_tokens"]})
        made = client.post("/v1/embeddings", json={"model": "echo", "input": ["one", "two"]}).json()["usage"]
        usages.append({"prompt_tokens": made["prompt_tokens"], "completion_tokens": 0})
        failed = ask(client, CHAT, model="failing")
        broken = stream(client, model="failing")
        assert failed.status_code == 500
        assert "error" in broken[-1]
        refused(ask(client, CHAT, model="nothing-like-it"), 404, param="model")
        refused(client.get("/some/path/of/mine"), 404)

        expected = {kind: sum(usage[f"{kind}_tokens"] for usage in usages) for kind in ("prompt", "completion")}
        thought = usages[2]["completion_tokens_details"]["reasoning_tokens"]
        assert thought > 0
        recorded(watched, route="GET /some/path/of/mine")
        events = [event for event in watched.events() if event["event"] == "request"]
        for kind, total in expected.items():
            assert sum(event.get(f"{kind}_tokens", 0) for event in events) == total
        metrics = samples(client)
        tokens = metrics["dragoman_tokens_total"]
        for kind, total in (*expected.items(), ("reasoning", thought)):
            assert sum(value for labels, value in tokens.items() if labels[1] == kind) == total
        assert tokens["failing", "unfinished"] == sum(event.get("unfinished_tokens", 0) for event in events) > 0
        totals = client.get("/stats").json()["totals"]
        for kind, total in expected.items():
            assert totals[f"{kind}_tokens"] == total
        assert totals["errors"] == 4


def test_metrics(watched: Running) -> None:
    with talking(watched) as client:
        stream(client, model="slow")
        for name in ("made-up-1", "made-up-2", "../../etc/passwd"):
            ask(client, CHAT, model=name)
        client.get("/v1/models/made-up-3")
        metrics = samples(client)
        page = client.get("/metrics").text
    assert "made-up" not in page
    assert "passwd" not in page
    models = set(CONFIG["models"])
    for family in metrics.values():
        assert {labels[0] for labels in family if labels} <= models | {"", "0.1.0", "requests", "tokens"}
    assert metrics["dragoman_requests_total"]["slow", "chat", "200"] >= 1
    assert metrics["dragoman_requests_total"]["", "chat", "404"] >= 3
    gaps = metrics["dragoman_inter_token_seconds_count"]["slow",]
    assert gaps >= 1
    mean = metrics["dragoman_inter_token_seconds_sum"]["slow",] / gaps
    assert mean > 0.015
    assert metrics["dragoman_inter_token_seconds_bucket"]["slow", "+Inf"] == gaps
    assert metrics["dragoman_time_to_first_token_seconds_count"]["slow",] >= 1
    assert metrics["dragoman_queue_seconds_count"]["slow",] >= 1
    assert metrics["dragoman_slots"] == {("slow",): 1}
    assert metrics["dragoman_slots_busy"]["slow",] == 0
    assert metrics["dragoman_memory_bytes"][()] > 1e7
    assert metrics["dragoman_model_state"]["slow", "ready"] == 1


def test_slots_queue_and_memory_under_load(watched: Running) -> None:
    with talking(watched) as client, talking(watched) as other:
        assert text_of(ask(client, CHAT, model="in-worker")) == "hello"
        threads = [
            threading.Thread(target=lambda: httpx.post(f"{watched.url}{CHAT}", json=body, timeout=60)) for _ in range(2)
        ]
        body = {"messages": HELLO, "model": "slow"}
        for thread in threads:
            thread.start()

        def busy() -> bool:
            standing = other.get("/stats").json()["models"]["slow"]
            return bool((standing["running"], standing["waiting"]) == (1, 1))

        assert eventually(busy)
        metrics = samples(other)
        assert metrics["dragoman_slots_busy"]["slow",] == 1
        assert metrics["dragoman_queue_length"]["slow",] == 1
        assert metrics["dragoman_model_memory_bytes"]["in-worker",] > 1e7
        for thread in threads:
            thread.join()
        slow = other.get("/stats").json()["models"]["slow"]
        assert slow["queue"]["p99"] > 0.1
        assert slow["tokens_per_second"] > 0
        assert slow["time_to_first_token"]["p50"] > 0


def test_log_lines_are_json_without_prompts(watched: Running) -> None:
    secret = "a confidential word"
    with talking(watched) as client:
        reply = ask(client, CHAT, messages=[{"role": "user", "content": secret}])
        ask(client, CHAT, model="failing", messages=[{"role": "user", "content": secret}])
    request_id = reply.headers["x-request-id"]
    assert eventually(lambda: request_id in watched.log.read_text())
    lines = [json.loads(line) for line in watched.log.read_text().splitlines()]
    [line] = [line for line in lines if line.get("request", {}).get("id") == request_id]
    assert line["logger"] == "dragoman.requests"
    assert line["request"]["status"] == 200
    assert line["request"]["client"] == "127.0.0.1"
    assert secret not in watched.log.read_text()
    assert secret not in watched.event_log.read_text()


def test_secrets_are_removed_from_configuration() -> None:
    options = {"api_key": "sk-secret", "chunk": 4, "deep": [{"Password": "p", "proxy": "http://me:sk-p@p:3128"}]}
    spec = ModelSpec("far", "scripted", None, options)
    settings = Settings(
        models=(spec,),
        api_keys=("sk-one", "sk-two"),
        keys=Keys(jwt=Jwt("HS256", "/etc/dragoman/secret")),
        telemetry=Telemetry(traces=Traces("http://me:sk-t@127.0.0.1:4318/v1/traces")),
    )
    told = without_secrets(settings)
    text = json.dumps(told)
    assert "sk-" not in text
    assert told["api_keys"] == 2
    deep = [{"Password": "***", "proxy": "http://***@p:3128"}]
    assert told["models"][0]["options"] == {"api_key": "***", "chunk": 4, "deep": deep}
    assert told["telemetry"]["traces"]["endpoint"] == "http://***@127.0.0.1:4318/v1/traces"


def test_prompts_in_the_log_open_metrics_and_spans_are_configurable(tmp_path: Path, serving: Serving) -> None:
    with EchoUpstream() as collector:
        traces = {"endpoint": f"http://127.0.0.1:{collector.port}/v1/traces"}
        telemetry = {"log_prompts": True, "metrics": "open", "traces": traces}
        config = {"models": {"echo": {"engine": "scripted"}}, "api_keys": ["sk-one"], "telemetry": telemetry}
        with serving(tmp_path, config) as running, talking(running, {"x-api-key": "sk-one"}) as client:
            reply = ask(client, CHAT, messages=[{"role": "user", "content": "what is asked"}])
            assert eventually(lambda: "what is asked" in running.log.read_text())
            assert client.get("/metrics", headers={"x-api-key": ""}).status_code == 200
            refused(client.get("/stats", headers={"x-api-key": ""}), 401)
            assert running.stop() == 0
    # Messages that are sent one after the other are one message with all their spans.
    exported = ExportTraceServiceRequest.FromString(collector.traces)
    spans = [span for resource in exported.resource_spans for scope in resource.scope_spans for span in scope.spans]
    [span] = [span for span in spans if span.name == "chat echo"]
    values = {entry.key: entry.value for entry in span.attributes}
    assert values["gen_ai.response.id"].string_value == reply.json()["id"]
    assert time.time() - span.end_time_unix_nano / 1e9 < 60
