"""Log lines for machines."""

import json
import logging
import sys

from dragoman.telemetry.logs import JsonLines
from dragoman.telemetry.record import RequestRecord


def line(message: str, *values: object, **fields: object) -> dict[str, object]:
    record = logging.LogRecord("dragoman.x", logging.WARNING, "file", 1, message, values, None)
    record.__dict__.update(fields)
    text = JsonLines().format(record)
    assert "\n" not in text
    found: dict[str, object] = json.loads(text)
    return found


def test_a_line() -> None:
    found = line("request %s: odd\nthings", "chatcmpl-1", request_id="chatcmpl-1", other=1)
    assert found.pop("time")
    assert found == {
        "level": "warning",
        "logger": "dragoman.x",
        "message": "request chatcmpl-1: odd\nthings",
        "request_id": "chatcmpl-1",
    }


def test_a_request_and_an_exception() -> None:
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
