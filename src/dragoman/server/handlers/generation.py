"""From a generation's events to JSON or to a stream of frames.

Rules
1. The status goes out with the first event that says something, so that what fails before has a status of its own;
   after a long silence, in the queue too, a stream begins without waiting for it.
2. A failure after that is the protocol's error frame, and the stream ends without its normal end.
3. Whatever is ready leaves in one write.
4. Where a model cannot answer, the first that may stand in for it does. Once an engine has said something nobody
   stands in for it. Where nobody can, the caller hears why the model that was asked for does not answer.
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
from dragoman.pipeline.generate import Take, cannot_honour, check_limits, generate
from dragoman.protocols.registry import Encoder, Protocol, Telling
from dragoman.server.auth.token_estimate import Estimate, estimated, estimated_prompt
from dragoman.server.base_app import Door
from dragoman.server.http_exchange import Exchange
from dragoman.server.model_lease import Engaging, Wish
from dragoman.server.telemetry.meter import Meter

log = logging.getLogger("dragoman.prompts")
log_run = logging.getLogger("dragoman.server")
Settle = Callable[[], Awaitable[None]]
Begin = Callable[[GenerationRequest], Take]
"""Gets ready to tell the reply to a request, which names the model that is asked for it."""
OF_THE_MODEL = frozenset({429, 500, 502, 503, 504})
"""Statuses of errors that another model may not have."""


async def answer(door: Door, exchange: Exchange, protocol: Protocol) -> None:
    decoded = await exchange.decoded(door.settings.limits, protocol.decode)
    await reply_to(door, exchange, decoded, protocol)


async def reply_to(
    door: Door, exchange: Exchange, decoded: GenerationRequest, telling: Telling, settle: Settle | None = None
) -> None:
    """Generate, and tell it. `settle` is called when the reply is complete, just before the caller hears so."""
    if decoded.delivery.stream:
        await _stream(door, exchange, decoded, telling, settle)
        return
    collection = Collection()
    request = await _run(door, exchange, decoded, lambda request: _collector(door, exchange, collection))
    told = telling.encode_reply(request, int(time.time()), collection.reply())
    if settle is not None:
        await settle()
    await exchange.reply_json(told)


def with_defaults(request: GenerationRequest, defaults: SamplingDefaults | None) -> GenerationRequest:
    """What the request leaves open, as the configuration of its model has it."""
    if defaults is None:
        return request
    most = defaults.max_tokens if request.max_tokens is None else request.max_tokens
    return msgspec.structs.replace(request, sampling=defaults.fill(request.sampling), max_tokens=most)


async def _run(door: Door, exchange: Exchange, decoded: GenerationRequest, begin: Begin) -> GenerationRequest:
    """The generation, by the model or by one that stands in for it; the request as that one got it."""
    engagement, record = door.engagement(exchange), exchange.record
    estimate = None if exchange.lease is None else estimated(decoded, exchange.weight)
    try:
        return await _run_by(door, exchange, engagement, decoded, begin, estimate)
    except DragomanError as error:
        if not engagement.fallbacks or record.first_event_us is not None or error.status not in OF_THE_MODEL:
            raise
        failure = error
    for name in engagement.fallbacks:
        words = "request %s: model %s cannot answer (%s); %s is asked"
        log_run.warning(words, record.id, engagement.label, failure.message, name, extra={"request_id": record.id})
        exchange.begin_again()
        asked = msgspec.structs.replace(decoded, model=name)
        try:
            return await _run_by(door, exchange, door.engagement(exchange), asked, begin, None)
        except DragomanError as error:
            if record.first_event_us is not None:
                raise
            if error.status not in OF_THE_MODEL:
                break
    record.model = engagement.label
    raise failure


async def _run_by(
    door: Door,
    exchange: Exchange,
    engagement: Engaging,
    decoded: GenerationRequest,
    begin: Begin,
    estimate: Estimate | None,
) -> GenerationRequest:
    """The generation, from the moment the model is there and a slot is free."""
    limits, record = door.settings.limits, exchange.record
    try:
        request = await _found(door, exchange, engagement, decoded, estimate)
        check_limits(request, limits.choices, limits.stop_strings)
        take = begin(request)
        # Only now may a silent stream begin with a comment: until here there was a status and a header to decide.
        exchange.streaming = request.delivery.stream
        metrics = door.telemetry.metrics.of(engagement.label or request.model)
        exchange.meter = Meter(record, metrics, exchange.started, partial(estimated_prompt, request, exchange.weight))
        engine = await engagement.start()
        record.queue_us = engagement.queue_us
        exchange.expect(limits.stall_seconds, silent_engine)
        await generate(engine, request, engagement.turns, take, exchange.note_running)
        begun = exchange.started + (record.first_event_us or 0) / 1e6
        engagement.note_speed(record.completion_tokens, exchange.heard - begun)
        return request
    finally:
        engagement.close()


async def _found(
    door: Door, exchange: Exchange, engagement: Engaging, decoded: GenerationRequest, estimate: Estimate | None
) -> GenerationRequest:
    """The request as its model gets it."""
    record = exchange.record
    try:
        found = await engagement.find(Wish(decoded.model, decoded.asked, estimate, door.is_strict(exchange)))
    finally:
        record.model = engagement.label
    if found.ignored:
        exchange.ignore(found.ignored)
    if door.settings.telemetry.log_prompts:
        asked = msgspec.json.encode(decoded.messages or decoded.prompts).decode()
        log.info("request %s asks: %s", record.id, asked, extra={"request_id": record.id})
    filled = with_defaults(decoded, found.sampling)
    return msgspec.structs.replace(filled, id=record.id, model=found.model, principal=record.principal)


def _collector(door: Door, exchange: Exchange, collection: Collection) -> Take:
    def take(choice: int, events: Sequence[Event]) -> None:
        _note(door, exchange, choice, events)
        collection.add(choice, events)

    return take


async def _stream(
    door: Door, exchange: Exchange, decoded: GenerationRequest, telling: Telling, settle: Settle | None
) -> None:
    frames = _Frames(door, exchange, telling)
    failure: Exception | None
    try:
        await _run(door, exchange, decoded, frames.begin)
        end = frames.encoder.end()
        if settle is not None:
            await settle()
    except asyncio.CancelledError:
        failure = exchange.take_cancellation()
        if failure is None:
            raise
    except Exception as error:
        failure = error
        if not exchange.begun:
            raise
    else:
        await exchange.end(end)
        return
    if not exchange.begun:
        raise failure
    await exchange.end(frames.encoder.fail(exchange.told(failure)))


class _Frames:
    """The frames of a stream on their way out. Each model that is asked has an encoder of its own."""

    encoder: Encoder

    def __init__(self, door: Door, exchange: Exchange, telling: Telling) -> None:
        self._door = door
        self._exchange = exchange
        self._telling = telling
        self._held = b""

    def begin(self, request: GenerationRequest) -> Take:
        self.encoder = self._telling.encoder(request, int(time.time()))
        return self._take

    def _take(self, choice: int, events: Sequence[Event]) -> Awaitable[None] | None:
        exchange = self._exchange
        _note(self._door, exchange, choice, events)
        frames = self.encoder.feed(choice, events)
        if not exchange.begun and all(type(event) is Started for event in events):
            self._held += frames
            return None
        if self._held:
            frames, self._held = self._held + frames, b""
        return None if not frames or exchange.write_now(frames) else exchange.write(frames)


def silent_engine(seconds: float) -> DragomanError:
    return EngineTimeout(f"the engine was silent for {seconds:g} s")


def _note(door: Door, exchange: Exchange, choice: int, events: Sequence[Event]) -> None:
    exchange.note_progress()
    assert exchange.meter is not None
    exchange.meter.note(choice, events, exchange.heard)
    first, last = events[0], events[-1]
    if type(first) is Started and first.ignored:
        if door.is_strict(exchange):
            raise cannot_honour(exchange.record.model or "", first.ignored[0])
        exchange.ignore(first.ignored)
    if type(last) is Finished:
        for words in last.warnings:
            exchange.warn(words)
