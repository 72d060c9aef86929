"""Keys in both protocols with the official SDKs: scopes, limits, revocation."""

import asyncio
import hmac
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import msgspec
import openai
import pytest

from dragoman.config.sections import KeyLimits, Keys, RouteScope
from dragoman.config.settings import Settings
from dragoman.core.errors import ConfigError, PermissionDenied, StorageUnavailable, Unauthorized
from dragoman.server.auth.access import Access
from dragoman.server.preflight_checks import check_exposure
from dragoman.storage.keys import KeyStore
from tests.support.anthropic_sdk import anthropic_sdk
from tests.support.openai_sdk import sdk
from tests.support.requests import CHAT, HELLO, ask, eventually, recorded, refused, talking, text_of
from tests.support.server_process import Running, serving

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
def keyed(folder: Path, store: KeyStore) -> Iterator[Running]:
    config = {
        "models": {"echo": {"engine": "scripted"}, "other": {"engine": "scripted"}, "slow": SLOW},
        "aliases": {"gpt-*": "other"},
        "api_keys": [STATIC],
        "keys": {"store": "keys.db"},
    }
    with serving(folder, config) as running:
        yield running


Make = Callable[..., str]


@pytest.fixture
def make(store: KeyStore) -> Make:
    def made(
        name: str = "anna", models: tuple[str, ...] = (), routes: tuple[RouteScope, ...] = (), **limits: int
    ) -> str:
        return store.create(name, models=models, routes=routes, limits=KeyLimits(**limits))[0]

    return made


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
    assert message(keyed, secret).json()["error"]["type"] == "authentication_error"


def test_static_keys_keep_working(keyed: Running) -> None:
    assert text_of(chat(keyed, STATIC)) == "hello"
    with talking(keyed, {"authorization": f"Bearer {STATIC}"}) as client:
        assert client.get("/stats").status_code == 200


def test_expired_key(keyed: Running, store: KeyStore) -> None:
    secret, _ = store.create("anna", expires=time.time() + 3)
    assert chat(keyed, secret).status_code == 200
    assert eventually(lambda: chat(keyed, secret).status_code != 200)
    refused(chat(keyed, secret), 401, code="invalid_api_key")


@pytest.mark.parametrize(
    "change",
    [
        lambda key: key[:-1] + ("0" if key[-1] != "0" else "1"),
        lambda key: key[:-1],
        lambda key: key + "0",
        lambda key: key.upper(),
        lambda key: "dgm_000000000000_" + key.rpartition("_")[2],
        lambda key: "' OR 1=1 --",
        lambda key: "dgm__",
    ],
)
def test_similar_keys_are_refused(keyed: Running, make: Make, change: Callable[[str], str]) -> None:
    refused(chat(keyed, change(make())), 401, code="invalid_api_key")


def test_scopes_by_model(keyed: Running, make: Make) -> None:
    key = make(models=("ech*",))
    with sdk(keyed, key) as client:
        assert [model.id for model in client.models.list()] == ["echo"]
        assert client.models.retrieve("echo").id == "echo"
        for name in ("other", "gpt-4"):
            with pytest.raises(openai.PermissionDeniedError) as caught:
                client.chat.completions.create(model=name, messages=[{"role": "user", "content": "x"}])
            assert caught.value.code == "insufficient_permissions"
            assert caught.value.param == "model"
        with pytest.raises(openai.PermissionDeniedError):
            client.models.retrieve("other")
        with pytest.raises(openai.PermissionDeniedError):
            client.embeddings.create(model="other", input="x")
        with pytest.raises(openai.NotFoundError) as missing:
            client.chat.completions.create(model="nothing", messages=[{"role": "user", "content": "x"}])
        assert "other" not in missing.value.message
    with anthropic_sdk(keyed, key) as messages:
        with pytest.raises(anthropic.PermissionDeniedError) as denied:
            messages.messages.create(model="other", max_tokens=5, messages=[{"role": "user", "content": "x"}])
        assert denied.value.body == {
            "type": "error",
            "error": {
                "type": "permission_error",
                "message": "model: this key may not use model 'other'; it allows: ech*",
            },
            "request_id": denied.value.request_id,
        }
        with pytest.raises(anthropic.PermissionDeniedError):
            messages.messages.count_tokens(model="other", messages=[{"role": "user", "content": "x"}])
        assert [model.id for model in messages.models.list()] == ["echo"]


def test_scopes_by_route(keyed: Running, make: Make) -> None:
    key = make(routes=("messages",))
    assert message(keyed, key).status_code == 200
    refused(chat(keyed, key), 403, code="insufficient_permissions")
    with talking(keyed, {"x-api-key": key}) as client:
        assert client.get("/v1/models").status_code == 200
        refused(client.get("/stats"), 403)
        refused(client.get("/metrics"), 403)
        refused(client.post("/tokenize", json={"content": "x"}), 403)
        refused(client.post("/admin/reload"), 403)
    refused_message = message(keyed, make(routes=("chat",)))
    assert refused_message.status_code == 403
    assert refused_message.json()["error"]["type"] == "permission_error"


