"""No principal sees the files of another, nor learns whether they exist.

Random schedules of requests by several principals run against a real server. A model of ownership predicts the answer
to each request, in both APIs. Equal contents of several principals are one content on the disk.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field

import httpx
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.security.conftest import Guarded
from tests.security.credentials import STATIC
from tests.security.test_tenant_isolation import Tenant, separate_requests, shape

FILES = "/v1/files"
MISSING = "file-" + "0" * 24
ANTHROPIC = {"anthropic-version": "2023-06-01"}


@dataclass
class OwnedFile:
    principal: str
    id: str
    content: bytes
    is_deleted: bool = False


@dataclass
class FileWorld:
    tenants: list[Tenant]
    kept: list[OwnedFile] = field(default_factory=list)


@pytest.fixture(scope="module")
def tenants(guarded: Guarded) -> Iterator[list[Tenant]]:
    authority = guarded.authority
    keys = [
        ("static", STATIC),
        ("anna", authority.stored("user:anna")),
        ("anna", authority.stored("user:anna", "files")),
        ("bob", authority.stored("user:bob", "files")),
        ("carl", authority.token(sub="user:carl")),
    ]
    with ExitStack() as stack:
        yield [Tenant(name, stack.enter_context(separate_requests(guarded.running, key))) for name, key in keys]


ACTION = st.sampled_from(["upload", "upload", "show", "content", "delete", "list", "after", "ids", "before"])
ACTIONS = st.lists(
    st.tuples(ACTION, st.integers(0, 1000), st.integers(0, 1000), st.booleans()), min_size=10, max_size=40
)


def test_random_schedules_of_tenants(tenants: list[Tenant]) -> None:
    # Hypothesis does not shrink a failing schedule: that takes thousands of requests.
    @settings(max_examples=15, deadline=None, phases=[Phase.explicit, Phase.generate])
    @given(ACTIONS)
    def schedule(actions: list[tuple[str, int, int, bool]]) -> None:
        world = FileWorld(tenants)
        for action, who, what, is_anthropic in actions:
            take(world, action, tenants[who % len(tenants)], what, ANTHROPIC if is_anthropic else {})
        for tenant in tenants:
            own = [kept for kept in world.kept if kept.principal == tenant.principal and not kept.is_deleted]
            assert listed(tenant, "order=asc") == [kept.id for kept in own]
            for kept in own:
                assert tenant.client.get(f"{FILES}/{kept.id}/content").content == kept.content
                tenant.client.delete(f"{FILES}/{kept.id}")
                kept.is_deleted = True

    schedule()


def listed(tenant: Tenant, query: str = "") -> list[str]:
    return [file["id"] for file in tenant.client.get(f"{FILES}?{query}").raise_for_status().json()["data"]]


def take(world: FileWorld, action: str, tenant: Tenant, what: int, headers: dict[str, str]) -> None:
    """Send one request and compare the answer with what the tenant may know."""
    if action == "upload" or not world.kept:
        content = b"content %d" % (what % 3)
        data = {} if headers else {"purpose": "batch"}
        sent = {"file": ("a", content)}
        answer = tenant.client.post(FILES, files=sent, data=data, headers=headers).raise_for_status()
        world.kept.append(OwnedFile(tenant.principal, answer.json()["id"], content))
        return
    chosen = world.kept[what % len(world.kept)]
    own = {kept.id for kept in world.kept if kept.principal == tenant.principal and not kept.is_deleted}
    if action == "list":
        assert set(listed(tenant)) == own
        return
    answer = perform(tenant, action, chosen.id, headers)
    if chosen.id in own:
        assert answer.status_code == 200, answer.text
    elif action == "ids":
        assert answer.json()["data"] == []
    else:
        assert answer.status_code == (400 if action in ("after", "before") else 404), answer.text
        missing = perform(tenant, action, MISSING, headers)
        shapes = [
            shape(reply, file, reply.headers["x-request-id"])
            for reply, file in ((answer, chosen.id), (missing, MISSING))
        ]
        assert shapes[0] == shapes[1]
    if action in ("after", "before", "ids") and answer.status_code == 200:
        assert {file["id"] for file in answer.json()["data"]} <= own
    if action == "delete" and chosen.id in own:
        chosen.is_deleted = True


def perform(tenant: Tenant, action: str, file: str, headers: dict[str, str]) -> httpx.Response:
    client, path = tenant.client, f"{FILES}/{file}"
    match action:
        case "content":
            return client.get(f"{path}/content", headers=headers)
        case "delete":
            return client.delete(path, headers=headers)
        case "after":
            return client.get(FILES, params={"after_id" if headers else "after": file}, headers=headers)
        case "before":
            return client.get(FILES, params={"before_id": file}, headers=ANTHROPIC)
        case "ids":
            return client.get(FILES, params={"ids[]": file}, headers=ANTHROPIC)
    return client.get(path, headers=headers)
