"""The event log as a file that others move."""

import json
from pathlib import Path

import pytest

from dragoman.telemetry import EventLog


def events(path: Path) -> list[str]:
    return [json.loads(line)["event"] for line in path.read_text().splitlines()]


def test_it_goes_on_in_a_new_file_when_it_is_opened_again(tmp_path: Path) -> None:
    path = tmp_path / "e.jsonl"
    log = EventLog(str(path))
    log.start({})
    path.rename(tmp_path / "e.1")
    log.reopen()
    log.close({})
    assert (events(tmp_path / "e.1"), events(path)) == (["run_start"], ["run_end"])
    log.reopen()
    log.close({})
    assert events(path) == ["run_end"]


def test_where_no_new_file_can_be_made_it_goes_on_in_the_old_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "logs").mkdir()
    path = tmp_path / "logs/e.jsonl"
    log = EventLog(str(path))
    log.start({})
    (tmp_path / "logs").rename(tmp_path / "old")
    log.reopen()
    log.close({})
    assert events(tmp_path / "old/e.jsonl") == ["run_start", "run_end"]
    assert "goes on in the old file" in caplog.text


def test_without_a_file_nothing_happens() -> None:
    log = EventLog(None)
    log.reopen()
    log.start({})
    log.close({})
