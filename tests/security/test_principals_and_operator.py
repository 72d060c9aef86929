"""Ownership of responses when keys change, and operator routes where no key is configured."""

import json
from itertools import product
from pathlib import Path

import httpx
import pytest

from tests.security.conftest import PROCESSES, Guarded
from tests.security.http_client import PipelinedClient, Request
from tests.security.rules import RULES
from tests.support.requests import talking
from tests.support.server_process import Running, serving

RESPONSES = "/v1/responses"
OPERATOR_PATHS = [path for path, rule in RULES.items() if rule.scope == "admin"] + ["/admin/models/echo/load"]


def send(running: Running, key: str, method: str, path: str, **options: object) -> httpx.Response:
    with talking(running, {"authorization": f"Bearer {key}"}) as client:
        return client.request(method, path, **options)  # type: ignore[arg-type]


def store(running: Running, key: str) -> str:
    answer = send(running, key, "POST", RESPONSES, json={"input": f"said with {key}"})
    assert answer.status_code == 200, answer.text
    made: str = answer.json()["id"]
    return made


@pytest.mark.parametrize("workers", PROCESSES)
def test_static_keys_keep_their_responses_when_other_keys_come_and_go(tmp_path: Path, workers: str) -> None:
    config = {"models": {"echo": {"engine": "scripted"}}, "keys": {"store": "keys.db"}}
    with serving(tmp_path, config | {"api_keys": ["sk-first", "sk-second"]}, "--workers", workers) as running:
        first, second = store(running, "sk-first"), store(running, "sk-second")
        for keys in (["sk-second", "sk-first"], ["sk-second", "sk-third"], ["sk-third", "sk-second"]):
            (tmp_path / "dragoman.json").write_text(json.dumps({"models_dir": [], **config, "api_keys": keys}))
            assert send(running, "sk-second", "POST", "/admin/reload").status_code == 200
            for key, response in product(("sk-first", "sk-second", "sk-third"), (first, second)):
                status = send(running, key, "GET", f"{RESPONSES}/{response}").status_code
                is_owner = (key, response) in (("sk-first", first), ("sk-second", second))
                assert status == (401 if key not in keys else 200 if is_owner else 404), (keys, key)


def test_signed_token_is_not_the_principal_of_a_stored_key(guarded: Guarded) -> None:
    stored, token = guarded.authority.stored("user:dora"), guarded.authority.token(sub="user:dora")
    for owner, other in ((stored, token), (token, stored)):
        made = store(guarded.running, owner)
        assert send(guarded.running, owner, "GET", f"{RESPONSES}/{made}").status_code == 200
        assert send(guarded.running, other, "GET", f"{RESPONSES}/{made}").status_code == 404


@pytest.mark.parametrize("workers", PROCESSES)
def test_operator_routes_need_a_credential_on_loopback_too(tmp_path: Path, workers: str) -> None:
    config = {"models": {"echo": {"engine": "scripted"}}, "keys": {"store": "keys.db"}}
    forwarded = [(), (("X-Forwarded-For", b"127.0.0.1"),), (("Forwarded", b"for=127.0.0.1"),)]
    with serving(tmp_path, config, "--workers", workers) as running, PipelinedClient(running.port) as client:
        for path, method, headers in product(OPERATOR_PATHS, ("GET", "POST"), forwarded):
            request = Request(method, path.encode(), headers, b"{}" if method == "POST" else b"")
            answer = client.send(request)
            assert answer.status in (401, 403, 405), (method, path, headers, answer)
