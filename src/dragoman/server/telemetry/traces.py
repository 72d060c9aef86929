"""Exports a span for every request, with the names of OpenTelemetry's conventions for generative AI.

The span is created when the request has ended, from its record. It belongs to the trace of the client's `traceparent`
header, if it sent one. A thread sends spans in batches, and drops those that cannot be sent.
"""

import time

from dragoman.config.sections import Traces as Settings
from dragoman.core.errors import ConfigError
from dragoman.server.telemetry.metrics import RequestRecord

try:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
    from opentelemetry.trace import SpanKind, StatusCode
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
    from opentelemetry.util.types import AttributeValue
except ImportError as error:
    raise ConfigError("telemetry.traces needs OpenTelemetry; install it with: pip install 'dragoman[otel]'") from error

OPERATIONS = {
    "chat": "chat",
    "messages": "chat",
    "responses": "chat",
    "completions": "text_completion",
    "embeddings": "embeddings",
}
FLUSH_MILLISECONDS = 3000


class TraceExporter:
    def __init__(self, settings: Settings, exporter: SpanExporter | None = None) -> None:
        self._provider = TracerProvider(resource=Resource.create({"service.name": settings.service}))
        sender = exporter or OTLPSpanExporter(endpoint=settings.endpoint, timeout=2)
        self._provider.add_span_processor(BatchSpanProcessor(sender))
        self._tracer = self._provider.get_tracer("dragoman")
        self._parents = TraceContextTextMapPropagator()

    def request(self, record: RequestRecord) -> None:
        ended = time.time_ns()
        began = ended - record.duration_us * 1000
        operation = OPERATIONS.get(record.scope or "", record.scope or "request")
        span = self._tracer.start_span(
            f"{operation} {record.model}" if record.model else operation,
            context=self._parents.extract({"traceparent": record.trace}) if record.trace else None,
            kind=SpanKind.SERVER,
            attributes=_attributes(record),
            start_time=began,
        )
        if record.first_token_us is not None:
            span.add_event("first_token", timestamp=began + record.first_token_us * 1000)
        if record.error is not None or record.status >= 500:
            span.set_status(StatusCode.ERROR, record.error or str(record.status))
        span.end(ended)

    def close(self) -> None:
        self._provider.force_flush(FLUSH_MILLISECONDS)
        self._provider.shutdown()


def _attributes(record: RequestRecord) -> dict[str, AttributeValue]:
    method, _, path = record.route.partition(" ")
    known: dict[str, AttributeValue | None] = {
        "gen_ai.operation.name": OPERATIONS.get(record.scope or ""),
        "gen_ai.provider.name": "dragoman",
        "gen_ai.request.model": record.model,
        "gen_ai.response.model": record.model,
        "gen_ai.response.id": record.id,
        "http.request.header.x-request-id": None if record.client_request_id is None else [record.client_request_id],
        "gen_ai.response.finish_reasons": None if record.finish is None else [record.finish],
        "gen_ai.usage.input_tokens": record.prompt_tokens,
        "gen_ai.usage.output_tokens": record.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": record.cached_tokens,
        "error.type": record.error,
        "enduser.id": record.principal,
        "client.address": record.client,
        "url.scheme": record.scheme,
        "http.request.method": method or None,
        "url.path": path or None,
        "http.response.status_code": record.status,
    }
    return {name: value for name, value in known.items() if value is not None}
