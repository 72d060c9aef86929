"""What happened, for the operator: one JSON line per event.

    run_start  schema, time, host, version, models
    request    id, time, route, model, principal, status, tokens, time to the first event, duration, finish, error,
               number of warnings
    run_end    time, totals

The id of a request is the id of its response and its `x-request-id` header. No prompt and no reply is ever written.
"""

import logging
import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from dragoman import __version__
from dragoman.errors import ConfigError
from dragoman.events import Usage

SCHEMA = 1
log = logging.getLogger("dragoman.telemetry")


class RequestRecord(msgspec.Struct, omit_defaults=True):
    """One request as it goes on; written when it has ended. Status 499: the client left before the end."""

    id: str
    route: str
    principal: str = "anonymous"
    model: str | None = None
    status: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    first_event_us: int | None = None
    duration_us: int = 0
    finish: str | None = None
    error: str | None = None
    warnings: int = 0

    def count(self, usage: Usage) -> None:
        self.prompt_tokens += usage.prompt
        self.completion_tokens += usage.completion
        self.cached_tokens += usage.cached
        self.reasoning_tokens += usage.reasoning


class EventLog:
    """Totals in memory, and the lines in a file where one is asked for."""

    def __init__(self, path: str | None) -> None:
        self._file = _open(path) if path else None
        self.requests = 0
        self.errors = 0
        self.prompt_tokens = 0
        self.completion_tokens = 0

    def start(self, models: Sequence[str]) -> None:
        host = {"name": socket.gethostname(), "pid": os.getpid(), "cpus": os.cpu_count()}
        self._write("run_start", {"schema": SCHEMA, "version": __version__, "host": host, "models": list(models)})

    def request(self, record: RequestRecord) -> None:
        self.requests += 1
        self.errors += record.error is not None
        self.prompt_tokens += record.prompt_tokens
        self.completion_tokens += record.completion_tokens
        if self._file is not None:
            self._write("request", msgspec.to_builtins(record))

    def close(self) -> None:
        totals = {
            "requests": self.requests,
            "errors": self.errors,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
        }
        self._write("run_end", totals)
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


def _open(path: str) -> BinaryIO:
    try:
        return Path(path).open("ab", buffering=0)
    except OSError as error:
        raise ConfigError(f"the event log {path} cannot be written: {error.strerror}") from error
