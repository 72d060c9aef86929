"""`dragoman keys`, run as a command."""

import json
from pathlib import Path

import pytest

from dragoman.cli import main
from dragoman.config.sections import KeyLimits
from dragoman.storage.keys import KeyStore


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


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
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
    ],
)
def test_invalid_flags_are_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["keys", *arguments])
    assert len(capsys.readouterr().err.splitlines()) == 1
