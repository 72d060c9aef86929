"""The file of a recording: full disks, several writers, secrets, bounds."""

import json
import logging
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from dragoman.core.errors import ConfigError
from dragoman.recordings.recorded_exchange import RecordedExchange, encode_body, read_recording
from dragoman.server.telemetry import recording
from dragoman.server.telemetry.metrics import RequestRecord
from dragoman.server.telemetry.recording import ExchangeRecording, RecordingFile


def completed(request: bytes = b"{}", reply: bytes = b"{}", redact: recording.Redact = str) -> RecordedExchange:
    noted = ExchangeRecording(time.monotonic())
    noted.note_request(request)
    noted.note_reply(200, reply)
    return noted.complete(RequestRecord(id="req-1", route="POST /v1/chat/completions"), {}, False, redact)


WRITERS = """
import sys
from dragoman.recordings.recorded_exchange import RecordedExchange, encode_body
from dragoman.server.telemetry.recording import RecordingFile

file = RecordingFile(sys.argv[1])
for number in range(200):
    body = encode_body(b'"' + sys.argv[2].encode() * (1 + number * 400) + b'"')
    exchange = RecordedExchange(0.0, f"{sys.argv[2]}{number}", "POST", "/", request=body)
    file.write(len(bytes(body)), lambda exchange=exchange: exchange)
file.close()
"""


def test_lines_of_several_processes_are_whole(tmp_path: Path) -> None:
    path = tmp_path / "recording.jsonl"
    processes = [subprocess.Popen([sys.executable, "-c", WRITERS, str(path), name]) for name in "abc"]
    assert [process.wait(60) for process in processes] == [0, 0, 0]
    exchanges = [exchange for _, exchange in read_recording(str(path))]
    assert sorted(exchange.id for exchange in exchanges) == sorted(f"{name}{at}" for name in "abc" for at in range(200))
    assert all(set(json.loads(bytes(exchange.request))) == {exchange.id[0]} for exchange in exchanges)


FULL_DISK = """
import resource, signal, sys
from pathlib import Path
from dragoman.recordings.recorded_exchange import RecordedExchange
from dragoman.server.telemetry.recording import RecordingFile

path = Path(sys.argv[1])
file = RecordingFile(sys.argv[1])
_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
for number in range(100):
    file.write(10, lambda number=number: RecordedExchange(0.0, f"req-{number}", "POST", "/v1/chat/completions"))
while file._queued:
    pass
assert path.read_bytes().endswith(b"\\n")
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
file.write(10, lambda: RecordedExchange(0.0, "after", "POST", "/v1/chat/completions"))
file.close()
"""


def test_full_disk_loses_only_exchanges_and_is_logged_once(tmp_path: Path) -> None:
    path = tmp_path / "recording.jsonl"
    done = subprocess.run([sys.executable, "-c", FULL_DISK, str(path)], capture_output=True, text=True, check=True)
    ids = [exchange.id for _, exchange in read_recording(str(path))]
    assert ids[:3] == ["req-0", "req-1", "req-2"]
    assert ids[-1] == "after"
    assert 3 < len(ids) < 50
    assert done.stderr.count("cannot write the recording") == 1


def test_slow_disk_loses_exchanges_and_delays_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(recording, "MAX_QUEUED", 1000)
    file = RecordingFile(str(tmp_path / "recording.jsonl"))
    went_on: list[bool] = []

    def complete() -> RecordedExchange:
        while not went_on:
            time.sleep(0.01)
        return completed()

    with caplog.at_level(logging.ERROR):
        for _ in range(5):
            file.write(400, complete)
    went_on.append(True)
    file.close()
    assert len(list(read_recording(str(tmp_path / "recording.jsonl")))) == 2
    assert caplog.text.count("written too slowly") == 1


def test_file_that_cannot_be_opened_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the recording .* cannot be written: No such file"):
        RecordingFile(str(tmp_path / "missing" / "recording.jsonl"))


def test_existing_file_becomes_private(tmp_path: Path) -> None:
    path = tmp_path / "recording.jsonl"
    path.write_bytes(b"")
    path.chmod(0o644)
    RecordingFile(str(path)).close()
    assert path.stat().st_mode & 0o777 == 0o600


def test_stream_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "MAX_BODY", 100)
    noted = ExchangeRecording(time.monotonic())
    for _ in range(50):
        noted.note_piece(b"data: 12\n\n")
    assert noted.size == 100
    exchange = noted.complete(RequestRecord(id="req-1", route="POST /v1/chat/completions"), {}, False, str)
    assert len(exchange.stream) == 10
    assert exchange.cut == ("reply",)


SECRET = "canary-0123456789"
BODIES: dict[str, dict[str, Any]] = {
    "a field of the body": {"api_key": SECRET, "apikey": SECRET, "x-api-key": SECRET},
    "an authorization": {"tools": [{"type": "mcp", "authorization": f"Bearer {SECRET}"}]},
    "a token": {"mcp_servers": [{"type": "url", "authorization_token": SECRET}]},
    "a header of a server": {"tools": [{"type": "mcp", "headers": {"x-any": SECRET, "y": f'"{SECRET}\\'}}]},
}


@pytest.mark.parametrize("where", BODIES)
def test_credentials_in_a_body_are_hidden(where: str) -> None:
    body = json.dumps(BODIES[where]).encode()
    # A reply may repeat the request.
    exchange = completed(body, body)
    for recorded in (exchange.request, exchange.reply):
        assert SECRET not in bytes(recorded).decode()
        assert json.loads(bytes(recorded)).keys() == BODIES[where].keys()
    # So does a broken body.
    assert where.startswith("a header") or SECRET not in bytes(completed(body[:-1]).request).decode()


def test_tools_about_credentials_are_recorded_unchanged() -> None:
    properties = {"authorization": {"type": "string"}, "headers": {"type": "object"}, "api_key": {"enum": ["a"]}}
    text = json.dumps({"api_key": "sk-quoted"})
    body = {"tools": [{"name": "call", "parameters": {"properties": properties}}], "input": text}
    encoded = json.dumps(body).encode()
    assert json.loads(bytes(completed(encoded).request)) == body


@pytest.mark.parametrize("body", [b'{"a":\n "b"}', b'{"a": "\xff"}', b'{"a', b"\n\n", b"NaN", "é 😀".encode()])
def test_any_body_is_one_line(body: bytes) -> None:
    encoded = bytes(encode_body(body))
    assert b"\n" not in encoded
    json.loads(encoded)


def test_line_that_is_not_an_exchange_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "recording.jsonl"
    path.write_text('{"time": 1, "id": "a", "method": "POST", "path": "/"}\n\n{"time": "x"}\n{"incomp')
    read = read_recording(str(path))
    assert next(read)[0] == 1
    with pytest.raises(ConfigError, match=r":3: not a recorded exchange: time expected `float`, got `str`"):
        next(read)
