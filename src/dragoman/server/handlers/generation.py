"""Handler for generation: turns the events of a model into JSON or a stream of frames.

Rules
1. The status is sent with the first event that has content, so an earlier failure has its own status. After a long
   silence, also in the queue, a stream starts without waiting for it.
2. A later failure becomes the protocol's error frame, and the stream ends without its normal end.
3. Frames that are ready together leave in one write.
4. If a model cannot answer, its fallbacks are tried in order, until one of them produces events. If all fail, the
   client gets the error of the requested model.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import msgspec

from dragoman.config.model_spec import SamplingDefaults
from dragoman.core.errors import DragomanError, EngineTimeout
from dragoman.core.events import Event, Finished, Started
from dragoman.core.reply import Collection
from dragoman.core.request import GenerationRequest
from dragoman.pipeline.generate import OnEvents, check_limits, generate, unsupported_parameter
from dragoman.protocols.registry import Encoder, Protocol, ReplyEncoding
from dragoman.server.auth.quotas import Estimate, estimate_prompt_tokens, estimate_tokens
from dragoman.server.base_app import BaseApp
from dragoman.server.http_exchange import HttpExchange
from dragoman.server.model_lease import LeaseRequest, ModelLeaseProtocol
from dragoman.server.telemetry.meter import Meter

log = logging.getLogger("dragoman.prompts")
log_server = logging.getLogger("dragoman.server")
Store = Callable[[], Awaitable[None]]
MakeSink = Callable[[GenerationRequest], OnEvents]
"""Makes the receiver of the events for a request to one model."""
FALLBACK_STATUSES = frozenset({429, 500, 502, 503, 504})
"""Statuses of errors that a fallback model may not have."""


async def answer(app: BaseApp, exchange: HttpExchange, protocol: Protocol) -> None:
    decoded = await exchange.read_body(app.settings.limits, protocol.decode)
    await reply_to(app, exchange, decoded, protocol)


async def reply_to(
    app: BaseApp,
    exchange: HttpExchange,
    decoded: GenerationRequest,
    reply_format: ReplyEncoding,
    store: Store | None = None,
) -> None:
    """Generate and send the reply. `store` is called when the reply is complete, before its end is sent."""
    if decoded.delivery.stream:
        await _stream(app, exchange, decoded, reply_format, store)
        return
    collection = Collection()
    request = await _run(app, exchange, decoded, lambda request: _collecting_sink(app, exchange, collection))
    reply = reply_format.encode_reply(request, int(time.time()), collection.reply())
    if store is not None:
        await store()
    await exchange.response.send_json(reply)


def with_defaults(request: GenerationRequest, defaults: SamplingDefaults | None) -> GenerationRequest:
    """Fill unset parameters with the defaults of the model's configuration."""
    if defaults is None:
        return request
    limit = defaults.max_tokens if request.max_tokens is None else request.max_tokens
    return msgspec.structs.replace(request, sampling=defaults.fill(request.sampling), max_tokens=limit)


async def _run(
    app: BaseApp, exchange: HttpExchange, decoded: GenerationRequest, make_sink: MakeSink
) -> GenerationRequest:
    """Generate with the model or a fallback. Returns the request as that model got it."""
    lease, record = app.model_lease(exchange), exchange.record
    estimate = None if exchange.quota_lease is None else estimate_tokens(decoded, exchange.weight)
    try:
        return await _run_with(app, exchange, lease, decoded, make_sink, estimate)
    except DragomanError as error:
        if not lease.fallbacks or record.first_event_us is not None or error.status not in FALLBACK_STATUSES:
            raise
        failure = error
    for name in lease.fallbacks:
        message = "request %s: model %s cannot answer (%s); trying %s"
        log_server.warning(message, record.id, lease.label, failure.message, name, extra={"request_id": record.id})
        exchange.response.clear_notes()
        request = msgspec.structs.replace(decoded, model=name)
        try:
            return await _run_with(app, exchange, app.model_lease(exchange), request, make_sink, None)
        except DragomanError as error:
            if record.first_event_us is not None:
                raise
            if error.status not in FALLBACK_STATUSES:
                break
    record.model = lease.label
    raise failure


