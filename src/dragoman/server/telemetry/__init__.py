"""Telemetry for the operator. It contains no prompts and no replies, except prompts in the log if configured.

record      the record of one request
meter       counts the tokens and measures the times of one request
eventlog    a file of JSON lines: the run and every request
metrics     counters and histograms
exposition  the metrics in Prometheus format
traces      an OpenTelemetry span for every request

`TelemetryRecorder.request` is called once for every request that has ended.
"""

import logging
from collections.abc import Mapping
from typing import Any, Protocol

from dragoman.config.sections import Telemetry as Settings
from dragoman.server.telemetry.eventlog import EventLog as EventLog
from dragoman.server.telemetry.metrics import Metrics
from dragoman.server.telemetry.record import RequestRecord as RequestRecord

log = logging.getLogger("dragoman.requests")


class Recorder(Protocol):
    """Receives the record of every request that has ended."""

    metrics: Metrics

    @property
    def is_tracing(self) -> bool: ...

    def request(self, record: RequestRecord) -> None: ...


class TelemetryRecorder:
    def __init__(self, settings: Settings, event_log: str | None) -> None:
        self.events = EventLog(event_log)
        self.metrics = Metrics()
        self._logs_requests = settings.log_requests
        self._traces = None
        if settings.traces is not None:
            # OpenTelemetry is an optional dependency.
            from dragoman.server.telemetry.traces import TraceExporter

            self._traces = TraceExporter(settings.traces)

    @property
    def is_tracing(self) -> bool:
        return self._traces is not None

    def start(self, run: Mapping[str, Any]) -> None:
        self.events.start(run)

    def request(self, record: RequestRecord) -> None:
        self.metrics.add(record)
        self.events.request(record)
        if self._traces is not None:
            self._traces.request(record)
        if self._logs_requests:
            log.info("%s", record.line(), extra={"request": record})

    def close(self) -> None:
        self.events.close(self.metrics.totals())
        if self._traces is not None:
            self._traces.close()
