"""The event log: rotation and full disks."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dragoman.server.telemetry.recorder import EventLog


def events(path: Path) -> list[str]:
    return [json.loads(line)["event"] for line in path.read_text().splitlines()]


def test_reopen_continues_in_new_file(tmp_path: Path) -> None:
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


def test_failed_reopen_keeps_old_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "logs").mkdir()
    path = tmp_path / "logs/e.jsonl"
    log = EventLog(str(path))
    log.start({})
    (tmp_path / "logs").rename(tmp_path / "old")
    log.reopen()
    log.close({})
    assert events(tmp_path / "old/e.jsonl") == ["run_start", "run_end"]
    assert "writing to the old file" in caplog.text


def test_no_path_writes_nothing() -> None:
    log = EventLog(None)
    log.reopen()
    log.start({})
    log.close({})


FILE_LIMIT = """
import resource, sys
from dragoman.server.telemetry.metrics import RequestRecord
from dragoman.server.telemetry.recorder import EventLog

log = EventLog(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
for number in range(100):
    log.request(RequestRecord(id=f"req-{number}", route="/v1/chat/completions", status=200))
"""


def test_line_on_full_disk_is_removed_completely(tmp_path: Path) -> None:
    path = tmp_path / "e.jsonl"
    done = subprocess.run([sys.executable, "-c", FILE_LIMIT, str(path)], capture_output=True, text=True, check=True)
    assert set(events(path)) == {"request"}
    assert path.stat().st_size < 2000
    assert path.read_bytes().endswith(b"\n")
    assert done.stderr.count("stopped writing the event log") == 1