async def _run_with(
    app: BaseApp,
    exchange: HttpExchange,
    lease: ModelLeaseProtocol,
    decoded: GenerationRequest,
    make_sink: MakeSink,
    estimate: Estimate | None,
) -> GenerationRequest:
    """Generate with the model of a lease."""
    limits, record = app.settings.limits, exchange.record
    try:
        request = await _prepare_request(app, exchange, lease, decoded, estimate)
        check_limits(request, limits.choices, limits.stop_strings)
        sink = make_sink(request)
        # Before this point the status and the headers could still change, so no comment may start the stream.
        exchange.response.is_streaming = request.delivery.stream
        prompt_tokens = partial(estimate_prompt_tokens, request, exchange.weight)
        metrics = app.telemetry.metrics.for_model(lease.label or request.model)
        exchange.meter = Meter(record, metrics, exchange.timer.started, prompt_tokens)
        engine = await lease.start()
        record.queue_us = lease.queue_us
        exchange.timer.expect(limits.stall_seconds, stall_error)
        await generate(engine, request, lease.turns, sink, exchange.timer.note_running)
        first_event = exchange.timer.started + (record.first_event_us or 0) / 1e6
        lease.note_speed(record.completion_tokens, exchange.timer.last_progress - first_event)
        return request
    finally:
        lease.close()


async def _prepare_request(
    app: BaseApp,
    exchange: HttpExchange,
    lease: ModelLeaseProtocol,
    decoded: GenerationRequest,
    estimate: Estimate | None,
) -> GenerationRequest:
    """Find the model and complete the request for it."""
    record = exchange.record
    try:
        info = await lease.find(LeaseRequest(decoded.model, decoded.asked, estimate, app.is_strict(exchange)))
    finally:
        record.model = lease.label
    if info.ignored:
        exchange.response.ignore(info.ignored)
    if app.settings.telemetry.log_prompts:
        prompt = msgspec.json.encode(decoded.messages or decoded.prompts).decode()
        log.info("request %s: prompt %s", record.id, prompt, extra={"request_id": record.id})
    filled = with_defaults(decoded, info.sampling)
    return msgspec.structs.replace(filled, id=record.id, model=info.model, principal=record.principal)


def _collecting_sink(app: BaseApp, exchange: HttpExchange, collection: Collection) -> OnEvents:
    def collect(choice: int, events: Sequence[Event]) -> None:
        _record_events(app, exchange, choice, events)
        collection.add(choice, events)

    return collect


async def _stream(
    app: BaseApp, exchange: HttpExchange, decoded: GenerationRequest, reply_format: ReplyEncoding, store: Store | None
) -> None:
    frames = _FrameSink(app, exchange, reply_format)
    failure: Exception | None
    try:
        await _run(app, exchange, decoded, frames.start)
        end = frames.encoder.end()
        if store is not None:
            await store()
    except asyncio.CancelledError:
        failure = exchange.take_cancellation()
        if failure is None:
            raise
    except Exception as error:
        failure = error
        if not exchange.response.is_started:
            raise
    else:
        await exchange.response.end(end)
        return
    if not exchange.response.is_started:
        raise failure
    await exchange.response.end(frames.encoder.fail(exchange.public_error(failure)))


class _FrameSink:
    """Encodes events as frames and writes them. Each model that is tried has its own encoder."""

    encoder: Encoder

    def __init__(self, app: BaseApp, exchange: HttpExchange, reply_format: ReplyEncoding) -> None:
        self._app = app
        self._exchange = exchange
        self._response = exchange.response
        self._format = reply_format
        self._pending = b""

    def start(self, request: GenerationRequest) -> OnEvents:
        self.encoder = self._format.encoder(request, int(time.time()))
        return self._write_events

    def _write_events(self, choice: int, events: Sequence[Event]) -> Awaitable[None] | None:
        response = self._response
        _record_events(self._app, self._exchange, choice, events)
        frames = self.encoder.feed(choice, events)
        if not response.is_started and all(type(event) is Started for event in events):
            self._pending += frames
            return None
        if self._pending:
            frames, self._pending = self._pending + frames, b""
        return None if not frames or response.write_now(frames) else response.write(frames)


def stall_error(seconds: float) -> DragomanError:
    return EngineTimeout(f"the engine produced nothing for {seconds:g} s")


def _record_events(app: BaseApp, exchange: HttpExchange, choice: int, events: Sequence[Event]) -> None:
    timer = exchange.timer
    timer.note_progress()
    assert exchange.meter is not None
    exchange.meter.note(choice, events, timer.last_progress)
    first, last = events[0], events[-1]
    if type(first) is Started and first.ignored:
        if app.is_strict(exchange):
            raise unsupported_parameter(exchange.record.model or "", first.ignored[0])
        exchange.response.ignore(first.ignored)
    if type(last) is Finished:
        for warning in last.warnings:
            exchange.response.warn(warning)
