"""Budgets over the wire: refused, warned, exact with many parallel requests, kept over restarts."""

import asyncio
import json
import os
import signal
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, closing
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from dragoman.config.sections import BudgetLimit, KeyLimits
from dragoman.storage.keys import KeyStore
from tests.support.frontends import many
from tests.support.postgres import Postgres
from tests.support.requests import CHAT, HELLO, ask, eventually, refused, talking, text_of
from tests.support.sdk import anthropic_sdk, sdk
from tests.support.server_process import Running, Serving

OPERATOR = "sk-operator-0123456789"
PARALLEL = 64
MODELS = {
    "echo": {"engine": "scripted"},
    # Much longer than a test.
    "slow": {"engine": "scripted", "slots": PARALLEL, "tokens_per_second": 2, "replies": [{"output": "tick" * 10_000}]},
}
BODY = {"model": "slow", "messages": HELLO, "max_tokens": 100, "stream": True}
NEEDED = -(-len(json.dumps(BODY)) // 3) + 100
"""What one of the parallel requests reserves."""
CONFIG = {"models": MODELS, "default": "echo", "api_keys": [OPERATOR], "keys": {"store": "keys.db"}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("budgets")


@pytest.fixture(scope="module")
def keyed(folder: Path, serving: Serving) -> Iterator[Running]:
    with serving(folder, CONFIG) as running:
        yield running


Make = Callable[..., str]


@pytest.fixture
def make(folder: Path) -> Make:
    return lambda name, **limit: make_key(folder, name, **limit)


def make_key(folder: Path, name: str, **limit: Any) -> str:
    limits = KeyLimits(budgets=(BudgetLimit(**limit),))
    return KeyStore(folder / "keys.db").create(name, limits=limits)[0]


def chat(running: Running, key: str, **fields: Any) -> httpx.Response:
    with talking(running, {"authorization": f"Bearer {key}"}) as client:
        return ask(client, CHAT, **fields)


def budget_of(running: Running, key: str) -> dict[str, Any]:
    """The budget of a stored key, as the operator sees it."""
    with talking(running, {"authorization": f"Bearer {OPERATOR}"}) as client:
        budgets = client.get("/admin/usage").json()["budgets"]
    [found] = [budget for budget in budgets if budget.get("key") == key.split("_")[1]]
    entry: dict[str, Any] = found
    return entry


def test_spent_budget_is_a_429_that_no_sdk_retries(keyed: Running, make: Make) -> None:
    key = make("anna", per="day", tokens=40)
    refusal = chat(keyed, key, max_tokens=100)
    message = refused(refusal, 429, code="insufficient_quota")
    assert message.startswith("budget exhausted: 0 of 40 tokens per day of key ")
    assert refusal.json()["error"]["type"] == "insufficient_quota"
    assert refusal.headers["x-should-retry"] == "false"
    assert "retry-after" not in refusal.headers
    sent = 0

    def count(_: object) -> None:
        nonlocal sent
        sent += 1

    http = openai.DefaultHttpxClient(trust_env=False, event_hooks={"request": [count]})
    with openai.OpenAI(base_url=f"{keyed.url}/v1", api_key=key, max_retries=5, http_client=http) as client:
        with pytest.raises(openai.RateLimitError) as caught:
            client.chat.completions.create(model="echo", messages=HELLO, max_tokens=100)  # type: ignore[arg-type]
        assert (caught.value.code, caught.value.type) == ("insufficient_quota", "insufficient_quota")
        assert sent == 1
    with anthropic_sdk(keyed, key) as messages, pytest.raises(anthropic.RateLimitError):
        messages.messages.create(model="echo", max_tokens=100, messages=HELLO)  # type: ignore[arg-type]
    assert text_of(chat(keyed, key, max_tokens=5)) == "hello"


def test_refused_requests_are_counted(keyed: Running, make: Make) -> None:
    key = make("anna", per="day", tokens=1)
    with talking(keyed, {"authorization": f"Bearer {OPERATOR}"}) as client:
        before = client.get("/stats").json()["limited"].get("insufficient_quota", 0)
        refused(chat(keyed, key), 429, code="insufficient_quota")
        assert client.get("/stats").json()["limited"]["insufficient_quota"] == before + 1


def test_surplus_of_a_reservation_is_available_again(keyed: Running, make: Make) -> None:
    key = make("anna", per="day", tokens=1000)
    for _ in range(4):
        # Each reserves nearly everything, and uses little.
        assert text_of(chat(keyed, key, max_tokens=900)) == "hello"
        assert eventually(lambda: budget_of(keyed, key)["reserved"] == 0)
    assert 0 < budget_of(keyed, key)["used"] < 100


def test_background_responses_count(keyed: Running, make: Make) -> None:
    key = make("anna", per="day", tokens=10_000)
    with sdk(keyed, key) as client:
        started = [client.responses.create(model="echo", input="hello", background=True).id for _ in range(10)]
        assert eventually(lambda: {client.responses.retrieve(name).status for name in started} == {"completed"})
        usages = [client.responses.retrieve(name).usage for name in started]
    assert eventually(lambda: budget_of(keyed, key)["reserved"] == 0)
    assert budget_of(keyed, key)["used"] == sum(usage.total_tokens for usage in usages if usage is not None) > 0


def test_budget_that_warns_names_itself_in_a_header_and_once_in_the_log(keyed: Running, make: Make) -> None:
    key = make("anna", per="week", tokens=3, action="warn")
    assert "x-dragoman-budget" not in chat(keyed, key).headers
    assert eventually(lambda: "x-dragoman-budget" in chat(keyed, key).headers)
    streamed = chat(keyed, key, stream=True)
    name = f"of 3 tokens per week of key {key.split('_')[1]}; resets on 20"
    assert name in streamed.headers["x-dragoman-budget"]
    assert streamed.status_code == 200
    assert keyed.log.read_text().count(f"per week of key {key.split('_')[1]}") == 1


async def start(stack: AsyncExitStack, client: httpx.AsyncClient, key: str) -> int:
    """Begin a stream, which runs until the stack is left; return its status."""
    request = client.stream("POST", CHAT, content=json.dumps(BODY), headers={"authorization": f"Bearer {key}"})
    return (await stack.enter_async_context(request)).status_code


async def start_all(servers: list[Running], key: str, check: Callable[[], None]) -> list[int]:
    """Begin all requests at the same time, spread over the servers, and call `check` while they run."""
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(many(server)) for server in servers]
        started = (start(stack, clients[number % len(clients)], key) for number in range(PARALLEL))
        statuses = await asyncio.gather(*started)
        await asyncio.to_thread(check)
    return list(statuses)


def test_parallel_requests_overspend_by_nothing(keyed: Running, make: Make) -> None:
    key = make("anna", per="month", tokens=10 * NEEDED + 1)

    def check() -> None:
        budget = budget_of(keyed, key)
        assert (budget["used"], budget["reserved"], budget["remaining"]) == (0, 10 * NEEDED, 1)

    statuses = asyncio.run(start_all([keyed], key, check))
    assert sorted(statuses) == [200] * 10 + [429] * (PARALLEL - 10)
    # The clients have gone: their requests are settled with what they used.
    assert eventually(lambda: budget_of(keyed, key)["reserved"] == 0)
    assert 0 < budget_of(keyed, key)["used"] < 10 * NEEDED


@pytest.mark.workers(1)
def test_parallel_requests_to_two_servers_overspend_by_nothing(
    tmp_path: Path, postgres: Postgres, serving: Serving
) -> None:
    config = CONFIG | {"storage": postgres.new_database(), "keys": {"store": str(tmp_path / "keys.db")}}
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    with serving(tmp_path / "first", config) as first, serving(tmp_path / "second", config) as second:
        key = make_key(tmp_path, "anna", per="day", tokens=10 * NEEDED)
        statuses = asyncio.run(start_all([first, second], key, lambda: None))
        assert sorted(statuses) == [200] * 10 + [429] * (PARALLEL - 10)
        assert eventually(lambda: budget_of(first, key)["reserved"] == 0)
        assert budget_of(first, key) == budget_of(second, key)


def rows_in(folder: Path, query: str) -> list[Any]:
    with closing(sqlite3.connect(f"file:{folder / 'dragoman.db'}?mode=ro", uri=True)) as connection:
        return connection.execute(query).fetchall()


def test_budgets_and_rates_survive_kill(tmp_path: Path, serving: Serving) -> None:
    key = make_key(tmp_path, "anna", per="day", tokens=2 * NEEDED)
    rates = KeyLimits(requests_per_minute=3)
    rated, _ = KeyStore(tmp_path / "keys.db").create("berta", limits=rates)
    with serving(tmp_path, CONFIG) as running:
        for _ in range(3):
            assert chat(running, rated).status_code == 200
        assert chat(running, rated).status_code == 429
        written = "SELECT count(*) FROM ledger WHERE principal = 'user:berta' AND closed > 0"
        assert eventually(lambda: rows_in(tmp_path, written) == [(3,)])

        async def kill_while_one_runs() -> None:
            async with AsyncExitStack() as stack:
                client = await stack.enter_async_context(many(running))
                assert await start(stack, client, key) == 200
                os.kill(running.process.pid, signal.SIGKILL)

        asyncio.run(kill_while_one_runs())
        running.process.wait()
    with serving(tmp_path, CONFIG) as running:
        # The request that was killed counts with what it had reserved.
        assert eventually(lambda: budget_of(running, key)["used"] == NEEDED)
        assert budget_of(running, key)["reserved"] == 0
        refused(chat(running, key, max_tokens=NEEDED), 429, code="insufficient_quota")
        assert text_of(chat(running, key, max_tokens=5)) == "hello"
        assert eventually(lambda: chat(running, rated).status_code == 429)


def test_locked_storage_refuses_only_owners_with_a_refusing_budget(tmp_path: Path, serving: Serving) -> None:
    limited = make_key(tmp_path, "anna", per="day", tokens=1000)
    warned = make_key(tmp_path, "berta", per="day", tokens=1, action="warn")
    with serving(tmp_path, CONFIG) as running:
        assert chat(running, limited, max_tokens=5).status_code == 200
        other = sqlite3.connect(tmp_path / "dragoman.db", isolation_level=None)
        other.execute("BEGIN EXCLUSIVE")
        refusal = chat(running, limited, max_tokens=5)
        assert refused(refusal, 503, code="storage_unavailable")
        assert int(refusal.headers["retry-after"]) > 0
        assert text_of(chat(running, warned)) == "hello"
        assert text_of(chat(running, OPERATOR)) == "hello"
        other.execute("ROLLBACK")
        other.close()
        assert eventually(lambda: chat(running, limited, max_tokens=5).status_code == 200)
        closed = "SELECT count(*) FROM ledger WHERE principal = 'user:berta' AND status = 200"
        assert eventually(lambda: rows_in(tmp_path, closed) == [(1,)])
        assert running.log.read_text().count("is not available") == 1
