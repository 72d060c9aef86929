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
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from functools import partial
from typing import Any, cast

import msgspec

from dragoman.core.edits import ContextEdited, ContextEvent
from dragoman.core.engine import Engine
from dragoman.core.errors import DragomanError
from dragoman.core.events import Event, Finished, Started, notify
from dragoman.core.reply import ReplyBuilder
from dragoman.core.request import Asked, GenerationRequest, Sampling
from dragoman.core.types import Priority
from dragoman.pipeline.context_edits import COMPACTION_ONLY, edit_context
from dragoman.pipeline.generate import OnEvents, check_limits, generate, reads_field, unsupported_parameter
from dragoman.protocols.registry import ReplyEncoding
from dragoman.protocols.wire_protocol import EVENT_STREAM, ContextEncoder, Encoder, WireProtocol
from dragoman.server.auth.callers import Estimate, estimate_prompt_tokens, estimate_tokens
from dragoman.server.base_app import BaseApp
from dragoman.server.http_exchange import HttpExchange
from dragoman.server.model_lease import LeaseInfo, LeaseRequest, ModelLease
from dragoman.server.request_timer import stall_error
from dragoman.server.request_tools import RequestTools
from dragoman.server.telemetry.meter import Meter
from dragoman.server.tool_rounds import ToolRounds

log = logging.getLogger("dragoman.prompts")
log_server = logging.getLogger("dragoman.server")
Store = Callable[[], Awaitable[None]]
FALLBACK_STATUSES = frozenset({429, 500, 502, 503, 504})
"""A request that fails with one of these statuses is tried with a fallback model."""


async def answer(app: BaseApp, exchange: HttpExchange, protocol: WireProtocol) -> None:
    decoded = await exchange.read_body(app.settings.limits, protocol.decode)
    await reply_to(app, exchange, decoded, protocol)


def reply_to(
    app: BaseApp,
    exchange: HttpExchange,
    decoded: GenerationRequest,
    reply_format: ReplyEncoding,
    store: Store | None = None,
) -> Awaitable[None]:
    """Generate and send the reply. `store` is called when the reply is complete, before its end is sent."""
    exchange.response.stream_type = reply_format.stream_type
    generation = _Generation(app, exchange, decoded, reply_format, store)
    return generation.stream() if decoded.delivery.stream else generation.send_whole()


