"""`dragoman usage`, run as a command."""

import asyncio
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tools.ports import free_port

from dragoman.cli import main
from dragoman.config.sections import Budget, Price
from dragoman.config.settings import Settings
from dragoman.protocols.usage import day_of, show_day
from dragoman.server.telemetry.metrics import RequestRecord
from dragoman.storage.budgets import Owner
from dragoman.storage.database import Database
from dragoman.storage.ledger import Ledger
from tests.cli.test_cli import run
from tests.support.requests import CHAT, ask, talking
from tests.support.server_process import serving

CONFIG = """
models: {{a: {{engine: scripted}}}}
port: {port}
storage: state.db
prices: {{a: {{input: 1, cached_input: 0.5, output: 10}}}}
budgets:
  - {{principal: "user:*", per: day, tokens: 1000}}
  - {{key: k1, per: month, cost: 0.5, action: warn}}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("DRAGOMAN_CONFIG", "DRAGOMAN_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DRAGOMAN_HOME", str(tmp_path / "own"))
    Path("dragoman.yaml").write_text(CONFIG.format(port=free_port()))
    return tmp_path


def fill(path: str) -> None:
    """As a server did that has stopped: two requests of anna and one without a key, and one that still runs."""
    prices, budget = {"a": Price(1.0, 10.0, 0.5)}, Budget(per="day", tokens=1000, principal="user:*")

    async def write() -> None:
        database = Database(path)
        ledger = Ledger(database, Settings(prices=prices, budgets=(budget,)), Counter())
        for number, owner in enumerate((Owner("k1", "user:anna"), Owner("k1", "user:anna"), Owner("", "anonymous"))):
            opened = ledger.open(f"req-{number}", owner, ["a"], 100, 50)
            if opened is not None:
                await opened
            counts: dict[str, Any] = {"prompt_tokens": 100, "cached_tokens": 40, "completion_tokens": 20}
            ledger.close(RequestRecord(f"req-{number}", "POST /", model="a", status=200, reasoning_tokens=5, **counts))
        opened = ledger.open("running", Owner("k1", "user:anna"), ["a"], 100, 50)
        assert opened is not None
        await opened
        await ledger.flush()
        database.close()

    asyncio.run(write())


def run_usage(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["usage", *arguments]) == 0
    return capsys.readouterr().out


def test_table_of_a_server_that_does_not_run(capsys: pytest.CaptureFixture[str]) -> None:
    fill("state.db")
    assert main(["usage"]) == 0
    captured = capsys.readouterr()
    assert "does not answer; reading its storage" in captured.err
    tomorrow = show_day(day_of(time.time()) + 1)
    lines = [line.split() for line in captured.out.splitlines()]
    assert lines[0] == ["PRINCIPAL", "MODEL", "REQUESTS", "PROMPT", "CACHED", "COMPLETION", "REASONING", "COST"]
    assert lines[1] == ["anonymous", "a", "1", "100", "40", "20", "5", "0.00028"]
    assert lines[2] == ["user:anna", "a", "2", "200", "80", "40", "10", "0.00056"]
    assert lines[3] == []
    assert " ".join(lines[4]) == "BUDGET OF PER LIMIT USED RESERVED REMAINING ACTION RESETS"
    assert lines[5][:-1] == ["key", "k1", "month", "cost", "0.50", "0.00056", "0.0006", "0.49884", "warn"]
    assert lines[6] == ["user:anna", "day", "1000", "tokens", "240", "150", "610", "refuse", tomorrow]


def test_report_has_the_requested_columns_and_days(capsys: pytest.CaptureFixture[str]) -> None:
    fill("state.db")
    today = show_day(day_of(time.time()))
    report = json.loads(run_usage(capsys, "--by", "key,day", "--since", "1d", "--json"))
    assert (report["since"], report["by"]) == (today, ["day", "key"])
    assert [(entry["day"], entry["key"], entry["requests"]) for entry in report["data"]] == [
        (today, "", 1), (today, "k1", 2)
    ]  # fmt: skip
    assert report["data"][1]["cost"] == pytest.approx(0.00056)
    assert "no requests since 2999-01-01" in run_usage(capsys, "--since", "2999-01-01")


def test_storage_flag_selects_the_storage(capsys: pytest.CaptureFixture[str]) -> None:
    fill("other.db")
    assert json.loads(run_usage(capsys, "--storage", "other.db", "--json"))["data"]


def test_running_server_is_asked(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {"models": {"a": {"engine": "scripted"}}}
    with serving(folder, config) as running:
        with talking(running) as client:
            ask(client, CHAT)
        done = run(folder, "usage", "--url", running.url)
        assert done.returncode == 0, done.stderr
        assert "anonymous" in done.stdout
        # Its file is in use, so it cannot be read beside it.
        assert main(["usage", "--storage", str(folder / "dragoman.db")]) == 2
        assert "another server uses it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--since", "long"], "--since: expected a date such as 2027-01-31"),
        (["--by", "colour"], "--by: unknown column 'colour'; columns: day, key, principal, model"),
        ([], "there is no storage at"),
        (["--storage", "memory"], "its storage is in memory"),
        (["--api-key", "x"], "--api-key is for a running server"),
        (["--url", "http://127.0.0.1:1"], "127.0.0.1:1"),
    ],
)
def test_user_errors(capsys: pytest.CaptureFixture[str], arguments: list[str], words: str) -> None:
    assert main(["usage", *arguments]) == 2
    assert words in capsys.readouterr().err
