"""Spans with OpenTelemetry's conventions."""

from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from dragoman.config.sections import Traces as Settings
from dragoman.server.telemetry.metrics import RequestRecord
from dragoman.server.telemetry.traces import TraceExporter

TRACE = "0af7651916cd43dd8448eb211c80319c"


def test_span_attributes() -> None:
    exporter = InMemorySpanExporter()
    traces = TraceExporter(Settings("http://127.0.0.1:1/v1/traces"), exporter)
    record = RequestRecord("chatcmpl-1", "POST /v1/chat/completions", scope="chat", model="smollm2", status=200)
    record.prompt_tokens, record.completion_tokens, record.finish = 7, 5, "stop"
    record.duration_us, record.first_token_us = 2_000_000, 500_000
    record.trace = f"00-{TRACE}-b7ad6b7169203331-01"
    traces.request(record)
    traces.request(RequestRecord("req-1", "GET /x", status=404, error="not_found", trace="nonsense"))
    traces.close()
    chat, other = exporter.get_finished_spans()
    assert (chat.name, chat.kind) == ("chat smollm2", SpanKind.SERVER)
    assert chat.attributes is not None
    assert chat.attributes["gen_ai.operation.name"] == "chat"
    assert chat.attributes["gen_ai.request.model"] == "smollm2"
    assert chat.attributes["gen_ai.usage.input_tokens"] == 7
    assert chat.attributes["gen_ai.usage.output_tokens"] == 5
    assert chat.attributes["gen_ai.response.id"] == "chatcmpl-1"
    assert chat.attributes["gen_ai.response.finish_reasons"] == ("stop",)
    context = chat.get_span_context()
    assert context is not None
    assert format(context.trace_id, "032x") == TRACE
    assert chat.end_time is not None
    assert chat.start_time is not None
    assert chat.end_time - chat.start_time == 2_000_000_000
    assert chat.events[0].timestamp - chat.start_time == 500_000_000
    assert other.status.status_code is StatusCode.ERROR
    assert other.attributes is not None
    assert "gen_ai.operation.name" not in other.attributes
