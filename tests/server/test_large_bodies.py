"""Large bodies of small items: refused before decoding or decoded in bounded memory, which is returned."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.support.requests import CHAT, JSON_BODY, ask, refused, talking, text_of
from tests.support.server_process import Running, serving

MIB = 1024
"""In KiB, the unit of /proc."""
SCRIPTED = {"models": {"s": {"engine": "scripted"}}}


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


def wait_for_memory(running: Running, before: int) -> None:
    deadline = time.monotonic() + 60
    while memory_kib(running, "VmRSS") > before + 50 * MIB:
        assert time.monotonic() < deadline, "memory was not returned"
        time.sleep(0.1)


def body_of(item: bytes, count: int) -> bytes:
    """A chat request with many items in one field, and one escape in a string."""
    items = b",".join([item] * count)
    return b'{"messages":[{"role":"user","content":"hell\\u006f"}],"metadata":{"items":[' + items + b"]}}"


@pytest.mark.parametrize("workers", ["1", "2"])
def test_too_many_elements_are_refused_without_decoding_them(tmp_path: Path, workers: str) -> None:
    with serving(tmp_path, SCRIPTED, "--workers", workers) as running, talking(running) as client:
        assert text_of(ask(client, CHAT)) == "hello"
        before = memory_kib(running, "VmRSS")
        for response in post_at_once(running, CHAT, body_of(b"[]", 2_500_000)):
            assert "JSON elements" in refused(response, 413, code="request_too_large")
        for response in post_at_once(running, "/v1/messages", body_of(b"[]", 2_500_000)):
            assert (response.status_code, response.json()["error"]["type"]) == (413, "request_too_large")
        # Four bodies at once are 32 MB; decoded they would be more than 800 MB.
        assert memory_kib(running, "VmHWM") < before + 250 * MIB
        wait_for_memory(running, before)
        assert text_of(ask(client, CHAT)) == "hello"


@pytest.mark.parametrize(("item", "count"), [(b'{"a":0}', 170_000), (b"[[]]", 110_000), (b'"abcd"', 1_200_000)])
def test_memory_of_decoded_bodies_is_returned(tmp_path: Path, item: bytes, count: int) -> None:
    with serving(tmp_path, SCRIPTED) as running, talking(running) as client:
        assert text_of(ask(client, CHAT)) == "hello"
        before = memory_kib(running, "VmRSS")
        for response in post_at_once(running, CHAT, body_of(item, count)):
            assert text_of(response) == "hello"
        wait_for_memory(running, before)


def test_limit_is_configurable(tmp_path: Path) -> None:
    with serving(tmp_path, SCRIPTED | {"limits": {"body_elements": 100}}) as running, talking(running) as client:
        assert text_of(ask(client, CHAT, metadata={"a": [0] * 50})) == "hello"
        assert "more than 100 JSON elements" in refused(ask(client, CHAT, metadata={"a": [0] * 150}), 413)


def test_many_unknown_fields_are_refused(tmp_path: Path) -> None:
    with serving(tmp_path, SCRIPTED) as running, talking(running) as client:
        few = ask(client, CHAT, **{f"field_{at}": 0 for at in range(10_000)})
        assert text_of(few) == "hello"
        assert len(few.headers["x-dragoman-ignored"]) < 1100
        assert "20000 unknown fields" in refused(ask(client, CHAT, **{f"field_{at}": 0 for at in range(20_000)}), 400)


def test_large_bodies_that_are_not_json_are_refused_with_a_reason(tmp_path: Path) -> None:
    text = b"x" * 300_000
    bodies = {
        b'{"a": "' + text + b'", "b": 1, "b": 2}': "duplicate key",
        b'{"a": "' + text + b'", "b": "\\ud800 and more text"}': "surrogate",
        b'{"a": "' + text + b'", "b": "\xff"}': "not valid UTF-8",
        b'{"a": "' + text + b'", "b": ' + b"[" * 70 + b"]" * 70 + b"}": "deeper than 64",
        b'{"a": "' + text + b'", "b": ' + b"[" * 7000 + b"]" * 7000 + b"}": "deeper than 64",
        b'{"a": "' + text + b'", "b": 1e999}': "number",
        b'{"a": "' + text: "truncated",
    }
    with serving(tmp_path, SCRIPTED) as running, talking(running) as client:
        for body, reason in bodies.items():
            message = refused(client.post(CHAT, content=body, headers=JSON_BODY), 400)
            assert reason in message
            assert len(message) < 300
