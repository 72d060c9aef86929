"""What happened, as a file of JSON lines.

    run_start  schema, time, host, version, models, engines, config (without secrets)
    request    id, time, route, scope, client, model, principal, status, tokens, times in microseconds (queue, first
               event, first token, duration), finish, error, number of warnings
    run_end    time, totals

The id of a request is the id of its response and its `x-request-id` header. Every line is written at once: what is
there when a process is killed stays there. A line that does not fit on the disk leaves no part of it.
"""

import errno
import logging
import os
import platform
import socket
import time
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from typing import Any

import msgspec

from dragoman.core.errors import ConfigError
from dragoman.core.version import __version__
from dragoman.server.telemetry.record import RequestRecord

SCHEMA = 1
log = logging.getLogger("dragoman.server.telemetry")


class EventLog:
    """Nothing at all where no file is asked for."""

    def __init__(self, path: str | None) -> None:
        self._path = path
        self._file = _open(path) if path else None

    def reopen(self) -> None:
        """Go on in the file that has the name now: somebody may have moved the one before away."""
        if self._path is None:
            return
        try:
            fresh = _open(self._path)
        except ConfigError as error:
            log.error("%s; it goes on in the old file", error)
            return
        if self._file is not None:
            self._file.close()
        self._file = fresh

    def start(self, run: Mapping[str, Any]) -> None:
        self._write("run_start", {"schema": SCHEMA, "version": __version__, "host": _host(), **run})

    def request(self, record: RequestRecord) -> None:
        if self._file is not None:
            self._write("request", msgspec.to_builtins(record))

    def close(self, totals: Mapping[str, int]) -> None:
        """Written once, however often the end is told."""
        self._write("run_end", totals)
        self._path = None
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, event: str, fields: Mapping[str, Any]) -> None:
        if self._file is None:
            return
        try:
            _append(self._file, msgspec.json.encode({"event": event, "time": time.time(), **fields}) + b"\n")
        except OSError as error:
            # Requests are more important than their record.
            log.error("the event log cannot be written any more: %s", error.strerror)
            self._file.close()
            self._file = None


def _append(file: FileIO, line: bytes) -> None:
    """Write the whole line or none of it. On a full disk the system writes what fits, without an error."""
    written = file.write(line)
    if written < len(line):
        file.truncate(file.tell() - written)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _host() -> dict[str, Any]:
    return {
        "name": socket.gethostname(),
        "pid": os.getpid(),
        "cpus": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
    }


def _open(path: str) -> FileIO:
    try:
        return Path(path).open("ab", buffering=0)
    except OSError as error:
        raise ConfigError(f"the event log {path} cannot be written: {error.strerror}") from error
