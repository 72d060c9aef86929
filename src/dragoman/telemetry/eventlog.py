"""What happened, as a file of JSON lines.

    run_start  schema, time, host, version, models, engines, config (without secrets)
    request    id, time, route, scope, client, model, principal, status, tokens, times in microseconds (queue, first
               event, first token, duration), finish, error, number of warnings
    run_end    time, totals

The id of a request is the id of its response and its `x-request-id` header. Every line is written at once: what is
there when a process is killed stays there.
"""

import logging
import os
import platform
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from dragoman import __version__
from dragoman.errors import ConfigError
from dragoman.telemetry.record import RequestRecord

SCHEMA = 1
TOTALS = ("prompt_tokens", "completion_tokens", "cached_tokens", "reasoning_tokens", "unfinished_tokens")
log = logging.getLogger("dragoman.telemetry")


class EventLog:
    """Totals in memory, and the lines in a file where one is asked for."""

    def __init__(self, path: str | None) -> None:
        self._file = _open(path) if path else None
        self.requests = 0
        self.errors = 0
        self.cancelled = 0
        self.prompt_tokens = 0
        self.completion_tokens = 0
        self.cached_tokens = 0
        self.reasoning_tokens = 0
        self.unfinished_tokens = 0

    def start(self, run: Mapping[str, Any]) -> None:
        self._write("run_start", {"schema": SCHEMA, "version": __version__, "host": _host(), **run})

    def request(self, record: RequestRecord) -> None:
        self.requests += 1
        self.errors += record.error is not None
        self.cancelled += record.status == 499
        self.prompt_tokens += record.prompt_tokens
        self.completion_tokens += record.completion_tokens
        self.cached_tokens += record.cached_tokens
        self.reasoning_tokens += record.reasoning_tokens
        self.unfinished_tokens += record.unfinished_tokens
        if self._file is not None:
            self._write("request", msgspec.to_builtins(record))

    def totals(self) -> dict[str, int]:
        counts = {"requests": self.requests, "errors": self.errors, "cancelled": self.cancelled}
        return counts | {name: getattr(self, name) for name in TOTALS}

    def close(self) -> None:
        """Written once, however often the end is told."""
        self._write("run_end", self.totals())
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, event: str, fields: dict[str, Any]) -> None:
        if self._file is None:
            return
        try:
            self._file.write(msgspec.json.encode({"event": event, "time": time.time(), **fields}) + b"\n")
        except OSError as error:
            # Requests are more important than their record.
            log.error("the event log cannot be written any more: %s", error.strerror)
            self._file.close()
            self._file = None


def _host() -> dict[str, Any]:
    return {
        "name": socket.gethostname(),
        "pid": os.getpid(),
        "cpus": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
    }


def _open(path: str) -> BinaryIO:
    try:
        return Path(path).open("ab", buffering=0)
    except OSError as error:
        raise ConfigError(f"the event log {path} cannot be written: {error.strerror}") from error
