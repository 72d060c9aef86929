"""`dragoman drain`, as a user types it: a server in front, two behind it."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from tests.cli.test_cli import refused, run
from tests.support.serving import Running, serving

SCRIPTED = {"m": {"engine": "scripted", "replies": [{"output": "hello"}]}}


class House(NamedTuple):
    front: Running
    behind: list[str]


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    folders = [tmp_path_factory.mktemp(name) for name in ("one", "two", "front")]
    with serving(folders[0], {"models": SCRIPTED}) as one, serving(folders[1], {"models": SCRIPTED}) as two:
        pool = {"engine": "upstream", "urls": [one.url, two.url], "health_seconds": 0}
        with serving(folders[2], {"models": {"m": pool, "here": SCRIPTED["m"]}, "api_keys": ["k"]}) as front:
            yield House(front, [one.url, two.url])


def drained(house: House, folder: Path, *arguments: str) -> list[dict[str, Any]]:
    done = run(folder, "drain", "m", *arguments, "--json", "--url", house.front.url, "--api-key", "k")
    assert done.returncode == 0, done.stderr
    places: list[dict[str, Any]] = json.loads(done.stdout)
    return places


def asked(house: House) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    url, headers = f"{house.front.url}/v1/chat/completions", {"authorization": "Bearer k"}
    answer = httpx.post(url, json=body, headers=headers, trust_env=False, timeout=60)
    assert answer.json()["choices"][0]["message"]["content"] == "hello"


def test_a_server_is_drained_and_comes_back(house: House, tmp_path: Path) -> None:
    one, two = house.behind
    assert [place["state"] for place in drained(house, tmp_path, one)] == ["drained", "up"]
    for _ in range(4):
        asked(house)
    assert [place["state"] for place in drained(house, tmp_path)] == ["drained", "up"]
    assert [place["state"] for place in drained(house, tmp_path, one, "--undo")] == ["up", "up"]
    shown = run(tmp_path, "drain", "m", two, "--url", house.front.url, "--api-key", "k")
    assert shown.stdout.splitlines() == [f"{one}  up, 0 running", f"{two}  drained, 0 running"]
    drained(house, tmp_path, two, "--undo")


def test_mistakes_are_one_line(house: House, tmp_path: Path) -> None:
    at = ("--url", house.front.url, "--api-key", "k")
    assert "has no server" in refused(run(tmp_path, "drain", "m", "http://nobody", *at))
    assert "has no upstream servers" in refused(run(tmp_path, "drain", "here", house.behind[0], *at))
    assert "not served here" in refused(run(tmp_path, "drain", "nothing", house.behind[0], *at))
    assert "no servers are known" in refused(run(tmp_path, "drain", "here", *at))
    assert "--undo where?" in refused(run(tmp_path, "drain", "m", "--undo", *at))
    assert "give --api-key" in refused(run(tmp_path, "drain", "m", house.behind[0], "--url", house.front.url))