def test_admin_routes_need_explicit_scope(keyed: Running, make: Make) -> None:
    for key, status in ((make(), 403), (make(routes=("stats",)), 200)):
        with talking(keyed, {"x-api-key": key}) as client:
            assert client.get("/metrics").status_code == status


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
    limits = httpx.Limits(max_connections=None)
    body = {"messages": HELLO, "model": "slow", "max_tokens": 50}
    headers = {"authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(base_url=running.url, trust_env=False, timeout=60, limits=limits) as client:
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


def settings(folder: Path, **keys: Any) -> Settings:
    return Settings(keys=Keys(store=str(folder / "own.db"), **keys))


def given(key: str) -> dict[bytes, bytes]:
    return {b"authorization": b"Bearer " + key.encode()}


def test_number_of_comparisons_is_constant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = KeyStore(tmp_path / "own.db")
    secret, _ = store.create("anna")
    access = Access(Settings(api_keys=("one", "two", "three"), keys=Keys(store=str(store.path))))
    compared: list[int] = []
    compare = hmac.compare_digest

    def counting(one: bytes, other: bytes) -> bool:
        compared.append(len(one))
        assert len(one) == len(other) == 32
        return compare(one, other)

    monkeypatch.setattr(hmac, "compare_digest", counting)
    counts = set()
    for key in (secret, "one", "three", secret[:-1] + "x", "x" + secret[1:], "dgm_" + "0" * 12 + "_" + "0" * 48, "x"):
        compared.clear()
        try:
            access.caller(given(key))
        except Unauthorized:
            pass
        counts.add(len(compared))
    assert counts == {4}
    access.close()


def test_keys_are_required_once_one_has_existed(tmp_path: Path) -> None:
    store = KeyStore(tmp_path / "own.db")
    access = Access(settings(tmp_path))
    assert access.caller({}).principal == "anonymous"
    assert access.caller(given("none")).routes >= {"admin"}
    secret, key = store.create("anna")
    time.sleep(1.05)
    with pytest.raises(Unauthorized):
        access.caller({})
    assert access.caller(given(secret)).principal == "user:anna"
    store.revoke(key.id)
    time.sleep(1.05)
    for headers in ({}, given(secret)):
        with pytest.raises(Unauthorized):
            access.caller(headers)
    access.close()
    again = Access(settings(tmp_path))
    with pytest.raises(Unauthorized):
        again.caller({})
    again.close()


def test_anonymous_callers(tmp_path: Path) -> None:
    secret, _ = KeyStore(tmp_path / "own.db").create("anna", routes=["admin"])
    access = Access(settings(tmp_path, anonymous=True, limits=KeyLimits(concurrency=1)))
    anonymous = access.caller({})
    assert anonymous.principal == "anonymous"
    assert anonymous.quota is not None
    assert not anonymous.routes & {"admin", "stats"}
    with pytest.raises(PermissionDenied, match=r"^admin routes need a key; without one this server allows: chat, "):
        anonymous.check_route("admin")
    assert access.caller(given("none")) is anonymous
    assert "admin" in access.caller(given(secret)).routes
    access.close()


def test_unreadable_store(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = KeyStore(tmp_path / "own.db")
    secret, _ = store.create("anna")
    access = Access(settings(tmp_path))
    before = store.path.read_bytes()
    store.path.unlink()
    store.path.write_bytes(b"x" * 4096)
    time.sleep(1.05)
    assert access.caller(given(secret)).principal == "user:anna"
    with pytest.raises(StorageUnavailable):
        access.caller(given("dgm_" + "0" * 12 + "_" + "0" * 48))
    assert len(caplog.records) == 1
    store.path.unlink()
    store.path.write_bytes(before)
    time.sleep(1.05)
    with pytest.raises(Unauthorized):
        access.caller(given("dgm_" + "0" * 12 + "_" + "0" * 48))
    assert access.caller(given(secret)).principal == "user:anna"
    access.close()
    store.path.write_bytes(b"x" * 4096)
    with pytest.raises(ConfigError, match=r"own\.db cannot be read"):
        Access(settings(tmp_path))


def test_public_address_needs_keys_or_anonymous(tmp_path: Path) -> None:
    def exposed(**fields: Any) -> Settings:
        exposing = Settings(host="0.0.0.0", keys=Keys(store=str(tmp_path / "own.db")))
        return msgspec.structs.replace(exposing, **fields)

    with pytest.raises(ConfigError, match="dragoman keys create"):
        check_exposure(exposed())
    check_exposure(exposed(api_keys=("x",)))
    check_exposure(exposed(keys=Keys(anonymous=True)))
    check_exposure(exposed(socket="/run/dragoman.sock"))
    KeyStore(tmp_path / "own.db").create("anna")
    check_exposure(exposed())
