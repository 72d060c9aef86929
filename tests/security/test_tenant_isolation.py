"""No principal sees what belongs to another, nor learns whether it exists.

Random schedules of requests by several principals run against a real server. A model of ownership predicts the answer
to each request. Every text of a principal carries a mark that no other principal may receive.
"""

import json
import re
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.security.conftest import Guarded
from tests.security.credentials import STATIC
from tests.support.requests import CHAT, SMALLEST, talking
from tests.support.server_process import Running, Serving

RESPONSES = "/v1/responses"
MISSING, MISSING_ITEM = "resp_" + "0" * 32, "msg_" + "0" * 32
MARK = re.compile(r"mark-([a-z]+)-")
ROUNDS = 150


@dataclass
class Tenant:
    """One key. Several keys may stand for the same principal."""

    principal: str
    client: httpx.Client


@dataclass
class Stored:
    principal: str
    id: str
    items: list[str]
    is_deleted: bool = False


@dataclass
class World:
    tenants: list[Tenant]
    stored: list[Stored] = field(default_factory=list)


@pytest.fixture(scope="module")
def tenants(guarded: Guarded) -> Iterator[list[Tenant]]:
    authority = guarded.authority
    keys = [
        ("static", STATIC),
        ("anna", authority.stored("user:anna")),
        ("anna", authority.stored("user:anna", "responses")),
        ("bob", authority.stored("user:bob")),
        ("coder", authority.stored("agent:coder/anna")),
        ("carl", authority.token(sub="user:carl")),
        ("carl", authority.token(sub="user:carl", routes=["responses"])),
    ]
    with ExitStack() as stack:
        yield [Tenant(name, stack.enter_context(separate_requests(guarded.running, key))) for name, key in keys]


def separate_requests(running: Running, key: str) -> httpx.Client:
    """A client with a connection for each request, so that any front end may answer it."""
    return httpx.Client(
        base_url=running.url,
        trust_env=False,
        timeout=60,
        headers={"authorization": f"Bearer {key}"},
        limits=httpx.Limits(max_keepalive_connections=0),
    )


NUMBER = st.integers(0, 1000)
ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["create", "create", "continue", "refer", "read", "items", "cancel", "count", "delete"]),
        NUMBER,
        NUMBER,
    ),
    min_size=10,
    max_size=40,
)


def test_random_schedules_of_tenants(tenants: list[Tenant]) -> None:
    # Hypothesis does not shrink a failing schedule: that takes thousands of requests.
    @settings(max_examples=25, deadline=None, phases=[Phase.explicit, Phase.generate])
    @given(ACTIONS)
    def schedule(actions: list[tuple[str, int, int]]) -> None:
        world = World(tenants)
        for action, who, what in actions:
            take(world, action, tenants[who % len(tenants)], what)

    schedule()


def take(world: World, action: str, tenant: Tenant, what: int) -> None:
    """Send one request and compare the answer with what the tenant may know."""
    if action == "create" or not world.stored:
        remember(world, tenant, ask(tenant))
        return
    chosen = world.stored[what % len(world.stored)]
    is_own = chosen.principal == tenant.principal and not chosen.is_deleted
    item = chosen.items[what % len(chosen.items)]
    answer = perform(tenant, action, chosen.id, item)
    if action == "refer" and chosen.is_deleted and chosen.principal == tenant.principal:
        # Another response of the tenant may have a copy of the item.
        assert answer.status_code in (200, 404), answer.text
    elif not is_own:
        missing = perform(tenant, action, MISSING, MISSING_ITEM)
        # OpenAI's status for an unknown `previous_response_id`.
        assert answer.status_code == (400 if action in ("continue", "count") else 404), answer.text
        assert shape(answer, chosen.id, item) == shape(missing, MISSING, MISSING_ITEM)
    elif action in ("continue", "refer"):
        remember(world, tenant, answer)
    elif action == "cancel":
        assert answer.status_code == 400, answer.text
    else:
        assert answer.status_code == 200, answer.text
    if is_own and action == "delete":
        chosen.is_deleted = True
        # Responses that continue it have their own copies of its items.
        assert tenant.client.get(f"{RESPONSES}/{chosen.id}").status_code == 404
    assert set(MARK.findall(answer.text)) <= {tenant.principal}, answer.text


