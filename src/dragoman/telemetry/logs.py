"""How log lines look: for people, or one JSON object per line.

    {"time", "level", "logger", "message" [, "request_id"] [, "request"] [, "exception"]}

A line about a request carries its id: `extra={"request_id": ...}`.
"""

import logging
import os
import sys
from datetime import UTC, datetime
from typing import Any

import msgspec

from dragoman.operation import Telemetry

TEXT = "%(levelname)s %(name)s: %(message)s"
STYLE = "DRAGOMAN_LOG_STYLE"
"""How a child process hears of it, before it can hear anything else."""
EXTRAS = ("request_id", "request")


def configure(settings: Telemetry) -> None:
    """Also for the processes that this one starts, which write to the same place."""
    os.environ[STYLE] = f"{settings.log_format} {settings.log_level}"
    configure_as_parent()


def configure_as_parent() -> None:
    form, _, level = os.environ.get(STYLE, "text info").partition(" ")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if form == "json" else logging.Formatter(TEXT))
    logging.basicConfig(level=level.upper(), handlers=[handler])
    # Their lines contain whole addresses, whose queries may be secret.
    for name in ("httpx", "httpcore"):
        logging.getLogger(name).setLevel(logging.WARNING)


class JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="microseconds")
        line: dict[str, Any] = {
            "time": moment.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {name: record.__dict__[name] for name in EXTRAS if name in record.__dict__}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line, enc_hook=str).decode()
