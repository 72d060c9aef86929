"""The ids of requests: the server's own, and the one that a client sends."""

from typing import Any

import httpx
import openai
import pytest

from tests.support.requests import CHAT, SMALLEST, ask, eventually, frames, recorded, talking
from tests.support.sdk import sdk
from tests.support.server_process import Running, server_fixture

KEY = "sk-one-0123456789abcdef"
MINE = "01JAB:my.id_of-the/request+=@7"
CONFIG: dict[str, Any] = {
    "models": {
        "echo": {"engine": "scripted"},
        "broken": {"engine": "scripted", "format": "hermes", "replies": [{"output": '<tool_call>{"name": '}]},
    },
    "telemetry": {"log_format": "text", "log_requests": True},
    "api_keys": [KEY],
}

server = server_fixture(CONFIG)


@pytest.fixture
def client(server: Running) -> Any:
    with talking(server, {"authorization": f"Bearer {KEY}"}) as made:
        yield made


def check_ids(response: httpx.Response, sent: str) -> str:
    """Check the headers of a response to a request with an id. Returns the server's id."""
    assert response.headers["x-request-id"] == sent
    own: str = response.headers["x-dragoman-request-id"]
    assert own != sent
    return own


def test_id_of_the_client_is_returned_and_recorded(server: Running, client: httpx.Client) -> None:
    client.headers["x-request-id"] = MINE
    own = set()
    for path, body in SMALLEST.items():
        own.add(check_ids(client.post(path, json=body), MINE))
    own.add(check_ids(client.get("/v1/models"), MINE))
    own.add(check_ids(client.get("/nothing"), MINE))
    assert len(own) == len(SMALLEST) + 2
    for request_id in own:
        [record] = recorded(server, id=request_id)
        assert record["client_request_id"] == MINE
    assert eventually(lambda: server.log.read_text().count(f" ({MINE}) ") == len(own))


def test_id_of_a_reply_stays_unique(client: httpx.Client) -> None:
    client.headers["x-request-id"] = MINE
    replies = [ask(client, CHAT) for _ in range(2)]
    ids = [reply.json()["id"] for reply in replies]
    assert ids == [check_ids(reply, MINE) for reply in replies]
    assert len(set(ids)) == 2
    stream = ask(client, CHAT, stream=True)
    assert {chunk["id"] for chunk in frames(stream.text)[:-1]} == {check_ids(stream, MINE)}
    message = ask(client, "/v1/messages")
    assert message.headers["request-id"] == message.json()["id"] == check_ids(message, MINE)


def test_id_of_the_client_with_the_official_sdk(server: Running) -> None:
    with sdk(server, KEY) as client:
        reply = client.chat.completions.create(
            model="echo", messages=[{"role": "user", "content": "hi"}], extra_headers={"x-request-id": MINE}
        )
        assert reply._request_id == MINE
        with pytest.raises(openai.NotFoundError) as failed:
            client.models.retrieve("missing", extra_headers={"x-request-id": MINE})
        assert failed.value.request_id == MINE


def test_warning_is_logged_with_both_ids(server: Running, client: httpx.Client) -> None:
    client.headers["x-request-id"] = "warned-7"
    tool = {"type": "function", "function": {"name": "f"}}
    own = check_ids(ask(client, CHAT, model="broken", tools=[tool]), "warned-7")
    assert eventually(lambda: f"request {own} (warned-7): " in server.log.read_text())


@pytest.mark.parametrize(
    "sent",
    [
        *("", "a b", "a" * 129, "a\tb", "a,b", "a\x1b[31m", "é", '"a"', "a%0ab", "a\\n", "<a>", "a;b", "a(b"),
        # Keys must not reach the logs.
        *(KEY, f"id/{KEY}"),
    ],
)
def test_other_ids_are_ignored(server: Running, client: httpx.Client, sent: str) -> None:
    headers = {b"x-request-id": sent.encode("latin-1")}
    for response in (
        client.post(CHAT, json=SMALLEST[CHAT], headers=headers),
        client.get("/v1/models", headers=headers),
    ):
        assert response.headers["x-request-id"].startswith(("chatcmpl-", "req-"))
        assert "x-dragoman-request-id" not in response.headers
        [record] = recorded(server, id=response.headers["x-request-id"])
        assert "client_request_id" not in record
    assert KEY not in server.log.read_text() + server.event_log.read_text()


def test_longest_id_is_accepted(client: httpx.Client) -> None:
    client.headers["x-request-id"] = "a" * 128
    assert check_ids(ask(client, CHAT), "a" * 128)


def test_two_ids_are_ignored(client: httpx.Client) -> None:
    response = client.get("/v1/models", headers=[("x-request-id", "one"), ("x-request-id", "two")])
    assert response.headers["x-request-id"].startswith("req-")
