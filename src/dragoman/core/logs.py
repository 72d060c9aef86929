"""Formats log lines as text, with the local time, or as one JSON object per line.

    {"time", "level", "logger", "message" [, "request_id"] [, "request"] [, "exception"]}

Rules
1. A message is one line. Control characters in it, and marks that change the direction of text, are escaped.
2. The lines of a traceback are indented, so that none of them looks like a message.

A line about a request carries its id: `extra={"request_id": ...}`.
"""

import logging
import os
import re
import sys
from datetime import UTC, datetime
from typing import Any

import msgspec

TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
STYLE_VARIABLE = "DRAGOMAN_LOG_STYLE"
"""The environment variable that passes the settings to child processes."""
EXTRAS = ("request_id", "request")
INDENT = "    "
CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


def configure(line_format: str, level: str) -> None:
    """Configure the logs of this process and of its child processes."""
    os.environ[STYLE_VARIABLE] = f"{line_format} {level}"
    configure_as_parent()


def configure_as_parent() -> None:
    form, _, level = os.environ.get(STYLE_VARIABLE, "text info").partition(" ")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter(TEXT))
    logging.basicConfig(level=level.upper(), handlers=[handler])
    # These loggers write whole addresses, whose queries may be secret.
    for name in ("httpx", "httpcore", "httpx2", "httpcore2"):
        logging.getLogger(name).setLevel(logging.WARNING)


def escape(text: str) -> str:
    """Escape control characters, so that the text is one line."""
    return CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class TextFormatter(logging.Formatter):
    default_msec_format = "%s.%03d"

    def format(self, record: logging.LogRecord) -> str:
        record.message = record.getMessage()
        record.asctime = self.formatTime(record)
        lines = [escape(self.formatMessage(record))]
        if record.exc_info:
            lines += [INDENT + escape(line) for line in self.formatException(record.exc_info).split("\n")]
        return "\n".join(lines)


class JsonFormatter(logging.Formatter):
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
        # JSON escapes only characters below 0x20. The others can only be inside its strings.
        encoded = msgspec.json.encode(line, enc_hook=str).decode()
        return CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", encoded)