class _Generation:
    """Runs a model, or one of its fallbacks, and sends its events as frames or as one reply."""

    _encoder: Encoder
    """Each model that is tried has its own encoder or builder."""
    _builder: ReplyBuilder | None = None
    _edited: ContextEdited | None = None
    _pending = b""

    def __init__(
        self,
        app: BaseApp,
        exchange: HttpExchange,
        decoded: GenerationRequest,
        reply_format: ReplyEncoding,
        store: Store | None,
    ) -> None:
        self._app = app
        self._exchange = exchange
        self._response = exchange.response
        self._timer = exchange.timer
        self._decoded = decoded
        self._format = reply_format
        self._store = store
        self._tools: RequestTools | None = None
        if decoded.tool_servers:
            record = exchange.record
            self._tools = RequestTools(app.tool_servers, decoded, record.id, record.principal)

    async def send_whole(self) -> None:
        request = await self._run(self._decoded)
        assert self._builder is not None
        reply = self._builder.reply()
        if self._edited is not None:
            reply = msgspec.structs.replace(reply, edited=self._edited)
        encoded = self._format.encode_reply(request, int(time.time()), reply)
        if self._store is not None:
            await self._store()
        await self._response.send_json(encoded)

    async def stream(self) -> None:
        exchange, response = self._exchange, self._response
        failure: Exception | None
        try:
            await self._run(self._decoded)
            end = self._encoder.end()
            if self._store is not None:
                await self._store()
        except asyncio.CancelledError:
            failure = exchange.take_cancellation()
            if failure is None:
                raise
        except Exception as error:
            failure = error
            if not response.is_started:
                raise
        else:
            await response.end(end)
            return
        if not response.is_started:
            raise failure
        await response.end(self._encoder.fail(self._app.public_error(exchange, failure)))

    async def _run(self, decoded: GenerationRequest, is_fallback: bool = False) -> GenerationRequest:
        """Generate with the model or a fallback. Returns the request as that model got it."""
        app, exchange, timer = self._app, self._exchange, self._timer
        limits, record = app.settings.limits, exchange.record
        lease, estimate = app.model_lease(exchange), None
        self._edited = None
        if not is_fallback:
            estimate = estimate_tokens(decoded, exchange.weight)
        try:
            wanted = (decoded.model, decoded.asked, estimate, decoded.extra, decoded.priority)
            info = await find_model(app, exchange, lease, *wanted)
            request = _complete_request(app, exchange, decoded, info)
            check_limits(request, limits.choices, limits.stop_strings)
            if request.delivery.stream:
                self._encoder = self._format.encode_stream(request, int(time.time()))
                # Before this point the status and the headers could still change, so no comment may start the stream.
                self._response.is_streaming = self._format.stream_type == EVENT_STREAM
            else:
                self._builder = ReplyBuilder()
            if self._tools is not None:
                await self._tools.list_tools()
                request = self._tools.complete(request)
            engine = await lease.start()
            record.queue_us = lease.queue_us
            timer.expect(limits.stall_seconds, stall_error)
            edited = await self._edit(engine, lease, request, info) if request.edits else request
            seconds_in_calls = 0.0 if edited is None else await self._generate_reply(engine, lease, edited)
            first_event = timer.started + (record.first_event_us or 0) / 1e6
            lease.note_speed(record.completion_tokens, timer.last_progress - first_event - seconds_in_calls)
            return request
        except DragomanError as error:
            has_fallback = bool(lease.fallbacks) and not is_fallback and error.status in FALLBACK_STATUSES
            if not has_fallback or record.first_event_us is not None:
                raise
            failure = error
        finally:
            lease.close()
        return await self._run_fallbacks(lease, failure)

    async def _generate_reply(self, engine: Engine, lease: ModelLease, request: GenerationRequest) -> float:
        """Generate the reply. Returns the seconds in which the model waited for tools."""
        generate_once = partial(self._generate_once, engine, lease, self._exchange.weight)
        if self._tools is None:
            await self._run_hooks(request, self._receive, partial(generate_once, request))
            return 0.0
        max_rounds = self._app.settings.mcp.rounds
        rounds = ToolRounds(self._tools, max_rounds, generate_once, lease.slots, self._timer, self._measure)
        await self._run_hooks(request, self._deliver, partial(rounds.run, request))
        return rounds.seconds_in_calls

    async def _run_hooks(
        self, request: GenerationRequest, receive: OnEvents, run: Callable[[OnEvents], Coroutine[None, None, None]]
    ) -> None:
        hooks = self._app.hooks
        await (run(receive) if hooks is None else hooks.run(request, receive, run))

    def _generate_once(
        self, engine: Engine, lease: ModelLease, weight: int, request: GenerationRequest, on_events: OnEvents
    ) -> Coroutine[None, None, None]:
        """Generate once, with a meter of its own: the reply, a round of it, or a summary. `weight` is the size of the
        prompt."""
        exchange = self._exchange
        metrics, prompt_tokens = self._app.telemetry.metrics, partial(estimate_prompt_tokens, request, weight)
        if exchange.meter is not None:
            exchange.meter.close()
        exchange.meter = Meter(
            exchange.record, metrics.for_model(lease.label or request.model), self._timer.started, prompt_tokens
        )
        return generate(engine, request, lease.slots, on_events, self._timer.note_running)

    async def _edit(
        self, engine: Engine, lease: ModelLease, request: GenerationRequest, info: LeaseInfo
    ) -> GenerationRequest | None:
        """Apply the edits of the request. Return what the model gets; None if the reply is only a compaction."""

        async def write_summary(summary: GenerationRequest, on_events: OnEvents) -> None:
            def receive(choice: int, events: Sequence[Event]) -> Awaitable[None] | None:
                self._measure(choice, events)
                return on_events(choice, events)

            weight = len(summary.messages[0].text)
            await self._run_hooks(summary, receive, partial(self._generate_once, engine, lease, weight, summary))

        sampling = Sampling() if info.sampling is None else info.sampling.fill(Sampling())
        options = self._app.settings.compaction.options(sampling)
        edited = await edit_context(engine, request, options, write_summary, self._receive_context)
        if edited is None:
            await notify(partial(self._receive, 0), COMPACTION_ONLY)
        return edited

    async def _run_fallbacks(self, lease: ModelLease, failure: DragomanError) -> GenerationRequest:
        """Generate with a fallback for the model of the lease, which has failed."""
        record = self._exchange.record
        for name in lease.fallbacks:
            message = "request %s: model %s cannot answer (%s); trying %s"
            log_server.warning(
                message, record.log_id, lease.label, failure.message, name, extra={"request_id": record.id}
            )
            self._response.clear_notes()
            try:
                return await self._run(msgspec.structs.replace(self._decoded, model=name), is_fallback=True)
            except DragomanError as error:
                if record.first_event_us is not None:
                    raise
                if error.status not in FALLBACK_STATUSES:
                    break
        record.model = lease.label
        raise failure

    def _receive_context(self, event: ContextEvent) -> Awaitable[None] | None:
        if isinstance(event, ContextEdited):
            self._edited = event
            if event.ignored:
                ignore(self._app, self._exchange, event.ignored)
        if self._builder is not None:
            return None
        # Only protocols whose encoders have the method give their requests edits.
        return self._write(cast("ContextEncoder", self._encoder).feed_context(event))

    def _receive(self, choice: int, events: Sequence[Event]) -> Awaitable[None] | None:
        self._measure(choice, events)
        return self._deliver(choice, events)

    def _measure(self, choice: int, events: Sequence[Event]) -> None:
        timer, meter = self._timer, self._exchange.meter
        timer.note_progress()
        assert meter is not None
        meter.note(choice, events, timer.last_progress)

    def _deliver(self, choice: int, events: Sequence[Event]) -> Awaitable[None] | None:
        exchange, response = self._exchange, self._response
        first, last = events[0], events[-1]
        if type(first) is Started and first.ignored:
            ignore(self._app, exchange, first.ignored)
        if type(last) is Finished:
            for warning in last.warnings:
                response.warn(warning)
        if self._builder is not None:
            self._builder.add(choice, events)
            return None
        frames = self._encoder.feed(choice, events)
        if type(last) is Started and not response.is_started:
            self._pending += frames
            return None
        return self._write(frames)

    def _write(self, frames: bytes) -> Awaitable[None] | None:
        if self._pending:
            frames, self._pending = self._pending + frames, b""
        return None if not frames or self._response.write_now(frames) else self._response.write(frames)


