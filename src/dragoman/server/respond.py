"""From a generation's events to JSON or to a stream of frames.

Rules
1. The status goes out with the first event that says something, so that what fails before has a status of its own;
   after a long silence, in the queue too, a stream begins without waiting for it.
2. A failure after that is the protocol's error frame, and the stream ends without its normal end.
3. Whatever is ready leaves in one write.
"""

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from dragoman.admission import Slots
from dragoman.catalog import Host, Model
from dragoman.config.models import NO_DEFAULTS, SamplingDefaults
from dragoman.conversation import GenerationRequest
from dragoman.errors import DragomanError, EngineTimeout
from dragoman.events import Event, Finished, Started
from dragoman.generate import Take, cannot_honour, check, check_limits, generate
from dragoman.protocols import Encoder, Protocol, Telling
from dragoman.reply import Collection
from dragoman.server.estimate import estimated, estimated_prompt
from dragoman.server.exchange import Exchange
from dragoman.telemetry.meter import Meter

if TYPE_CHECKING:
    from dragoman.server.app import App


log = logging.getLogger("dragoman.prompts")
log_run = logging.getLogger("dragoman.server")
Settle = Callable[[], Awaitable[None]]
Begin = Callable[[GenerationRequest], Take]
"""Gets ready to tell the reply to a request, which names the model that is asked for it."""
OF_THE_MODEL = frozenset({429, 500, 502, 503, 504})
"""Statuses of errors that another model may not have."""


ID_BYTES = 12
_drawn: list[str] = []
"""Ids that nobody has yet: to ask the system for chance costs about the same for one and for many."""
# A process that is copied must not hand out the ids of the other.
os.register_at_fork(after_in_child=_drawn.clear)


def new_id(prefix: str) -> str:
    """By its id a response is found again: nobody may guess it."""
    if not _drawn:
        chance = os.urandom(64 * ID_BYTES)
        _drawn.extend(chance[at : at + ID_BYTES].hex() for at in range(0, len(chance), ID_BYTES))
    return prefix + _drawn.pop()


async def answer(app: "App", exchange: Exchange, protocol: Protocol) -> None:
    decoded = await exchange.decoded(app.settings.limits, protocol.decode)
    await reply_to(app, exchange, decoded, protocol)


async def reply_to(
    app: "App", exchange: Exchange, decoded: GenerationRequest, telling: Telling, settle: Settle | None = None
) -> None:
    """Generate, and tell it. `settle` is called when the reply is complete, just before the caller hears so."""
    model = await app.model(exchange, decoded.model)
    record = exchange.record
    if exchange.lease is not None:
        exchange.lease.reserve(estimated(asked_of(model, decoded, exchange), exchange.weight))
    if app.settings.telemetry.log_prompts:
        asked = msgspec.json.encode(decoded.messages or decoded.prompts).decode()
        log.info("request %s asks: %s", record.id, asked, extra={"request_id": record.id})
    if decoded.delivery.stream:
        await _stream(app, exchange, model, decoded, telling, settle)
        return
    collection = Collection()
    request = await _run(app, exchange, model, decoded, lambda request: _collector(app, exchange, collection))
    told = telling.encode_reply(request, int(time.time()), collection.reply())
    if settle is not None:
        await settle()
    await exchange.reply_json(told)


def with_defaults(request: GenerationRequest, defaults: SamplingDefaults) -> GenerationRequest:
    """What the request leaves open, as the configuration of its model has it."""
    if defaults is NO_DEFAULTS:
        return request
    most = defaults.max_tokens if request.max_tokens is None else request.max_tokens
    return msgspec.structs.replace(request, sampling=defaults.fill(request.sampling), max_tokens=most)


def asked_of(model: Model, decoded: GenerationRequest, exchange: Exchange) -> GenerationRequest:
    """The request as this model gets it."""
    record, filled = exchange.record, with_defaults(decoded, model.sampling)
    return msgspec.structs.replace(filled, id=record.id, model=model.name, principal=record.principal)


