"""The event log as a file that others move, and on a full disk."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dragoman.server.telemetry import EventLog


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
    assert "writing to the old file" in caplog.text


def test_without_a_file_nothing_happens() -> None:
    log = EventLog(None)
    log.reopen()
    log.start({})
    log.close({})


FILE_LIMIT = """
import resource, sys
from dragoman.server.telemetry import EventLog, RequestRecord

log = EventLog(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
for number in range(100):
    log.request(RequestRecord(id=f"req-{number}", route="/v1/chat/completions", status=200))
"""


def test_line_that_does_not_fit_leaves_no_part_of_it(tmp_path: Path) -> None:
    path = tmp_path / "e.jsonl"
    done = subprocess.run([sys.executable, "-c", FILE_LIMIT, str(path)], capture_output=True, text=True, check=True)
    assert set(events(path)) == {"request"}
    assert path.stat().st_size < 2000
    assert path.read_bytes().endswith(b"\n")
    assert done.stderr.count("stopped writing the event log") == 1