async def find_model(
    app: BaseApp,
    exchange: HttpExchange,
    lease: ModelLease,
    name: str,
    asked: tuple[Asked, ...],
    estimate: Estimate | None = None,
    extra: Iterable[str] = (),
    priority: Priority = "interactive",
) -> LeaseInfo:
    """Find the model of a lease, and note its name and the parameters that it ignores. `extra` are the names of unknown
    fields that the engine gets if it reads them. `priority` is the one that the request asks for."""
    priority = exchange.priority(priority)
    try:
        info = await lease.find(LeaseRequest(name, asked, estimate, app.is_strict(exchange), tuple(extra), priority))
    finally:
        exchange.record.model = lease.label
    if info.ignored:
        exchange.response.ignore(info.ignored)
    if lease.budget_warning is not None:
        exchange.response.note_budget(lease.budget_warning)
    return info


def ignore(app: BaseApp, exchange: HttpExchange, params: tuple[str, ...]) -> None:
    """Report parameters that the engine found to have no effect. In strict mode that is an error."""
    if app.is_strict(exchange):
        raise unsupported_parameter(exchange.record.model or "", params[0])
    exchange.response.ignore(params)


def http_fields(exchange: HttpExchange, decoded: GenerationRequest, info: LeaseInfo) -> dict[str, Any]:
    """The fields of a generation request that come from the HTTP request."""
    extra, headers = decoded.extra, {}
    if extra:
        extra = {name: value for name, value in extra.items() if reads_field(info.reads_fields, name)}
    if info.reads_headers:
        sent = exchange.headers
        headers = {name: sent[key].decode("latin-1") for name in info.reads_headers if (key := name.encode()) in sent}
    record, priority = exchange.record, exchange.priority(decoded.priority)
    return {
        "id": record.id,
        "principal": record.principal,
        "priority": priority,
        "extra": extra,
        "headers": headers,
    }


def _complete_request(
    app: BaseApp, exchange: HttpExchange, decoded: GenerationRequest, info: LeaseInfo
) -> GenerationRequest:
    """Fill unset parameters with the defaults of the model's configuration."""
    record = exchange.record
    if app.settings.telemetry.log_prompts:
        prompt = msgspec.json.encode(decoded.messages or decoded.prompts).decode()
        log.info("request %s: prompt %s", record.log_id, prompt, extra={"request_id": record.id})
    limit, sampling = decoded.max_tokens, decoded.sampling
    if info.sampling is not None:
        limit = info.sampling.max_tokens if limit is None else limit
        sampling = info.sampling.fill(sampling)
    delivery, fields = decoded.delivery, app.settings.reasoning_fields
    if delivery.reasoning_fields != fields:
        delivery = msgspec.structs.replace(delivery, reasoning_fields=fields)
    return msgspec.structs.replace(
        decoded,
        **http_fields(exchange, decoded, info),
        model=info.model,
        fingerprint=info.fingerprint,
        max_tokens=limit,
        sampling=sampling,
        delivery=delivery,
    )