async def _run(
    app: "App", exchange: Exchange, model: Model, decoded: GenerationRequest, begin: Begin
) -> GenerationRequest:
    """The generation, by the model or by the first that may stand in for it; the request as that one got it.

    Once an engine has said something nobody stands in for it. Where nobody can, the caller hears why the model that was
    asked for does not answer.
    """
    failure: DragomanError | None = None
    for chosen in (model, *app.fallbacks(exchange, model)):
        request = asked_of(chosen, decoded, exchange)
        if failure is not None:
            words = "request %s: model %s cannot answer (%s); %s is asked"
            log_run.warning(words, request.id, model.name, failure.message, chosen.name)
            exchange.begin_again()
        exchange.record.model = chosen.label
        try:
            await _run_by(app, exchange, chosen, request, begin(request))
        except DragomanError as error:
            if exchange.record.first_event_us is not None:
                raise
            failure = failure or error
            if error.status not in OF_THE_MODEL:
                break
        else:
            return request
    exchange.record.model = model.label
    assert failure is not None
    raise failure


async def _run_by(app: "App", exchange: Exchange, model: Model, request: GenerationRequest, take: Take) -> None:
    """The generation, from the moment the model is there and a slot is free."""
    host, limits = model.host, app.settings.limits
    check_limits(request, limits.choices, limits.stop_strings)
    # What a model supports is known from when it was first loaded.
    engine = None if host.is_known else await host.enter()
    slots = Slots(host.admission, request.principal)
    try:
        ignored = check(request, host.supports, app.is_strict(exchange))
        if ignored:
            exchange.ignore(ignored)
        # Only now may a silent stream begin with a comment: until here there was a status and a header to decide.
        exchange.streaming = request.delivery.stream
        estimate = partial(estimated_prompt, request, exchange.weight)
        exchange.meter = Meter(exchange.record, app.telemetry.metrics.of(model.label), exchange.started, estimate)
        if slots.take_first():
            exchange.record.queue_us = 0
        else:
            await _queue(slots, exchange)
        # Who waits for a slot does not keep the model from being swapped; who has one does.
        engine = engine or host.enter_now() or await host.enter()
        exchange.expect(limits.stall_seconds, silent_engine)
        await generate(engine, request, slots, take, exchange.note_running)
        _note_speed(host, exchange)
    finally:
        slots.close()
        if engine is not None:
            host.leave()


async def _queue(slots: Slots, exchange: Exchange) -> None:
    begun = time.monotonic()
    await slots.first()
    exchange.record.queue_us = int((time.monotonic() - begun) * 1e6)


def _note_speed(host: Host, exchange: Exchange) -> None:
    record = exchange.record
    begun = exchange.started + (record.first_event_us or 0) / 1e6
    host.note_speed(record.completion_tokens, exchange.heard - begun)


def _collector(app: "App", exchange: Exchange, collection: Collection) -> Take:
    def take(choice: int, events: Sequence[Event]) -> None:
        _note(app, exchange, choice, events)
        collection.add(choice, events)

    return take


async def _stream(
    app: "App", exchange: Exchange, model: Model, decoded: GenerationRequest, telling: Telling, settle: Settle | None
) -> None:
    frames = _Frames(app, exchange, telling)
    failure: Exception | None
    try:
        await _run(app, exchange, model, decoded, frames.begin)
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

    def __init__(self, app: "App", exchange: Exchange, telling: Telling) -> None:
        self._app = app
        self._exchange = exchange
        self._telling = telling
        self._held = b""

    def begin(self, request: GenerationRequest) -> Take:
        self.encoder = self._telling.encoder(request, int(time.time()))
        return self._take

    def _take(self, choice: int, events: Sequence[Event]) -> Awaitable[None] | None:
        exchange = self._exchange
        _note(self._app, exchange, choice, events)
        frames = self.encoder.feed(choice, events)
        if not exchange.begun and all(type(event) is Started for event in events):
            self._held += frames
            return None
        if self._held:
            frames, self._held = self._held + frames, b""
        return None if not frames or exchange.write_now(frames) else exchange.write(frames)


def silent_engine(seconds: float) -> DragomanError:
    return EngineTimeout(f"the engine was silent for {seconds:g} s")


def _note(app: "App", exchange: Exchange, choice: int, events: Sequence[Event]) -> None:
    exchange.note_progress()
    assert exchange.meter is not None
    exchange.meter.note(choice, events, exchange.heard)
    first, last = events[0], events[-1]
    if type(first) is Started and first.ignored:
        if app.is_strict(exchange):
            raise cannot_honour(exchange.record.model or "", first.ignored[0])
        exchange.ignore(first.ignored)
    if type(last) is Finished:
        for words in last.warnings:
            exchange.warn(words)
