"""`dragoman drain`, run against a server with two upstream servers."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from tests.cli.test_cli import refused, run
from tests.support.server_process import Running, serving

SCRIPTED = {"m": {"engine": "scripted", "replies": [{"output": "hello"}]}}


class Pool(NamedTuple):
    front: Running
    upstreams: list[str]


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    folders = [tmp_path_factory.mktemp(name) for name in ("one", "two", "front")]
    with serving(folders[0], {"models": SCRIPTED}) as one, serving(folders[1], {"models": SCRIPTED}) as two:
        upstream = {"engine": "upstream", "urls": [one.url, two.url], "health_seconds": 0}
        with serving(folders[2], {"models": {"m": upstream, "here": SCRIPTED["m"]}, "api_keys": ["k"]}) as front:
            yield Pool(front, [one.url, two.url])


def run_drain(pool: Pool, folder: Path, *arguments: str) -> list[dict[str, Any]]:
    done = run(folder, "drain", "m", *arguments, "--json", "--url", pool.front.url, "--api-key", "k")
    assert done.returncode == 0, done.stderr
    upstreams: list[dict[str, Any]] = json.loads(done.stdout)
    return upstreams


def send_request(pool: Pool) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    url, headers = f"{pool.front.url}/v1/chat/completions", {"authorization": "Bearer k"}
    answer = httpx.post(url, json=body, headers=headers, trust_env=False, timeout=60)
    assert answer.json()["choices"][0]["message"]["content"] == "hello"


def test_drain_and_undo(pool: Pool, tmp_path: Path) -> None:
    one, two = pool.upstreams
    assert [entry["state"] for entry in run_drain(pool, tmp_path, one)] == ["drained", "up"]
    for _ in range(4):
        send_request(pool)
    assert [entry["state"] for entry in run_drain(pool, tmp_path)] == ["drained", "up"]
    assert [entry["state"] for entry in run_drain(pool, tmp_path, one, "--undo")] == ["up", "up"]
    shown = run(tmp_path, "drain", "m", two, "--url", pool.front.url, "--api-key", "k")
    assert shown.stdout.splitlines() == [f"{one}  up, 0 running", f"{two}  drained, 0 running"]
    run_drain(pool, tmp_path, two, "--undo")


def test_errors_are_one_line(pool: Pool, tmp_path: Path) -> None:
    at = ("--url", pool.front.url, "--api-key", "k")
    assert "has no server" in refused(run(tmp_path, "drain", "m", "http://unknown", *at))
    assert "has no upstream servers" in refused(run(tmp_path, "drain", "here", pool.upstreams[0], *at))
    assert "not served here" in refused(run(tmp_path, "drain", "nothing", pool.upstreams[0], *at))
    assert "has no upstream servers" in refused(run(tmp_path, "drain", "here", *at))
    assert "--undo needs the URL" in refused(run(tmp_path, "drain", "m", "--undo", *at))
    assert "give --api-key" in refused(run(tmp_path, "drain", "m", pool.upstreams[0], "--url", pool.front.url))
