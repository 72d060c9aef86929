"""Large bodies of small items: refused before decoding or decoded in bounded memory, which is returned."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from dragoman import create_app
from dragoman.config.settings import Limits, Settings
from dragoman.engines.scripted import ScriptedEngine
from tests.support.requests import CHAT, HELLO, JSON_BODY, ask, eventually, in_process, refused, talking, text_of
from tests.support.server_process import Running, server_fixture

MIB = 1024
"""In KiB, the unit of /proc."""


server = server_fixture({"models": {"s": {"engine": "scripted"}}})
"""A server of its own, because its memory is measured."""


@pytest.fixture
def client(server: Running) -> Iterator[httpx.Client]:
    with talking(server) as made:
        assert text_of(ask(made, CHAT)) == "hello"
        yield made
        assert text_of(ask(made, CHAT)) == "hello"


def memory_kib(running: Running, field: str) -> int:
    """VmRSS or VmHWM (the peak) of the processes that decode requests, together."""
    total = 0
    for pid in (running.process.pid, *running.fronts()):
        status = Path(f"/proc/{pid}/status").read_text()
        total += next(int(line.split()[1]) for line in status.splitlines() if line.startswith(field))
    return total


def post_at_once(running: Running, path: str, body: bytes, count: int = 4) -> list[httpx.Response]:
    with talking(running) as client, ThreadPoolExecutor(count) as threads:
        sent = [threads.submit(client.post, path, content=body, headers=JSON_BODY, timeout=60) for _ in range(count)]
        return [response.result() for response in sent]


def assert_memory_is_returned(running: Running, before: int) -> None:
    assert eventually(lambda: memory_kib(running, "VmRSS") < before + 50 * MIB)


def body_of(item: bytes, count: int) -> bytes:
    """A chat request with many items in one field, and one escape in a string."""
    items = b",".join([item] * count)
    return b'{"messages":[{"role":"user","content":"hell\\u006f"}],"metadata":{"items":[' + items + b"]}}"


def test_too_many_elements_are_refused_without_decoding_them(server: Running, client: httpx.Client) -> None:
    for pid in (server.process.pid, *server.fronts()):
        # Forget the peak of earlier tests.
        Path(f"/proc/{pid}/clear_refs").write_text("5")
    before = memory_kib(server, "VmRSS")
    for response in post_at_once(server, CHAT, body_of(b"[]", 2_500_000)):
        assert "JSON elements" in refused(response, 413, code="request_too_large")
    for response in post_at_once(server, "/v1/messages", body_of(b"[]", 2_500_000)):
        assert (response.status_code, response.json()["error"]["type"]) == (413, "request_too_large")
    # Four bodies at once are 32 MB; decoded they would be more than 800 MB.
    assert memory_kib(server, "VmHWM") < before + 250 * MIB
    assert_memory_is_returned(server, before)


@pytest.mark.parametrize(("item", "count"), [(b'{"a":0}', 170_000), (b"[[]]", 110_000), (b'"abcd"', 1_200_000)])
def test_memory_of_decoded_bodies_is_returned(server: Running, client: httpx.Client, item: bytes, count: int) -> None:
    before = memory_kib(server, "VmRSS")
    for response in post_at_once(server, CHAT, body_of(item, count)):
        assert text_of(response) == "hello"
    assert_memory_is_returned(server, before)


async def test_limit_is_configurable() -> None:
    app = create_app(ScriptedEngine(), settings=Settings(models_dir=(), limits=Limits(body_elements=100)))
    async with in_process(app) as client:
        few, many = [{"messages": HELLO, "metadata": {"a": [0] * count}} for count in (50, 150)]
        assert text_of(await client.post(CHAT, json=few)) == "hello"
        assert "more than 100 JSON elements" in refused(await client.post(CHAT, json=many), 413)


def test_many_unknown_fields_are_refused(client: httpx.Client) -> None:
    few = ask(client, CHAT, **{f"field_{at}": 0 for at in range(10_000)})
    assert text_of(few) == "hello"
    assert len(few.headers["x-dragoman-ignored"]) < 1100
    assert "20000 unknown fields" in refused(ask(client, CHAT, **{f"field_{at}": 0 for at in range(20_000)}), 400)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b', "b": 1, "b": 2}', "duplicate key"),
        (b', "b": "\\ud800 and more text"}', "surrogate"),
        (b', "b": "\xff"}', "not valid UTF-8"),
        (b', "b": ' + b"[" * 70 + b"]" * 70 + b"}", "deeper than 64"),
        (b', "b": ' + b"[" * 7000 + b"]" * 7000 + b"}", "deeper than 64"),
        (b', "b": 1e999}', "number"),
        (b"", "truncated"),
    ],
)
def test_large_bodies_that_are_not_json_are_refused_with_a_reason(
    client: httpx.Client, body: bytes, reason: str
) -> None:
    content = b'{"a": "' + b"x" * 300_000 + b'"' + body
    message = refused(client.post(CHAT, content=content, headers=JSON_BODY), 400)
    assert reason in message
    assert len(message) < 300
