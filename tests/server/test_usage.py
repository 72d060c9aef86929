"""Usage over the wire: what is counted for whom, who may read it, and OpenAI's shape with its SDK."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from dragoman.config.sections import BudgetLimit, KeyLimits
from dragoman.core.types import RouteScope
from dragoman.protocols.usage import DAY, day_of, show_day
from dragoman.storage.keys import KeyStore
from tests.support.requests import CHAT, HELLO, ask, eventually, refused, talking
from tests.support.server_process import Running, Serving

OPERATOR = "sk-operator-0123456789"
OPENAI_PATH = "/v1/organization/usage/completions"
SCRIPT = "<think>I think about it.</think>It is sunny."
CONFIG = {
    "models": {
        "echo": {"engine": "scripted"},
        "thinker": {"engine": "scripted", "format": "hermes", "replies": [{"output": SCRIPT}]},
        "slow": {"engine": "scripted", "tokens_per_second": 20, "replies": [{"output": "tick" * 10_000}]},
        "crashing": {"engine": "scripted", "crash_after": 2, "replies": [{"output": "one two three four"}]},
        "failing": {"engine": "scripted", "fail_after": 2, "replies": [{"output": "one two three four"}]},
    },
    "default": "echo",
    "api_keys": [OPERATOR],
    "keys": {"store": "keys.db"},
    "prices": {"echo": {"input": 1.0, "output": 1000.0}},
    "telemetry": {"metrics_by_principal": True},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, workers: int) -> Path:
    """Of the server, in one arrangement."""
    return tmp_path_factory.mktemp("usage")


@pytest.fixture(scope="module")
def keyed(folder: Path, serving: Serving) -> Iterator[Running]:
    with serving(folder, CONFIG) as running:
        yield running


Make = Callable[..., str]


@pytest.fixture
def make(folder: Path) -> Make:
    def made(name: str, *routes: RouteScope, limits: KeyLimits | None = None) -> str:
        return KeyStore(folder / "keys.db").create(name, routes=routes, limits=limits)[0]

    return made


def client_of(running: Running, key: str) -> Any:
    return talking(running, {"authorization": f"Bearer {key}"})


def chat(running: Running, key: str, **fields: Any) -> httpx.Response:
    with client_of(running, key) as client:
        return ask(client, CHAT, **fields)


def usage_of(running: Running, key: str, by: str = "model") -> list[dict[str, Any]]:
    """The usage of one stored key."""
    with client_of(running, OPERATOR) as client:
        report = client.get("/admin/usage", params={"by": f"key,{by}"}).json()
    return [entry for entry in report["data"] if entry["key"] == key.split("_")[1]]


def settled(running: Running, key: str, count: int) -> list[dict[str, Any]]:
    """The usage of a key, after waiting for this many requests."""
    assert eventually(lambda: sum(entry["requests"] for entry in usage_of(running, key)) >= count)
    return usage_of(running, key)


def test_tokens_and_cost_of_every_api_are_counted(keyed: Running, make: Make) -> None:
    key = make("anna")
    with client_of(keyed, key) as client:
        replies = [
            ask(client, CHAT).json()["usage"],
            ask(client, "/v1/completions").json()["usage"],
            ask(client, "/v1/messages").json()["usage"],
            ask(client, "/v1/responses").json()["usage"],
            ask(client, "/v1/embeddings").json()["usage"],
        ]
        streamed = client.post(
            CHAT, json={"messages": HELLO, "stream": True, "stream_options": {"include_usage": True}}
        )
    last = json.loads(streamed.text.split("data: ")[-2])
    replies.append(last["usage"])
    prompt = sum(usage.get("prompt_tokens", usage.get("input_tokens")) for usage in replies)
    completion = sum(usage.get("completion_tokens", usage.get("output_tokens", 0)) for usage in replies)
    [entry] = settled(keyed, key, len(replies))
    assert entry == {
        "requests": len(replies),
        "prompt_tokens": prompt,
        "cached_tokens": 0,
        "completion_tokens": completion,
        "reasoning_tokens": 0,
        "cost": pytest.approx((prompt + 1000 * completion) / 1e6),
        "key": key.split("_")[1],
        "model": "echo",
    }


def test_reasoning_tokens_are_counted(keyed: Running, make: Make) -> None:
    key = make("anna")
    usage = chat(keyed, key, model="thinker").json()["usage"]
    [entry] = settled(keyed, key, 1)
    assert entry["reasoning_tokens"] == usage["completion_tokens_details"]["reasoning_tokens"] > 0
    assert entry["cost"] == 0


def test_requests_that_do_not_generate_are_not_counted(keyed: Running, make: Make) -> None:
    key = make("anna")
    with client_of(keyed, key) as client:
        assert ask(client, "/v1/messages/count_tokens").status_code == 200
        assert client.get("/v1/models").status_code == 200
        assert ask(client, CHAT, model="unknown").status_code == 404
        assert ask(client, CHAT, temperature=9).status_code == 400
        assert ask(client, CHAT).status_code == 200
    [entry] = settled(keyed, key, 1)
    assert (entry["model"], entry["requests"]) == ("echo", 1)


@pytest.mark.parametrize("model", ["failing", "crashing"])
def test_tokens_of_failed_requests_are_counted_as_far_as_they_are_known(keyed: Running, make: Make, model: str) -> None:
    key = make("anna")
    assert chat(keyed, key, model=model).status_code in (500, 502)
    [entry] = settled(keyed, key, 1)
    assert (entry["model"], entry["requests"]) == (model, 1)
    assert 0 < entry["completion_tokens"] < 1000


def test_tokens_of_a_cancelled_request_are_counted(keyed: Running, make: Make) -> None:
    key, body = make("anna"), {"model": "slow", "messages": HELLO, "stream": True, "max_tokens": 5000}
    with client_of(keyed, key) as client, client.stream("POST", CHAT, json=body) as reply:
        pieces = reply.iter_text()
        next(pieces)
        next(pieces)
    [entry] = settled(keyed, key, 1)
    assert 0 < entry["completion_tokens"] < 1000


@pytest.mark.workers(2)
def test_requests_of_a_front_end_that_died_count_what_they_reserved(keyed: Running, make: Make) -> None:
    key, body = make("anna"), {"model": "slow", "messages": HELLO, "stream": True, "max_tokens": 5000}
    with client_of(keyed, key) as client, client.stream("POST", CHAT, json=body) as reply:
        assert reply.status_code == 200
        for pid in keyed.fronts():
            os.kill(pid, signal.SIGKILL)
        [entry] = settled(keyed, key, 1)
    assert entry["completion_tokens"] == 5000
    assert eventually(lambda: len(keyed.fronts()) == 2)


def test_usage_is_by_day_key_principal_and_model(keyed: Running, make: Make) -> None:
    first, second = make("berta"), make("berta")
    for key in (first, second, second):
        assert chat(keyed, key).status_code == 200
    assert chat(keyed, second, model="thinker").status_code == 200
    settled(keyed, second, 3)
    with client_of(keyed, OPERATOR) as client:
        report = client.get("/admin/usage", params={"by": "model,day,key,principal", "since": "1d"}).json()
        by_principal = client.get("/admin/usage", params={"by": "principal"}).json()
    today = show_day(day_of(time.time()))
    assert report["by"] == ["day", "key", "principal", "model"]
    found = {
        (entry["key"], entry["model"]): entry["requests"] for entry in report["data"] if entry["day"] == report["since"]
    }
    ids = [key.split("_")[1] for key in (first, second)]
    assert report["since"] == today
    assert {pair: count for pair, count in found.items() if pair[0] in ids} == {
        (ids[0], "echo"): 1,
        (ids[1], "echo"): 2,
        (ids[1], "thinker"): 1,
    }
    [berta] = [entry for entry in by_principal["data"] if entry["principal"] == "user:berta"]
    assert berta["requests"] == 4


def test_only_keys_with_the_scope_may_read_usage(keyed: Running, make: Make) -> None:
    plain, stats, admin = make("anna"), make("watcher", "stats"), make("ops", "admin")
    query = {"start_time": "0"}
    for key, path, status in (
        (plain, OPENAI_PATH, 403),
        (plain, "/admin/usage", 403),
        (stats, OPENAI_PATH, 200),
        (stats, "/admin/usage", 403),
        (admin, OPENAI_PATH, 403),
        (admin, "/admin/usage", 200),
    ):
        with client_of(keyed, key) as client:
            assert client.get(path, params=query).status_code == status, (key, path)
    with talking(keyed) as client:
        for path in (OPENAI_PATH, "/admin/usage"):
            refused(client.get(path, params=query), 401, code="invalid_api_key")


def test_report_shows_budgets_of_keys_that_have_not_been_used(keyed: Running, make: Make) -> None:
    limits = KeyLimits(budgets=(BudgetLimit(per="month", cost=2.5),))
    key = make("clara", limits=limits).split("_")[1]
    with client_of(keyed, OPERATOR) as client:
        budgets = client.get("/admin/usage").json()["budgets"]
    [budget] = [budget for budget in budgets if budget.get("key") == key]
    begins = budget.pop("begins_anew")
    assert begins.endswith("-01")
    assert budget == {
        "per": "month", "action": "refuse", "used": 0, "reserved": 0, "remaining": 2.5, "key": key, "cost": 2.5
    }  # fmt: skip


def admin_sdk(running: Running, key: str) -> openai.OpenAI:
    http = openai.DefaultHttpxClient(trust_env=False)
    return openai.OpenAI(
        base_url=f"{running.url}/v1", api_key="none", admin_api_key=key, max_retries=0, http_client=http
    )


def test_openai_sdk_reads_usage(keyed: Running, make: Make) -> None:
    key = make("dora")
    tokens = chat(keyed, key).json()["usage"]
    settled(keyed, key, 1)
    today = day_of(time.time()) * DAY
    with admin_sdk(keyed, OPERATOR) as client:
        read = client.admin.organization.usage.completions
        page = read(start_time=today - DAY, group_by=["user_id", "model", "api_key_id"], user_ids=["user:dora"])
        assert [(bucket.start_time, bucket.end_time) for bucket in page.data[:2]] == [
            (today - DAY, today), (today, today + DAY)
        ]  # fmt: skip
        assert not page.data[0].results
        [result] = page.data[1].results
        assert result.object == "organization.usage.completions.result"
        assert (result.input_tokens, result.output_tokens) == (tokens["prompt_tokens"], tokens["completion_tokens"])
        assert (result.num_model_requests, result.input_cached_tokens) == (1, 0)
        assert (result.user_id, result.model, result.api_key_id) == ("user:dora", "echo", key.split("_")[1])
        total = read(start_time=today)
        assert total.data[0].results[0].user_id is None  # type: ignore[union-attr]
        assert not read(start_time=today, models=["thinker"], user_ids=["user:dora"]).data[0].results
        assert len(read(start_time=today, api_key_ids=[key.split("_")[1]], group_by=["model"]).data[0].results) == 1


def test_pages_of_openai_usage_follow_each_other(keyed: Running) -> None:
    today = day_of(time.time()) * DAY
    with admin_sdk(keyed, OPERATOR) as client:
        read = client.admin.organization.usage.completions
        first = read(start_time=today - 4 * DAY, limit=3)
        assert (len(first.data), first.has_more) == (3, True)
        assert first.next_page is not None
        second = read(start_time=today - 4 * DAY, limit=3, page=first.next_page)
        assert (len(second.data), second.has_more, second.next_page) == (2, False, None)
        starts = [bucket.start_time for bucket in (*first.data, *second.data)]
        assert starts == [today - days * DAY for days in (4, 3, 2, 1, 0)]


@pytest.mark.parametrize(
    ("path", "query", "param"),
    [
        ("/admin/usage", "since=yesterday", "since"),
        ("/admin/usage", "since=0d", "since"),
        ("/admin/usage", "since=2026-02-30", "since"),
        ("/admin/usage", "by=day,colour", "by"),
        (OPENAI_PATH, "", "start_time"),
        (OPENAI_PATH, "start_time=-1", "start_time"),
        (OPENAI_PATH, "start_time=0&end_time=x", "end_time"),
        (OPENAI_PATH, "start_time=0&bucket_width=1h", "bucket_width"),
        (OPENAI_PATH, "start_time=0&group_by=project_id", "group_by"),
        (OPENAI_PATH, "start_time=0&group_by[]=model&group_by[]=x", "group_by"),
        (OPENAI_PATH, "start_time=0&project_ids=p1", "project_ids"),
        (OPENAI_PATH, "start_time=0&batch=true", "batch"),
        (OPENAI_PATH, "start_time=0&limit=32", "limit"),
        (OPENAI_PATH, "start_time=0&page=2", "page"),
    ],
)
def test_invalid_queries_name_the_parameter(keyed: Running, path: str, query: str, param: str) -> None:
    with client_of(keyed, OPERATOR) as client:
        refused(client.get(f"{path}?{query}"), 400, param=param)


def test_metrics_by_principal(keyed: Running, make: Make) -> None:
    assert chat(keyed, make("emil")).status_code == 200

    def counted() -> bool:
        with client_of(keyed, OPERATOR) as client:
            page = client.get("/metrics").text
        is_counted = 'dragoman_principal_requests_total{principal="user:emil"} 1.0' in page
        return is_counted and 'dragoman_principal_tokens_total{kind="prompt",principal="user:emil"}' in page

    assert eventually(counted)


def test_metrics_have_no_principals_by_default(scripted: Running) -> None:
    with talking(scripted) as client:
        assert ask(client, CHAT).status_code == 200
        assert "dragoman_principal" not in client.get("/metrics").text


def test_event_log_names_the_key(keyed: Running, make: Make) -> None:
    key = make("fritz")
    request_id = chat(keyed, key).headers["x-request-id"]
    assert eventually(lambda: any(event.get("id") == request_id for event in keyed.events()))
    [event] = [event for event in keyed.events() if event.get("id") == request_id]
    assert event["key"] == key.split("_")[1]


def test_usage_is_the_same_after_a_restart(tmp_path: Path, serving: Serving) -> None:
    reports: list[Any] = []
    for _ in range(2):
        with serving(tmp_path, CONFIG) as running:
            if not reports:
                assert chat(running, OPERATOR).status_code == 200
            with client_of(running, OPERATOR) as client:
                assert eventually(lambda: bool(client.get("/admin/usage").json()["data"]))
                reports.append(client.get("/admin/usage").json())
    assert reports[0] == reports[1]