def ask(tenant: Tenant, **fields: Any) -> httpx.Response:
    body = {"model": "echo", "input": f"mark-{tenant.principal}-said", **fields}
    return tenant.client.post(RESPONSES, json=body)


def perform(tenant: Tenant, action: str, response: str, item: str) -> httpx.Response:
    path = f"{RESPONSES}/{response}"
    match action:
        case "continue":
            return ask(tenant, previous_response_id=response)
        case "refer":
            reference = {"type": "item_reference", "id": item}
            said = {"role": "user", "content": f"mark-{tenant.principal}-said"}
            return ask(tenant, input=[reference, said])
        case "count":
            return tenant.client.post(
                f"{RESPONSES}/input_tokens", json={"model": "echo", "input": "x", "previous_response_id": response}
            )
        case "items":
            return tenant.client.get(f"{path}/input_items")
        case "cancel":
            return tenant.client.post(f"{path}/cancel")
        case "delete":
            return tenant.client.delete(path)
    return tenant.client.get(path)


def remember(world: World, tenant: Tenant, answer: httpx.Response) -> None:
    assert answer.status_code == 200, answer.text
    body = answer.json()
    listed = tenant.client.get(f"{RESPONSES}/{body['id']}/input_items").json()["data"]
    items = [item["id"] for item in (*body["output"], *listed)]
    world.stored.append(Stored(tenant.principal, body["id"], items))


def shape(answer: httpx.Response, *ids: str) -> tuple[int, list[str], str]:
    """The answer without the requested ids."""
    text = answer.text
    for known in ids:
        text = text.replace(known, "ID")
    return answer.status_code, sorted(answer.headers), text


def test_batches_of_another_principal_do_not_exist(tenants: list[Tenant]) -> None:
    anna, bob, body = tenants[1], tenants[3], {"custom_id": "a", "params": {"messages": [], "max_tokens": 1}}
    line = b'{"custom_id": "a", "method": "POST", "url": "/v1/embeddings", "body": {"input": "x"}}'
    upload = {"data": {"purpose": "batch"}, "files": {"file": ("a.jsonl", line)}}
    file = anna.client.post("/v1/files", **upload).json()["id"]  # type: ignore[arg-type]
    fields = {"input_file_id": file, "endpoint": "/v1/embeddings", "completion_window": "24h"}
    assert bob.client.post("/v1/batches", json=fields).status_code == 400
    made = {
        "/v1/batches": anna.client.post("/v1/batches", json=fields),
        "/v1/messages/batches": anna.client.post("/v1/messages/batches", json={"requests": [body]}),
    }
    for path, created in made.items():
        known, missing = created.json()["id"], created.json()["id"].partition("_")[0] + "_" + "0" * 24
        assert anna.client.get(f"{path}/{known}").status_code == 200
        assert known not in bob.client.get(path).text
        for method, below in (("GET", ""), ("POST", "/cancel"), ("DELETE", ""), ("GET", "/results")):
            answer = bob.client.request(method, f"{path}/{known}{below}")
            assert answer.status_code in (404, 405)
            other = bob.client.request(method, f"{path}/{missing}{below}")
            ids = answer.headers["x-request-id"], other.headers["x-request-id"]
            assert shape(answer, known, ids[0]) == shape(other, missing, ids[1])
        cursor = "after" if path == "/v1/batches" else "after_id"
        assert bob.client.get(path, params={cursor: known}).status_code == 400


def test_time_of_a_404_does_not_reveal_whether_a_response_exists(tenants: list[Tenant]) -> None:
    anna, bob = tenants[1], tenants[3]
    known = ask(anna, input="mark-anna-" + "long " * 20_000).json()["id"]
    taken: dict[str, list[float]] = {known: [], MISSING: []}
    for _ in range(ROUNDS):
        for response, times in taken.items():
            began = time.perf_counter()
            assert bob.client.get(f"{RESPONSES}/{response}").status_code == 404
            times.append(time.perf_counter() - began)
    existing, missing = (statistics.median(times) for times in taken.values())
    assert existing < 3 * missing, (existing, missing)


