"""Keys, scopes, quotas and budgets of the requests of a WebSocket, and origins of browsers."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from websockets.exceptions import InvalidStatus

from dragoman.config.sections import BudgetLimit, KeyLimits
from dragoman.storage.keys import KeyStore
from tests.server.conftest import Make
from tests.support.requests import CHAT, ask, eventually, recorded, talking
from tests.support.server_process import Running, Serving
from tests.support.websocket import create, events_of, next_event, opened, refusal, respond, text_of_response

STATIC, SECOND = "sk-static-0123456789", "sk-second-0123456789"
PAGE = "https://page.example"
TICKS = {"engine": "scripted", "tokens_per_second": 50, "replies": [{"output": "tick " * 2000}]}
CONFIG: dict[str, Any] = {
    "models": {"echo": {"engine": "scripted"}, "other": {"engine": "scripted"}, "ticks": TICKS},
    "default": "echo",
    "api_keys": [STATIC, SECOND],
    "keys": {"store": "keys.db"},
    "cors": {"origins": [PAGE]},
    "models_dir": [],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("keyed")


@pytest.fixture(scope="module")
def store(folder: Path) -> KeyStore:
    return KeyStore(folder / "keys.db")


@pytest.fixture(scope="module")
def server(folder: Path, store: KeyStore, serving: Serving) -> Iterator[Running]:
    with serving(folder, CONFIG) as running:
        yield running


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_handshake_needs_a_key_with_the_scope(server: Running, make: Make) -> None:
    for headers, status in (
        ({}, 401),
        (bearer("wrong"), 401),
        (bearer(make(routes=("chat",))), 403),
        ({"x-api-key": STATIC} | bearer(SECOND), 401),
    ):
        with pytest.raises(InvalidStatus) as refused, opened(server, headers):
            pass
        assert refused.value.response.status_code == status
        assert json.loads(refused.value.response.body)["error"]["message"]
    with opened(server, {"x-api-key": make(routes=("responses",))}) as websocket:
        assert respond(websocket)["status"] == "completed"


@pytest.mark.parametrize(("origin", "is_allowed"), [(PAGE, True), ("https://evil.example", False), ("null", False)])
def test_page_needs_an_allowed_origin_or_a_key(server: Running, origin: str, is_allowed: bool) -> None:
    # A page cannot send a key in a header: this client can.
    with opened(server, bearer(STATIC), origin=origin) as websocket:
        assert respond(websocket)["status"] == "completed"
    # Basic authentication can be a part of a URL.
    with pytest.raises(InvalidStatus) as refused, opened(server, {"authorization": "Basic eDp5"}, origin=origin):
        pass
    assert refused.value.response.status_code == 401
    assert refused.value.response.headers.get("access-control-allow-origin") == (origin if is_allowed else None)


def test_model_of_another_key_is_refused(server: Running, make: Make) -> None:
    with opened(server, bearer(make(models=("other",)))) as websocket:
        create(websocket)
        refusal(websocket, 403, "insufficient_permissions", "model")
        assert respond(websocket, model="other")["model"] == "other"
        create(websocket, generate=False)
        refusal(websocket, 403, "insufficient_permissions", "model")


def test_each_request_counts_for_the_quota(server: Running, make: Make) -> None:
    key = make(requests_per_minute=3)
    with opened(server, bearer(key)) as websocket, talking(server, bearer(key)) as client:
        assert respond(websocket)["status"] == "completed"
        assert respond(websocket, generate=False)["status"] == "completed"
        assert ask(client, CHAT).status_code == 200
        create(websocket)
        event = refusal(websocket, 429, "rate_limit_exceeded")
    assert event["error"]["type"] == "requests"
    assert 0 < int(event["headers"]["retry-after"]) <= 60
    assert event["headers"]["x-ratelimit-remaining-requests"] == "0"
    (record,) = recorded(server, id=event["headers"]["x-request-id"])
    assert (record["status"], record["error"]) == (429, "rate_limit_exceeded")


def test_requests_at_a_time(server: Running, make: Make) -> None:
    with opened(server, bearer(make(concurrency=1))) as websocket:
        create(websocket, model="ticks", stream_id="a")
        next_event(websocket)
        create(websocket, stream_id="b")
        while (event := next_event(websocket))["stream_id"] != "b":
            pass
        assert (event["status"], event["error"]["code"]) == (429, "rate_limit_exceeded")
        websocket.send(json.dumps({"type": "response.cancel", "stream_id": "a"}))
        assert events_of(websocket)[-1]["response"]["status"] == "cancelled"
        assert respond(websocket, stream_id="b")["status"] == "completed"


def test_tokens_count_for_the_budget(server: Running, store: KeyStore) -> None:
    limits = KeyLimits(budgets=(BudgetLimit(per="day", tokens=100),))
    with opened(server, bearer(store.create("bea", limits=limits)[0])) as websocket:
        response = respond(websocket, "one two three", max_output_tokens=10)
        create(websocket, max_output_tokens=1000)
        event = refusal(websocket, 429, "insufficient_quota")
        used = response["usage"]["total_tokens"]
        assert event["error"]["message"].startswith(f"budget exhausted: {used} of 100 tokens per day")
        assert event["headers"]["x-should-retry"] == "false"
        # A warm-up uses no tokens.
        assert respond(websocket, "a" * 1000, generate=False)["status"] == "completed"


def test_revoked_key_refuses_the_next_request(server: Running, store: KeyStore) -> None:
    secret, key = store.create("carl")
    with opened(server, bearer(secret)) as websocket:
        first = respond(websocket)
        assert store.revoke(key.id)

        def is_refused() -> bool:
            create(websocket, previous_response_id=first["id"])
            last = events_of(websocket)[-1]
            return last["type"] == "error" and (last["status"], last["error"]["code"]) == (401, "invalid_api_key")

        assert eventually(is_refused)


def test_key_removed_by_a_reload_refuses_the_next_request(server: Running) -> None:
    file = server.log.parent / "dragoman.json"
    with opened(server, bearer(SECOND)) as websocket, opened(server, bearer(STATIC)) as other:
        assert respond(websocket)["status"] == "completed"
        before = file.read_text()
        file.write_text(json.dumps(CONFIG | {"api_keys": [STATIC]}))
        try:
            with talking(server, bearer(STATIC)) as client:
                client.post("/admin/reload").raise_for_status()
            create(websocket)
            refusal(websocket, 401, "invalid_api_key")
            assert respond(other)["status"] == "completed"
        finally:
            file.write_text(before)
            with talking(server, bearer(STATIC)) as client:
                client.post("/admin/reload").raise_for_status()
        assert text_of_response(respond(websocket)) == "hello"


def test_responses_of_other_principals_do_not_exist(server: Running, make: Make) -> None:
    with opened(server, bearer(make("user:anna"))) as anna, opened(server, bearer(make("user:bob"))) as bob:
        mine = respond(anna, store=True)
        assert respond(anna, previous_response_id=mine["id"])["status"] == "completed"
        create(bob, previous_response_id=mine["id"])
        refusal(bob, 400, "previous_response_not_found", "previous_response_id")
        create(bob, [{"type": "item_reference", "id": mine["output"][0]["id"]}])
        refusal(bob, 404, "not_found", "input[0].id")
