"""Records every request that has ended: in the metrics, the ledger, the event log, the traces and the log. It also
notes the last use of each key.

The event log is a file of JSON lines:

    run_start  schema, time, host, version, models (name, engine, device), config (without secrets)
    request    id, time, route, scope, client, model, principal, key, status, tokens, times in microseconds (queue,
               first event, first token, duration), finish, error, number of warnings, ignored parameters, the client's
               own id of the request
    run_end    time, totals

The id of a request is the id of its response and its `x-request-id` header; if the client sent an id of its own in this
header, `x-dragoman-request-id`. Every line is written immediately, so it
survives the process. A line that does not fit on the disk is removed completely.
"""

import errno
import logging
import os
import platform
import re
import socket
import time
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from typing import Any, Protocol

import msgspec

from dragoman.config.sections import Telemetry
from dragoman.config.settings import Settings
from dragoman.core.errors import ConfigError
from dragoman.core.urls import REDACTED, remove_credentials
from dragoman.core.version import __version__
from dragoman.server.telemetry.metrics import Metrics, RequestRecord
from dragoman.storage.key_uses import KeyUses
from dragoman.storage.keys import KEY_ID
from dragoman.storage.ledger import Ledger

SCHEMA = 1
SECRET = re.compile(r"(?i)(secret|password|passwd|credential|api_?keys?|access_?token|auth_?token|bearer)")
log = logging.getLogger("dragoman.server.telemetry")
request_log = logging.getLogger("dragoman.requests")


class Recorder(Protocol):
    """Receives the record of every request that has ended."""

    metrics: Metrics
    is_tracing: bool

    def request(self, record: RequestRecord) -> None: ...


class TelemetryRecorder:
    def __init__(self, settings: Telemetry, event_log: str | None) -> None:
        self.events = EventLog(event_log)
        self.metrics = Metrics(settings.metrics_by_principal)
        self.ledger: Ledger | None = None
        self.key_uses = KeyUses()
        self.is_tracing = settings.traces is not None
        self._logs_requests = settings.log_requests
        self._traces = None
        if settings.traces is not None:
            # OpenTelemetry is an optional dependency.
            from dragoman.server.telemetry.traces import TraceExporter

            self._traces = TraceExporter(settings.traces)

    def request(self, record: RequestRecord) -> None:
        self.metrics.add(record)
        if KEY_ID.fullmatch(record.key):
            self.key_uses.note(record.key, time.time())
        if self.ledger is not None:
            self.ledger.close(record)
        self.events.request(record)
        if self._traces is not None:
            self._traces.request(record)
        if self._logs_requests:
            request_log.info("%s", record.line(), extra={"request": record})

    def close(self) -> None:
        self.events.close(self.metrics.totals())
        if self._traces is not None:
            self._traces.close()


class EventLog:
    """Without a path it does nothing."""

    def __init__(self, path: str | None) -> None:
        self._path = path
        self._file = _open(path) if path else None

    def reopen(self) -> None:
        """Open the path again, after log rotation has moved the old file."""
        if self._path is None:
            return
        try:
            file = _open(self._path)
        except ConfigError as error:
            log.error("%s; writing to the old file", error)
            return
        if self._file is not None:
            self._file.close()
        self._file = file

    def start(self, run: Mapping[str, Any]) -> None:
        self._write("run_start", {"schema": SCHEMA, "version": __version__, "host": _host(), **run})

    def request(self, record: RequestRecord) -> None:
        if self._file is not None:
            self._write("request", msgspec.to_builtins(record))

    def close(self, totals: Mapping[str, int]) -> None:
        """Write the last line. Further calls do nothing."""
        self._write("run_end", totals)
        self._path = None
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, event: str, fields: Mapping[str, Any]) -> None:
        if self._file is None:
            return
        line = msgspec.json.encode({"event": event, "time": time.time(), **fields}) + b"\n"
        try:
            written = self._file.write(line)
            if written < len(line):
                # On a full disk the system writes a part, without an error.
                self._file.truncate(self._file.tell() - written)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            # Requests are more important than the log, so it ends here.
            log.error("stopped writing the event log: %s", error.strerror)
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


def _open(path: str) -> FileIO:
    try:
        return Path(path).open("ab", buffering=0)
    except OSError as error:
        raise ConfigError(f"the event log {path} cannot be written: {error.strerror}") from error


def without_secrets(settings: Settings) -> Any:
    """The settings with the number of API keys in place of the keys, and without passwords in fields and URLs."""
    shown = _hide_secrets(msgspec.to_builtins(settings)) | {"api_keys": len(settings.api_keys)}
    for server in shown["mcp_servers"].values():
        for name in ("env", "headers"):
            server[name] = dict.fromkeys(server[name], REDACTED)
    return shown


def _hide_secrets(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: REDACTED if SECRET.search(str(name)) else _hide_secrets(inner) for name, inner in value.items()}
    if isinstance(value, str):
        return remove_credentials(value)
    return [_hide_secrets(inner) for inner in value] if isinstance(value, list | tuple) else value
