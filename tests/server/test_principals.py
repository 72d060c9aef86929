"""Principals of keys and tokens, and the responses they own after a reload."""

import json
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import jwt
import pytest

from dragoman.cli import main
from dragoman.config.sections import Jwt, KeyLimits, Keys
from dragoman.config.settings import Settings
from dragoman.server.auth.access import Access, principal_of
from dragoman.storage.keys import KeyStore
from tests.support.requests import eventually, refused, talking
from tests.support.server_process import Running, serving

RESPONSES = "/v1/responses"
FIRST, SECOND = "sk-first-0123456789", "sk-second-0123456789"
SECRET = "s" * 40


def bearer(key: str) -> dict[bytes, bytes]:
    return {b"authorization": b"Bearer " + key.encode()}


def stored(client: httpx.Client, key: str) -> str:
    reply = client.post(RESPONSES, json={"input": "hello"}, headers={"x-api-key": key})
    assert reply.status_code == 200, reply.text
    return str(reply.json()["id"])


@pytest.mark.parametrize("workers", ["1", "2"])
def test_responses_of_a_removed_key_are_not_readable_with_another_key(tmp_path: Path, workers: str) -> None:
    config: dict[str, Any] = {"models": {"echo": {"engine": "scripted"}}, "models_dir": [], "api_keys": [FIRST, SECOND]}
    with serving(tmp_path, config, "--workers", workers) as running, talking(running) as client:
        of_first, of_second = stored(client, FIRST), stored(client, SECOND)
        (tmp_path / "dragoman.json").write_text(json.dumps(config | {"api_keys": [SECOND]}))
        running.process.send_signal(signal.SIGHUP)
        assert eventually(lambda: client.get("/v1/models", headers={"x-api-key": FIRST}).status_code == 401)
        second = {"x-api-key": SECOND}
        refused(client.get(f"{RESPONSES}/{of_first}", headers=second), 404)
        refused(client.delete(f"{RESPONSES}/{of_first}", headers=second), 404)
        continued = {"input": "more", "previous_response_id": of_first}
        assert client.post(RESPONSES, json=continued, headers=second).status_code == 404
        assert client.get(f"{RESPONSES}/{of_second}", headers=second).status_code == 200
        assert principals(running) - {"anonymous"} == {principal_of(FIRST), principal_of(SECOND)}


def principals(running: Running) -> set[str]:
    return {event["principal"] for event in running.events() if "principal" in event}


def test_principal_of_a_static_key_depends_on_the_key_alone(tmp_path: Path) -> None:
    keys = Keys(store=str(tmp_path / "keys.db"))
    both = Access(Settings(api_keys=(FIRST, SECOND, FIRST), keys=keys))
    one = Access(Settings(api_keys=(SECOND,), keys=keys))
    try:
        assert both.caller(bearer(SECOND)).principal == one.caller(bearer(SECOND)).principal == principal_of(SECOND)
        assert both.caller(bearer(FIRST)).principal != principal_of(SECOND)
        assert principal_of(SECOND).startswith("key:")
        assert len(principal_of(SECOND)) == len("key:") + 12
    finally:
        both.close()
        one.close()


def test_static_key_keeps_its_quota_when_its_position_changes(tmp_path: Path) -> None:
    keys = Keys(store=str(tmp_path / "keys.db"), limits=KeyLimits(requests_per_minute=5))
    before = Access(Settings(api_keys=(FIRST, SECOND), keys=keys))
    used = {key: before.caller(bearer(key)).quota for key in (FIRST, SECOND)}
    after = Access(Settings(api_keys=(SECOND,), keys=keys))
    after.follow(before)
    try:
        assert after.caller(bearer(SECOND)).quota is used[SECOND]
    finally:
        after.close()


def test_principal_of_a_token_differs_from_that_of_a_stored_key(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text(SECRET)
    secret, _ = KeyStore(tmp_path / "keys.db").create("anna")
    settings = Keys(store=str(tmp_path / "keys.db"), jwt=Jwt(algorithm="HS256", key_file=str(tmp_path / "secret")))
    access = Access(Settings(api_keys=(FIRST,), keys=settings))
    try:
        found = {access.caller(bearer(secret)).principal}
        for subject in ("anna", "user:anna"):
            token = jwt.encode({"sub": subject, "exp": int(time.time()) + 60}, SECRET, "HS256")
            found.add(access.caller(bearer(token)).principal)
        assert found == {"user:anna", "jwt:anna", "jwt:user:anna"}
    finally:
        access.close()


def test_creating_another_key_for_a_name_prints_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DRAGOMAN_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert main(["keys", "create", "anna"]) == 0
    assert capsys.readouterr().err == ""
    (key,) = KeyStore(tmp_path / "keys.db").all()
    assert main(["keys", "revoke", key.id]) == 0
    assert main(["keys", "create", "anna"]) == 0
    assert "user:anna had a key before" in capsys.readouterr().err
