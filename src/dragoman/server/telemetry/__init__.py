"""What happened, for the operator. No prompt and no reply is in it, unless the operator asks for prompts in the log.

record      one request as it goes on
meter       the tokens and the times of one request, as they come
eventlog    a file of JSON lines: the run and every request
metrics     counters and histograms, cheap to add to
exposition  the same as Prometheus reads it, made when it is asked for
logs        how log lines look
traces      a span for every request, for OpenTelemetry

A request that has ended is handed to `Telemetry.request`, once, wherever it ended.
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
    """Who is handed the requests that have ended."""

    metrics: Metrics

    @property
    def is_tracing(self) -> bool: ...

    def request(self, record: RequestRecord) -> None: ...


class Telemetry:
    def __init__(self, settings: Settings, event_log: str | None) -> None:
        self.events = EventLog(event_log)
        self.metrics = Metrics()
        self._logs_requests = settings.log_requests
        self._traces = None
        if settings.traces is not None:
            # Imported only here: whoever traces nothing need not have it installed.
            from dragoman.server.telemetry.traces import Traces

            self._traces = Traces(settings.traces)

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
