"""Helpers to send requests, to check refusals, and to wait."""

import asyncio
import json
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.support.server_process import Running

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]
SMALLEST: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HELLO},
    f"{CHAT}/render": {"messages": HELLO},
    COMPLETIONS: {"prompt": "hello"},
    "/v1/messages": {"messages": HELLO, "max_tokens": 5},
    "/v1/messages/count_tokens": {"messages": HELLO},
    "/v1/responses": {"input": "hello"},
    "/v1/responses/input_tokens": {"input": "hello"},
    "/v1/responses/compact": {"input": "hello"},
    "/v1/embeddings": {"input": "hello"},
    "/v1/rerank": {"query": "hello", "documents": ["hello"]},
    "/tokenize": {"prompt": "hello"},
    "/detokenize": {"tokens": [1]},
}
"""The smallest body of each route that uses a model."""

JSON_BODY = {"content-type": "application/json"}
PATIENCE = 60.0
"""Seconds to wait for an expected event: many, because a loaded machine is slow."""


@contextmanager
def talking(running: Running, headers: Mapping[str, str] | None = None) -> Iterator[httpx.Client]:
    """A client of the server. If the server has no keys, it sends the admin token."""
    given = running.operator | dict(headers or {})
    with httpx.Client(base_url=running.url, trust_env=False, timeout=PATIENCE, headers=given) as client:
        yield client


def in_process(app: Any, **options: Any) -> httpx.AsyncClient:
    """A client of an app in this process."""
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost", **options)


def talk(app: Any, script: Callable[[httpx.AsyncClient], Any]) -> Any:
    """Run a script with a client of an app in this process."""

    async def run() -> Any:
        async with in_process(app) as client:
            return await script(client)

    return asyncio.run(run())


def ask(client: httpx.Client, path: str, /, **fields: Any) -> httpx.Response:
    return client.post(path, json=SMALLEST[path] | fields)


def saying(path: str, text: str) -> dict[str, Any]:
    """The fields of a chat or a completion with this text."""
    return {"messages": [{"role": "user", "content": text}]} if path == CHAT else {"prompt": text}


def text_of(response: httpx.Response, choice: int = 0) -> str:
    assert response.status_code == 200, response.text
    entry = response.json()["choices"][choice]
    text: str = entry["text"] if "text" in entry else entry["message"]["content"]
    return text


def refused(response: httpx.Response, status: int, *, param: str | None = None, code: str | None = None) -> str:
    """The message of an error, after checking its format."""
    assert response.status_code == status, response.text
    assert response.headers["x-request-id"]
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert list(body) == ["error"]
    error = body["error"]
    assert list(error) == ["message", "type", "param", "code"]
    assert error["param"] == param
    assert error["type"]
    assert code is None or error["code"] == code
    message: str = error["message"]
    assert message
    return message


def frames(body: str) -> list[Any]:
    """The payloads of an event stream, including its end mark, without comments."""
    assert body.endswith("\n\n")
    blocks = [block for block in body.removesuffix("\n\n").split("\n\n") if not block.startswith(":")]
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    data = [block.removeprefix("data: ") for block in blocks]
    return [entry if entry == "[DONE]" else json.loads(entry) for entry in data]


def stream_texts(chunks: list[Any]) -> dict[int, str]:
    """The text of every choice of a stream."""
    found: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            piece = choice["text"] if "text" in choice else choice["delta"].get("content", "")
            found[choice["index"]] = found.get(choice["index"], "") + piece
    return found


def eventually(condition: Callable[[], bool], seconds: float = PATIENCE) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return condition()


def listened_on(path: Path) -> bool:
    """Wait until a server listens on a Unix socket."""

    def listens() -> bool:
        with socket.socket(socket.AF_UNIX) as probe:
            return probe.connect_ex(str(path)) == 0

    return eventually(listens)


def unix_client(path: Path) -> Callable[[int], httpx.Client]:
    """How `serving_at` connects to a server at a Unix socket."""

    def connect(_: int) -> httpx.Client:
        assert listened_on(path)
        transport = httpx.HTTPTransport(uds=str(path))
        return httpx.Client(base_url="http://localhost", transport=transport, timeout=PATIENCE)

    return connect


def under_way(running: Running, model: str, count: int = 1, waiting: int = 0) -> None:
    """Wait until the model serves `count` requests and `waiting` more wait for it."""
    with talking(running) as client:

        def counts() -> tuple[int, int]:
            model_stats = client.get("/stats").json()["models"][model]
            return model_stats["running"], model_stats["waiting"]

        assert eventually(lambda: counts() == (count, waiting)), counts()


def recorded(running: Running, seconds: float = PATIENCE, **wanted: Any) -> list[dict[str, Any]]:
    """The records of the event log with these values, after waiting for the first one."""

    def found() -> list[dict[str, Any]]:
        return [event for event in running.events() if wanted.items() <= event.items()]

    eventually(lambda: bool(found()), seconds)
    return found()
