"""`dragoman keys`, run as a command."""

import json
import stat
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

from dragoman.cli import main
from dragoman.config.sections import KeyLimits
from dragoman.storage.keys import KeyStore, digest
from tests.support import server_process
from tests.support.requests import CHAT, ask, talking


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DRAGOMAN_CONFIG", raising=False)
    monkeypatch.setenv("DRAGOMAN_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def run_keys(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["keys", *arguments]) == 0
    return capsys.readouterr().out


def test_create_list_revoke(capsys: pytest.CaptureFixture[str], home: Path) -> None:
    assert "no keys" in run_keys(capsys, "list")
    secret = run_keys(capsys, "create", "anna").strip()
    assert secret.startswith("dgm_")
    options = ["--model", "smol*", "--route", "chat", "--route", "stats", "--concurrency", "2", "--days", "30"]
    limits = ["--requests-per-minute", "60", "--tokens-per-minute", "1000", "--json"]
    limits += ["--priority", "batch"]
    made = json.loads(run_keys(capsys, "create", "agent:coder/anna", *options, *limits))
    assert made["key"].startswith(f"dgm_{made['id']}_")
    first, second = KeyStore(home / "keys.db").all()
    assert second.limits == KeyLimits(2, 60, 1000, priority="batch")
    assert (second.models, second.routes) == (("smol*",), ("chat", "stats"))
    table = run_keys(capsys, "list")
    assert table.splitlines()[0].split()[:3] == ["ID", "PRINCIPAL", "STATE"]
    assert "agent:coder/anna" in table
    assert secret not in table
    assert run_keys(capsys, "revoke", first.id) == ""
    listed = json.loads(run_keys(capsys, "list", "--json"))
    assert [entry["state"] for entry in listed] == ["revoked", "valid"]


def test_configured_key_store(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc" / "team.yaml").write_text("models: {a: {engine: scripted}}\nkeys: {store: team.db}\n")
    run_keys(capsys, "create", "anna", "--config", "etc/team.yaml")
    assert len(KeyStore(tmp_path / "etc" / "team.db").all()) == 1
    assert "no keys" in run_keys(capsys, "list")


def notes(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["keys", *arguments]) == 0
    return capsys.readouterr().err


def test_first_key_and_last_revoked_key_are_explained(capsys: pytest.CaptureFixture[str], home: Path) -> None:
    first = notes(capsys, "create", "anna")
    assert "this is the first key" in first
    assert "`keys.anonymous: true`" in first
    assert notes(capsys, "create", "berta") == ""
    assert "had a key before" in notes(capsys, "create", "anna")
    assert notes(capsys, "revoke", "berta").count("revoked key") == 1
    last = notes(capsys, "revoke", "anna")
    assert last.count("revoked key") == 2
    assert f"no key is left in {home / 'keys.db'}, but the server still requires one" in last
    assert "this is the first key" not in notes(capsys, "create", "anna")


@pytest.mark.parametrize("setting", ["api_keys: [sk-one]", "keys: {anonymous: true}"])
def test_first_key_is_not_explained_if_it_changes_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, setting: str
) -> None:
    (tmp_path / "dragoman.yaml").write_text(f"models: {{a: {{engine: scripted}}}}\n{setting}\n")
    assert notes(capsys, "create", "anna") == ""


def test_patterns_that_match_no_model_are_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    options = ["--model", "smol*", "--model", "GPT-*", "--model", "Claude", "--model", "far/x"]
    far = "{engine: upstream, url: 'http://127.0.0.1:9', models: all}"
    models = f"models: {{smollm: {{engine: scripted}}, claude: {{engine: scripted}}, far: {far}}}"
    (tmp_path / "dragoman.yaml").write_text(f"{models}\naliases: {{'gpt-*': claude}}\n")
    said = notes(capsys, "create", "berta", *options)
    assert "--model 'GPT-*' matches no configured model" in said
    assert said.count("matches no") == 1


def test_rotated_key_accepts_the_old_secret_for_the_grace_time(capsys: pytest.CaptureFixture[str], home: Path) -> None:
    old = run_keys(capsys, "create", "anna", "--route", "chat").strip()
    assert main(["keys", "rotate", "anna", "--grace", "2h"]) == 0
    new, said = capsys.readouterr()
    assert new.startswith(f"{old[:16]}_")
    assert "the old secret of user:anna works until" in said
    (key,) = KeyStore(home / "keys.db").all()
    now = time.time()
    assert all(key.has_digest(digest(secret.strip().encode()), now) for secret in (old, new))
    assert not key.has_digest(digest(old.encode()), now + 2 * 3600)
    assert key.routes == ("chat",)
    assert json.loads(run_keys(capsys, "rotate", key.id, "--grace", "0", "--json"))["id"] == key.id
    (key,) = KeyStore(home / "keys.db").all()
    assert not key.has_digest(digest(new.strip().encode()), time.time())
    run_keys(capsys, "create", "anna")
    assert main(["keys", "rotate", "anna"]) == 2
    assert f"several keys; give an id: {key.id}, " in capsys.readouterr().err
    run_keys(capsys, "revoke", key.id)
    assert main(["keys", "rotate", key.id]) == 2
    assert "already revoked" in capsys.readouterr().err


def test_list_shows_the_last_use_and_usage_the_sums_of_each_key(
    capsys: pytest.CaptureFixture[str], home: Path, tmp_path: Path
) -> None:
    secret = run_keys(capsys, "create", "anna").strip()
    run_keys(capsys, "create", "berta")
    config = {"models": {"echo": {"engine": "scripted"}}, "storage": str(tmp_path / "dragoman.db")}
    with server_process.serving(tmp_path, config) as running:
        for key, status in ((secret, 200), (f"{secret[:-1]}x", 401)):
            with talking(running, {"authorization": f"Bearer {key}"}) as client:
                assert ask(client, CHAT).status_code == status
        assert running.stop() == 0
    listed = json.loads(run_keys(capsys, "list", "--json"))
    today = datetime.now(UTC).strftime("%Y-%m-")
    assert [str(entry["last_used"])[:8] for entry in listed] == [today, "None"]
    assert not stat.S_IMODE((home / "keys.db-used").stat().st_mode) & 0o077
    table = [line.split() for line in run_keys(capsys, "usage", "--config", "dragoman.json").splitlines()]
    assert table[0] == ["KEY", "PRINCIPAL", "STATE", "REQUESTS", "PROMPT", "CACHED", "COMPLETION", "REASONING", "COST"]
    assert [row[1:4] for row in table[1:]] == [["user:anna", "valid", "1"], ["user:berta", "valid", "0"]]
    (entry,) = json.loads(run_keys(capsys, "usage", "--config", "dragoman.json", "--json"))
    assert (entry["key"], entry["requests"]) == (listed[0]["id"], 1)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["revoke", "a b"], "expected NAME"),
        (["revoke", "carl"], "key 'carl' not found"),
        (["rotate", "carl"], "key 'carl' not found"),
        (["create", "a b"], "expected NAME"),
        (["revoke", "3f9ab0c1d2e4"], "key '3f9ab0c1d2e4' not found"),
    ],
)
def test_user_errors(capsys: pytest.CaptureFixture[str], arguments: list[str], words: str) -> None:
    assert main(["keys", *arguments]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["create"],
        ["create", "a", "--route", "kitchen"],
        ["create", "a", "--concurrency", "0"],
        ["create", "a", "--days", "x"],
        ["create", "a", "--model", ""],
        ["rotate"],
        ["rotate", "a", "--grace", "soon"],
        ["rotate", "a", "--grace", "forever"],
    ],
)
def test_invalid_flags_are_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["keys", *arguments])
    assert len(capsys.readouterr().err.splitlines()) == 1
