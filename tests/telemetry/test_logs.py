"""Log lines as text and JSON."""

import json
import logging
import sys
from datetime import datetime

from dragoman.core.logs import TEXT, JsonFormatter, TextFormatter
from dragoman.server.telemetry.metrics import RequestRecord


def log_record(message: str, values: tuple[object, ...], fields: dict[str, object]) -> logging.LogRecord:
    record = logging.LogRecord("dragoman.x", logging.WARNING, "file", 1, message, values, None)
    record.__dict__.update(fields)
    return record


def line(message: str, *values: object, **fields: object) -> dict[str, object]:
    text = JsonFormatter().format(log_record(message, values, fields))
    assert "\n" not in text
    found: dict[str, object] = json.loads(text)
    return found


def test_json_line() -> None:
    found = line("request %s: odd\nthings", "chatcmpl-1", request_id="chatcmpl-1", other=1)
    assert found.pop("time")
    assert found == {
        "level": "warning",
        "logger": "dragoman.x",
        "message": "request chatcmpl-1: odd\nthings",
        "request_id": "chatcmpl-1",
    }


def test_json_line_with_request_and_exception() -> None:
    record = RequestRecord("id", "POST /x", status=200, duration_us=1500)
    assert line("%s", record.line(), request=record)["request"] == {
        "id": "id",
        "route": "POST /x",
        "status": 200,
        "duration_us": 1500,
    }
    try:
        raise ValueError("odd")
    except ValueError:
        found = line("failed", exc_info=sys.exc_info())
    assert "ValueError: odd" in str(found["exception"])


def text_line(message: str, *values: object, **fields: object) -> str:
    """A line without its time."""
    time, text = TextFormatter(TEXT).format(log_record(message, values, fields)).split(" WARNING", 1)
    datetime.strptime(time, "%Y-%m-%d %H:%M:%S.%f").astimezone()
    return f"WARNING{text}"


FORGED = "/a\nINFO dragoman: ready\r\x1b[2J\x9b31m\u202e\u2028é"


def test_text_lines_escape_control_characters() -> None:
    line = text_line("request for %s", FORGED)
    assert line == (r"WARNING dragoman.x: request for /a\nINFO dragoman: ready\r\x1b[2J\x9b31m\u202e\u2028" + "é")


def test_lines_of_a_traceback_are_indented() -> None:
    try:
        raise ValueError(FORGED)
    except ValueError:
        lines = text_line("failed", exc_info=sys.exc_info()).split("\n")
    assert lines[0] == "WARNING dragoman.x: failed"
    assert all(line.startswith("    ") for line in lines[1:])
    assert not set("\r\x1b\x9b\u202e\u2028") & set("".join(lines))


def test_json_lines_escape_all_control_characters() -> None:
    assert line("request for %s", FORGED)["message"] == f"request for {FORGED}"
    text = JsonFormatter().format(log_record("%s", (FORGED,), {}))
    assert not set("\n\r\x1b\x9b\u202e\u2028") & set(text)
