"""No principal reaches what another stores, by whatever route takes its id: files, batches, conversations, responses.

Random schedules of requests by several principals run against a real server. An id of another principal gets the same
answer as one that does not exist.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.security.conftest import Guarded
from tests.security.credentials import STATIC
from tests.security.test_tenant_isolation import MARK, Tenant, separate_requests, shape

RESPONSES, CONVERSATIONS, FILES = "/v1/responses", "/v1/conversations", "/v1/files"
BATCHES, MESSAGE_BATCHES = "/v1/batches", "/v1/messages/batches"
EMBEDDINGS = "/v1/embeddings"
PREFIXES = {FILES: "file-", CONVERSATIONS: "conv_", RESPONSES: "resp_", BATCHES: "batch_", MESSAGE_BATCHES: "msgbatch_"}
Use = tuple[str, str, Any]
"""A method, a path and a body, with ID in the place of the id."""


def asking(**fields: str) -> Use:
    return "POST", RESPONSES, {"model": "echo", "input": "x", **fields}


USES: dict[str, tuple[Use, ...]] = {
    FILES: (
        ("GET", f"{FILES}/ID", None),
        ("GET", f"{FILES}/ID/content", None),
        ("GET", f"{FILES}?after=ID", None),
        ("DELETE", f"{FILES}/ID", None),
        ("POST", BATCHES, {"input_file_id": "ID", "endpoint": EMBEDDINGS, "completion_window": "24h"}),
    ),
    CONVERSATIONS: (
        ("GET", f"{CONVERSATIONS}/ID", None),
        ("GET", f"{CONVERSATIONS}/ID/items", None),
        ("POST", f"{CONVERSATIONS}/ID", {"metadata": {"a": "b"}}),
        ("POST", f"{CONVERSATIONS}/ID/items", {"items": [{"role": "user", "content": "x"}]}),
        ("DELETE", f"{CONVERSATIONS}/ID", None),
        asking(conversation="ID"),
    ),
    RESPONSES: (
        ("GET", f"{RESPONSES}/ID", None),
        ("GET", f"{RESPONSES}/ID?stream=true", None),
        ("GET", f"{RESPONSES}/ID/input_items", None),
        ("POST", f"{RESPONSES}/ID/cancel", None),
        ("DELETE", f"{RESPONSES}/ID", None),
        asking(previous_response_id="ID"),
    ),
    BATCHES: (
        ("GET", f"{BATCHES}/ID", None),
        ("GET", f"{BATCHES}?after=ID", None),
        ("POST", f"{BATCHES}/ID/cancel", None),
    ),
    MESSAGE_BATCHES: (
        ("GET", f"{MESSAGE_BATCHES}/ID", None),
        ("GET", f"{MESSAGE_BATCHES}/ID/results", None),
        ("GET", f"{MESSAGE_BATCHES}?after_id=ID", None),
        ("POST", f"{MESSAGE_BATCHES}/ID/cancel", None),
        ("DELETE", f"{MESSAGE_BATCHES}/ID", None),
    ),
}
KINDS = tuple(USES)
ACTIONS = st.lists(
    st.tuples(st.integers(0, 1000), st.integers(0, 1000), st.integers(0, 1000), st.booleans()), min_size=10, max_size=40
)


@dataclass
class Owned:
    principal: str
    kind: str
    id: str


@pytest.fixture(scope="module")
def tenants(guarded: Guarded) -> Iterator[list[Tenant]]:
    authority = guarded.authority
    keys = [
        ("static", STATIC),
        ("anna", authority.stored("user:anna")),
        ("bob", authority.stored("user:bob")),
        ("carl", authority.token(sub="user:carl")),
    ]
    with ExitStack() as stack:
        yield [Tenant(name, stack.enter_context(separate_requests(guarded.running, key))) for name, key in keys]


def test_random_schedules_of_tenants(tenants: list[Tenant]) -> None:
    # Hypothesis does not shrink a failing schedule: that takes thousands of requests.
    @settings(max_examples=15, deadline=None, phases=[Phase.explicit, Phase.generate])
    @given(ACTIONS)
    def schedule(actions: list[tuple[int, int, int, bool]]) -> None:
        owned: list[Owned] = []
        for who, what, which, creates in actions:
            tenant = tenants[who % len(tenants)]
            if creates or not owned:
                owned.append(create(tenant, KINDS[what % len(KINDS)]))
            else:
                use(tenant, owned[what % len(owned)], which)
        for tenant in tenants:
            check_lists(tenant, owned)

    schedule()


def create(tenant: Tenant, kind: str) -> Owned:
    answer = try_create(tenant, kind)
    while answer.status_code in (503, 529):
        # The same content was removed at the same moment, with the input of a batch that ended. SDKs send it again too.
        assert "send it again" in answer.text
        answer = try_create(tenant, kind)
    assert answer.status_code == 200, answer.text
    return Owned(tenant.principal, kind, answer.json()["id"])


def try_create(tenant: Tenant, kind: str) -> httpx.Response:
    text = f"mark-{tenant.principal}-said"
    client = tenant.client
    if kind == FILES:
        return upload(client, text)
    if kind == CONVERSATIONS:
        return client.post(kind, json={"items": [{"role": "user", "content": text}], "metadata": {"a": text}})
    if kind == RESPONSES:
        return client.post(kind, json={"model": "echo", "input": text})
    if kind == BATCHES:
        uploaded = upload(client, text)
        if uploaded.status_code != 200:
            return uploaded
        fields = {"input_file_id": uploaded.json()["id"], "metadata": {"a": text}}
        return client.post(kind, json=fields | {"endpoint": EMBEDDINGS, "completion_window": "24h"})
    params = {"messages": [{"role": "user", "content": text}], "max_tokens": 1, "model": "echo"}
    return client.post(kind, json={"requests": [{"custom_id": "a", "params": params}]})


def upload(client: httpx.Client, text: str) -> httpx.Response:
    return client.post(FILES, data={"purpose": "batch"}, files={"file": ("a.jsonl", text.encode())})


def use(tenant: Tenant, chosen: Owned, which: int) -> None:
    """Name an object in one of the ways in which its id can be sent."""
    method, path, body = USES[chosen.kind][which % len(USES[chosen.kind])]
    answer = send(tenant, method, path, body, chosen.id)
    if chosen.principal == tenant.principal:
        # It may have been deleted, or have ended before it is cancelled.
        assert answer.status_code in (200, 400, 404), answer.text
    else:
        unknown = PREFIXES[chosen.kind] + "0" * 24
        assert answer.status_code in (400, 404), answer.text
        missing = send(tenant, method, path, body, unknown)
        ids = answer.headers["x-request-id"], missing.headers["x-request-id"]
        assert shape(answer, chosen.id, ids[0]) == shape(missing, unknown, ids[1])
    assert set(MARK.findall(answer.text)) <= {tenant.principal}, answer.text


def send(tenant: Tenant, method: str, path: str, body: Any, known: str) -> httpx.Response:
    filled = None if body is None else {name: known if value == "ID" else value for name, value in body.items()}
    return tenant.client.request(method, path.replace("ID", known), json=filled)


def check_lists(tenant: Tenant, owned: list[Owned]) -> None:
    for kind in (FILES, BATCHES, MESSAGE_BATCHES):
        listed = tenant.client.get(f"{kind}?limit=100").text
        assert set(MARK.findall(listed)) <= {tenant.principal}
        assert not any(one.id in listed for one in owned if one.principal != tenant.principal)
