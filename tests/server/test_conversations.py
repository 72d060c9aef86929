"""Conversations through the official SDK."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI
from openai.types.conversations import Conversation, ConversationItem, ConversationItemList
from openai.types.responses import Response
from pydantic import TypeAdapter

from tests.support.requests import refused, talking
from tests.support.sdk import sdk, validated
from tests.support.server_process import Running, Serving, server_fixture

CONVERSATIONS = "/v1/conversations"
MODELS = {
    "echo": {"engine": "scripted"},
    "failing": {"engine": "scripted", "fail_after": 1, "replies": [{"output": "one two three"}]},
}
running = server_fixture({"models": MODELS, "default": "echo", "api_keys": ["ann", "bob"]})


@pytest.fixture
def client(running: Running) -> Iterator[OpenAI]:
    with sdk(running, "ann") as made:
        yield made


@pytest.fixture
def plain(running: Running) -> Iterator[httpx.Client]:
    with talking(running, {"authorization": "Bearer ann"}) as made:
        yield made


def said(text: str, **fields: Any) -> Any:
    return {"type": "message", "role": "user", "content": text, **fields}


def texts(client: OpenAI, conversation: str) -> list[str]:
    return [item.content[0].text for item in client.conversations.items.list(conversation, order="asc")]  # type: ignore[union-attr,index]


def test_conversation_is_created_changed_and_deleted(client: OpenAI) -> None:
    raw = client.conversations.with_raw_response.create(metadata={"topic": "x"}, items=[said("hello")])
    made = validated(Conversation, raw.content)
    assert made.id.startswith("conv_")
    assert made.metadata == {"topic": "x"}
    assert client.conversations.retrieve(made.id) == made
    changed = client.conversations.update(made.id, metadata={"topic": "y"})
    assert changed == made.model_copy(update={"metadata": {"topic": "y"}})
    assert client.conversations.retrieve(made.id) == changed
    assert client.conversations.delete(made.id).deleted
    for ask in (client.conversations.retrieve, client.conversations.delete, client.conversations.items.list):
        with pytest.raises(openai.NotFoundError):
            ask(made.id)


def test_items_are_added_listed_and_deleted(client: OpenAI) -> None:
    made = client.conversations.create()
    assert texts(client, made.id) == []
    items = [said(str(number)) for number in range(5)]
    raw = client.conversations.items.with_raw_response.create(made.id, items=items)
    added = validated(ConversationItemList, raw.content)
    assert [item.content[0].text for item in added.data] == ["0", "1", "2", "3", "4"]
    assert texts(client, made.id) == ["0", "1", "2", "3", "4"]
    # The SDK asks for the next pages itself.
    falling = client.conversations.items.list(made.id, limit=2)
    assert [item.content[0].text for item in falling] == ["4", "3", "2", "1", "0"]  # type: ignore[union-attr,index]
    second = added.data[1]
    raw_item = client.conversations.items.with_raw_response.retrieve(second.id, conversation_id=made.id)
    adapter: TypeAdapter[Any] = TypeAdapter(ConversationItem)
    assert adapter.validate_json(raw_item.content, strict=True) == second
    assert client.conversations.items.delete(second.id, conversation_id=made.id).id == made.id
    assert texts(client, made.id) == ["0", "2", "3", "4"]
    for ask in (client.conversations.items.retrieve, client.conversations.items.delete):
        with pytest.raises(openai.NotFoundError):
            ask(second.id, conversation_id=made.id)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("store", [None, False])
def test_response_continues_a_conversation(client: OpenAI, stream: bool, store: bool | None) -> None:
    made = client.conversations.create(items=[said("first")])
    fields: dict[str, Any] = {"model": "echo", "conversation": made.id, "store": store}
    if stream:
        response: Response = list(client.responses.create(input="second", stream=True, **fields))[-1].response
    else:
        response = client.responses.create(input="second", **fields)
    assert response.conversation is not None
    assert response.conversation.id == made.id
    assert texts(client, made.id) == ["first", "second", "second"]
    client.responses.create(input=[said("third")], model="echo", conversation={"id": made.id})
    assert texts(client, made.id) == ["first", "second", "second", "third", "third"]


def test_background_response_continues_a_conversation(client: OpenAI) -> None:
    made = client.conversations.create(items=[said("first")])
    list(client.responses.create(model="echo", input="second", conversation=made.id, background=True, stream=True))
    assert texts(client, made.id) == ["first", "second", "second"]


def test_failed_response_adds_nothing(client: OpenAI) -> None:
    made = client.conversations.create(items=[said("first")])
    with pytest.raises(openai.APIError):
        client.responses.create(model="failing", input="second", conversation=made.id)
    assert texts(client, made.id) == ["first"]


def test_item_whose_id_is_taken_gets_another(client: OpenAI) -> None:
    made = client.conversations.create(items=[said("one", id="msg_1")])
    added = client.conversations.items.create(made.id, items=[said("two", id="msg_1")])
    assert added.data[0].id != "msg_1"
    client.responses.create(model="echo", input=[said("three", id="msg_1")], conversation=made.id)
    assert texts(client, made.id) == ["one", "two", "three", "three"]
    assert len({item.id for item in client.conversations.items.list(made.id)}) == 4


def test_concurrent_additions_lose_nothing(client: OpenAI) -> None:
    made = client.conversations.create()

    def add(number: int) -> None:
        if number % 2:
            client.conversations.items.create(made.id, items=[said(f"{number}a"), said(f"{number}b")])
        else:
            client.responses.create(model="echo", input=f"{number}", conversation=made.id)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(add, range(40)))
    found = texts(client, made.id)
    assert len(found) == 80
    for number in range(40):
        pair = [f"{number}a", f"{number}b"] if number % 2 else [f"{number}"] * 2
        at = found.index(pair[0])
        assert found[at : at + 2] == pair


def test_conversation_of_another_key_does_not_exist(client: OpenAI, running: Running) -> None:
    made = client.conversations.create(items=[said("secret")])
    item = client.conversations.items.list(made.id).data[0].id
    with talking(running, {"authorization": "Bearer bob"}) as bob:
        for method, path, body in (
            ("GET", "", None),
            ("POST", "", {"metadata": {}}),
            ("DELETE", "", None),
            ("GET", "/items", None),
            ("POST", "/items", {"items": [said("x")]}),
            ("GET", f"/items/{item}", None),
            ("DELETE", f"/items/{item}", None),
        ):
            reply = bob.request(method, f"{CONVERSATIONS}/{made.id}{path}", json=body)
            unknown = bob.request(method, f"{CONVERSATIONS}/conv_0{path}", json=body)
            assert refused(reply, 404).replace(made.id, "conv_0") == refused(unknown, 404)
        refused(bob.post("/v1/responses", json={"input": "x", "conversation": made.id}), 404, param="conversation")
    assert texts(client, made.id) == ["secret"]


def test_invalid_field_is_named_and_unknown_path_is_a_404(plain: httpx.Client) -> None:
    made = plain.post(CONVERSATIONS, json={}).json()["id"]
    wrong: list[tuple[str, Any, str]] = [
        ("", {"items": 5}, "items"),
        ("", {"items": [{"role": "bob", "content": "x"}]}, "items[0].role"),
        ("", {"items": [{"type": "item_reference", "id": "msg_1"}]}, "items[0].type"),
        ("", {"items": [{"role": "user", "content": "x"}, {"type": "nonsense"}]}, "items[1].type"),
        (f"/{made}/items", {"items": [{"type": "nonsense"}]}, "items[0].type"),
        ("", {"metadata": {"a": 5}}, "metadata.a"),
        ("", {"metadata": {"a": "x" * 513}}, "metadata.a"),
        ("", {"metadata": {"a" * 65: "x"}}, f"metadata.{'a' * 64}"),
        ("", {"metadata": {str(at): "x" for at in range(17)}}, "metadata"),
        (f"/{made}", {"metadata": {str(at): "x" for at in range(17)}}, "metadata"),
        (f"/{made}", {}, "metadata"),
        (f"/{made}/items", {}, "items"),
        (f"/{made}/items", {"items": []}, "items"),
        (f"/{made}/items", {"items": [{"role": "user"}]}, "items[0].content"),
    ]
    for path, body, param in wrong:
        refused(plain.post(CONVERSATIONS + path, json=body), 400, param=param)
    hosted = {"type": "web_search_call", "id": "ws_1", "status": "completed"}
    assert plain.post(f"{CONVERSATIONS}/{made}/items", json={"items": [hosted]}).status_code == 200
    refused(plain.get(f"{CONVERSATIONS}/{made}/items?limit=0"), 400, param="limit")
    refused(plain.get(f"{CONVERSATIONS}/{made}/items?after=msg_none"), 404, param="after")
    for path in (f"/{made}/elsewhere", f"/{made}/items/", f"/{made}/items/a/b", "/%00"):
        refused(plain.get(CONVERSATIONS + path), 404)
    refused(plain.delete(f"{CONVERSATIONS}/{made}/items"), 404)
    reply = plain.post(CONVERSATIONS, json={"odd": 1})
    assert reply.headers["x-dragoman-ignored"] == "odd"
    strict = plain.post(CONVERSATIONS, json={"odd": 1}, headers={"x-dragoman-strict": "true"})
    refused(strict, 400, param="odd")


def test_conversation_is_no_larger_than_a_body(tmp_path: Path, serving: Serving) -> None:
    config = {"models": MODELS, "default": "echo", "limits": {"body_bytes": 20_000}}
    with serving(tmp_path, config) as running, talking(running) as plain:
        made = plain.post(CONVERSATIONS, json={"items": [said("x" * 12_000)]}).json()["id"]
        refused(plain.post(f"{CONVERSATIONS}/{made}/items", json={"items": [said("x" * 12_000)]}), 413, param="items")
        assert len(plain.get(f"{CONVERSATIONS}/{made}/items").json()["data"]) == 1


def test_conversation_survives_a_restart(tmp_path: Path, serving: Serving) -> None:
    config = {"models": MODELS, "default": "echo"}
    with serving(tmp_path, config) as running, sdk(running) as client:
        made = client.conversations.create(metadata={"a": "b"})
        client.responses.create(model="echo", input="hello", conversation=made.id)
    # The block has ended with kill -9.
    with serving(tmp_path, config) as running, sdk(running) as client:
        assert client.conversations.retrieve(made.id) == made
        assert texts(client, made.id) == ["hello", "hello"]