@pytest.mark.parametrize(
    "change",
    [str.upper, lambda known: known + "/", lambda known: known + "\x00", lambda known: f" {known}", lambda _: "*"],
)
def test_only_the_exact_id_finds_a_response(tenants: list[Tenant], change: Any) -> None:
    anna, bob = tenants[1], tenants[3]
    known = ask(anna).json()["id"]
    for tenant in (anna, bob):
        path = f"{RESPONSES}/{quote(change(known), safe='/')}"
        answer = tenant.client.get(path)
        if tenant is anna and path.endswith("/"):
            assert answer.json()["id"] == known
        else:
            assert answer.status_code == 404, answer.text


def test_models_outside_the_scope_of_a_key_are_hidden_or_refused(guarded: Guarded) -> None:
    key = guarded.authority.stored("user:narrow", models=("echo",))
    with talking(guarded.running, {"authorization": f"Bearer {key}"}) as client:
        assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["echo"]
        for name in ("other", "OTHER", "gpt-4", "gpt-%65cho"):
            assert client.get(f"/v1/models/{name}").status_code in (403, 404)
            for path, fields in SMALLEST.items():
                answer = client.post(path, json={"model": name, **fields})
                assert answer.status_code in (403, 404), (path, name, answer.text)
        missing = client.post(CHAT, json={"model": "nothing", "messages": [{"role": "user", "content": "x"}]})
        assert "other" not in missing.text


@pytest.mark.timeout(300)
@pytest.mark.workers(2, reason="the principal of a request is sent to the engine by another process")
def test_cached_tokens_are_shared_between_principals_unless_isolated(
    tmp_path: Path, smollm2_path: Path, serving: Serving
) -> None:
    entry = {"source": str(smollm2_path), "context": 512, "slots": 2, "layout": "as-is"}
    models = {"shared": entry, "isolated": entry | {"isolate": True}}
    config = {"models": models, "api_keys": ["sk-anna", "sk-bob"], "keys": {"store": "keys.db"}}
    with serving(tmp_path, config) as running:
        # The second request of anna shows that the prompt is cached at all.
        [of_none, of_another, of_own] = cached_tokens(running, "shared", ["sk-anna", "sk-bob", "sk-anna"])
        assert of_none == 0 < of_another
        assert of_own > 0
        [of_none, of_another, of_own] = cached_tokens(running, "isolated", ["sk-anna", "sk-bob", "sk-anna"])
        assert of_none == of_another == 0 < of_own


def cached_tokens(running: Running, model: str, keys: list[str]) -> list[int]:
    """Cached tokens of the same prompt, sent with each key in turn."""
    said = [{"role": "user", "content": "The code of the safe is one two three four. " * 3}]
    found = []
    for key in keys:
        with separate_requests(running, key) as client:
            answer = client.post(CHAT, json={"model": model, "messages": said, "max_tokens": 1})
        found.append(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])
    return found


def send(running: Running, key: str, method: str, path: str, **options: object) -> httpx.Response:
    with talking(running, {"authorization": f"Bearer {key}"}) as client:
        return client.request(method, path, **options)  # type: ignore[arg-type]


def store(running: Running, key: str) -> str:
    answer = send(running, key, "POST", RESPONSES, json={"input": f"said with {key}"})
    assert answer.status_code == 200, answer.text
    made: str = answer.json()["id"]
    return made


def test_static_keys_keep_their_responses_when_other_keys_come_and_go(tmp_path: Path, serving: Serving) -> None:
    config = {"models": {"echo": {"engine": "scripted"}}, "keys": {"store": "keys.db"}}
    with serving(tmp_path, config | {"api_keys": ["sk-first", "sk-second"]}) as running:
        first, second = store(running, "sk-first"), store(running, "sk-second")
        for keys in (["sk-second", "sk-first"], ["sk-second", "sk-third"], ["sk-third", "sk-second"]):
            (tmp_path / "dragoman.json").write_text(json.dumps({"models_dir": [], **config, "api_keys": keys}))
            assert send(running, "sk-second", "POST", "/admin/reload").status_code == 200
            for key, response in product(("sk-first", "sk-second", "sk-third"), (first, second)):
                status = send(running, key, "GET", f"{RESPONSES}/{response}").status_code
                is_owner = (key, response) in (("sk-first", first), ("sk-second", second))
                assert status == (401 if key not in keys else 200 if is_owner else 404), (keys, key)
