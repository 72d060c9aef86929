"""Keys in both protocols with the official SDKs: scopes, limits, revocation."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from dragoman.storage.keys import KeyStore
from tests.server.conftest import Make
from tests.support.frontends import many
from tests.support.requests import CHAT, HELLO, ask, eventually, recorded, refused, talking, text_of
from tests.support.sdk import anthropic_sdk, sdk
from tests.support.server_process import Running, Serving

MESSAGES = "/v1/messages"
STATIC = "sk-static-0123456789"
SLOW = {"engine": "scripted", "tokens_per_second": 1, "replies": [{"output": "tick" * 1000}]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("keyed")


@pytest.fixture(scope="module")
def store(folder: Path) -> KeyStore:
    return KeyStore(folder / "keys.db")


@pytest.fixture(scope="module")
def keyed(folder: Path, store: KeyStore, serving: Serving) -> Iterator[Running]:
    config = {
        "models": {"echo": {"engine": "scripted"}, "other": {"engine": "scripted"}, "slow": SLOW},
        "aliases": {"gpt-*": "other"},
        "api_keys": [STATIC],
        "keys": {"store": "keys.db"},
    }
    with serving(folder, config) as running:
        yield running


def chat(running: Running, key: str, **fields: Any) -> httpx.Response:
    with talking(running, {"authorization": f"Bearer {key}"}) as client:
        return ask(client, CHAT, **fields)


def message(running: Running, key: str, **fields: Any) -> httpx.Response:
    body = {"model": "echo", "max_tokens": 100, "messages": HELLO, **fields}
    with talking(running, {"x-api-key": key, "anthropic-version": "2023-06-01"}) as client:
        return client.post(MESSAGES, json=body)


def test_new_key_works_immediately_and_revoked_key_stops(keyed: Running, store: KeyStore) -> None:
    secret, key = store.create("agent:coder/anna")
    first = chat(keyed, secret)
    assert text_of(first) == "hello"
    [record] = recorded(keyed, id=first.headers["x-request-id"])
    assert record["principal"] == "agent:coder/anna"
    assert message(keyed, secret).status_code == 200
    store.revoke(key.id)
    assert eventually(lambda: chat(keyed, secret).status_code == 401)
    # Each front end checks the store itself.
    assert eventually(lambda: message(keyed, secret).status_code == 401)
    assert message(keyed, "invalid").json()["error"]["type"] == "authentication_error"


def test_expired_key(keyed: Running, store: KeyStore) -> None:
    secret, _ = store.create("anna", expires=time.time() + 3)
    assert chat(keyed, secret).status_code == 200
    assert eventually(lambda: chat(keyed, secret).status_code != 200)
    refused(chat(keyed, secret), 401, code="invalid_api_key")


def test_scopes_by_model(keyed: Running, make: Make) -> None:
    key, said = make(models=("ech*",)), [{"role": "user", "content": "x"}]
    with sdk(keyed, key) as client:
        assert [model.id for model in client.models.list()] == ["echo"]
        for name in ("other", "gpt-4"):
            with pytest.raises(openai.PermissionDeniedError) as caught:
                client.chat.completions.create(model=name, messages=said)  # type: ignore[arg-type]
            assert (caught.value.code, caught.value.param) == ("insufficient_permissions", "model")
    with anthropic_sdk(keyed, key) as messages:
        assert [model.id for model in messages.models.list()] == ["echo"]
        with pytest.raises(anthropic.PermissionDeniedError) as denied:
            messages.messages.create(model="other", max_tokens=5, messages=said)  # type: ignore[arg-type]
        words = "model: this key may not use model 'other'; it allows: ech*"
        assert denied.value.body == {
            "type": "error",
            "error": {"type": "permission_error", "message": words},
            "request_id": denied.value.request_id,
        }


def test_admin_scope_is_limited_to_the_models_of_the_key(keyed: Running, make: Make) -> None:
    with talking(keyed, {"x-api-key": make(routes=("admin",), models=("ech*",))}) as client:
        assert [model["id"] for model in client.get("/admin/models").json()["data"]] == ["echo"]
        assert client.post("/admin/models/echo/unload").status_code == 200
        refused(client.post("/admin/models/other/load"), 403, param="model", code="insufficient_permissions")
        assert client.post("/admin/reload").status_code == 200


def test_requests_per_minute(keyed: Running, make: Make) -> None:
    key = make(requests_per_minute=2)
    for left in ("1", "0"):
        reply = chat(keyed, key)
        assert reply.status_code == 200
        assert reply.headers["x-ratelimit-limit-requests"] == "2"
        assert reply.headers["x-ratelimit-remaining-requests"] == left
        assert reply.headers["x-ratelimit-reset-requests"].startswith(("1m", "60", "59", "58"))
        assert "x-ratelimit-limit-tokens" not in reply.headers
    late = chat(keyed, key)
    words = refused(late, 429, code="rate_limit_exceeded")
    assert "2 requests per minute" in words
    assert late.json()["error"]["type"] == "requests"
    assert 50 <= int(late.headers["retry-after"]) <= 60
    assert late.headers["x-ratelimit-remaining-requests"] == "0"
    with sdk(keyed, key) as client, pytest.raises(openai.RateLimitError):
        client.chat.completions.create(model="echo", messages=[{"role": "user", "content": "x"}])
    with anthropic_sdk(keyed, key) as messages, pytest.raises(anthropic.RateLimitError) as caught:
        messages.messages.create(model="echo", max_tokens=5, messages=[{"role": "user", "content": "x"}])
    headers = caught.value.response.headers
    assert headers["anthropic-ratelimit-requests-limit"] == "2"
    assert headers["anthropic-ratelimit-requests-remaining"] == "0"
    assert headers["anthropic-ratelimit-requests-reset"].endswith("Z")
    assert int(headers["retry-after"]) >= 50
    body: Any = caught.value.body
    assert body["error"]["type"] == "rate_limit_error"
    with talking(keyed, {"x-api-key": key}) as reading:
        assert reading.get("/v1/models").status_code == 200


def test_tokens_per_minute_by_true_usage(keyed: Running, make: Make) -> None:
    key = make(tokens_per_minute=200)
    reply = message(keyed, key)
    assert reply.headers["anthropic-ratelimit-tokens-limit"] == "200"
    spent = sum(reply.json()["usage"][name] for name in ("input_tokens", "output_tokens"))
    assert spent == 4
    again = chat(keyed, key, max_tokens=10)
    reserved = 200 - 4 - int(again.headers["x-ratelimit-remaining-tokens"])
    assert 10 < reserved < 60
    assert chat(keyed, key, max_tokens=130).status_code == 200
    late = chat(keyed, key, max_tokens=190)
    assert late.json()["error"]["type"] == "tokens"
    refused(late, 429, code="rate_limit_exceeded")
    with talking(keyed, {"x-api-key": key}) as client:
        embedded = client.post("/v1/embeddings", json={"model": "echo", "input": "a few words"})
        assert embedded.status_code == 200
        assert embedded.headers["x-ratelimit-limit-tokens"] == "200"


def test_cancelled_and_failed_requests_are_settled(keyed: Running, make: Make) -> None:
    key = make(tokens_per_minute=1000, concurrency=1)
    body = {"messages": HELLO, "model": "slow", "stream": True, "max_tokens": 900}
    with talking(keyed, {"x-api-key": key}) as client, client.stream("POST", CHAT, json=body) as stream:
        lines = stream.iter_lines()
        assert next(lines).startswith("data: ")
        refused(chat(keyed, key), 429)
    assert eventually(lambda: chat(keyed, key, max_tokens=700).status_code == 200)
    refused(chat(keyed, key, messages=[]), 400, param="messages")
    assert chat(keyed, key, max_tokens=700).status_code == 200


async def _at_once(running: Running, key: str, count: int) -> tuple[list[httpx.Response], int]:
    """Send `count` requests for replies that take minutes; returns the refusals and the number admitted."""
    body = {"messages": HELLO, "model": "slow", "max_tokens": 50}
    headers = {"authorization": f"Bearer {key}"}
    async with many(running) as client:
        tasks = [asyncio.create_task(client.post(CHAT, json=body, headers=headers)) for _ in range(count)]
        async with asyncio.timeout(60):
            stats = {"authorization": f"Bearer {STATIC}"}
            admitted = 0
            while admitted + sum(task.done() for task in tasks) < count:
                slow = (await client.get("/stats", headers=stats)).json()["models"]["slow"]
                # A slot may be kept for another key that was seen lately.
                admitted = slow["running"] + slow["waiting"]
        refusals = [task.result() for task in tasks if task.done()]
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        return refusals, admitted


@pytest.mark.parametrize(
    ("limits", "most"),
    [({"concurrency": 7}, 7), ({"requests_per_minute": 11}, 11), ({"tokens_per_minute": 1000}, 1000 // 70)],
)
def test_two_hundred_at_once_never_exceed_a_limit(
    keyed: Running, make: Make, limits: dict[str, int], most: int
) -> None:
    refusals, admitted = asyncio.run(_at_once(keyed, make(**limits), 200))
    assert {reply.status_code for reply in refusals} == {429}
    assert 1 <= admitted <= most
    if "tokens_per_minute" not in limits:
        assert admitted == most
    assert all(int(reply.headers["retry-after"]) >= 1 for reply in refusals)
    # The next test needs an idle model.
    with talking(keyed, {"x-api-key": STATIC}) as client:
        assert eventually(lambda: client.get("/stats").json()["models"]["slow"]["running"] == 0)
