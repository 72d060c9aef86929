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
from typing import TYPE_CHECKING

import msgspec

from dragoman.config.models import SamplingDefaults
from dragoman.conversation import GenerationRequest
from dragoman.errors import DragomanError, EngineTimeout
from dragoman.events import Event, Finished, Started
from dragoman.generate import Take, cannot_honour, check_limits, generate
from dragoman.protocols import Encoder, Protocol, Telling
from dragoman.reply import Collection
from dragoman.server.engaging import Engaging, Wish
from dragoman.server.estimate import estimated
from dragoman.server.exchange import Exchange
from dragoman.telemetry.meter import Meter

if TYPE_CHECKING:
    from dragoman.server.door import Door


log = logging.getLogger("dragoman.prompts")
Settle = Callable[[], Awaitable[None]]


def new_id(prefix: str) -> str:
    """By its id a response is found again: nobody may guess it."""
    return prefix + os.urandom(12).hex()


async def answer(door: "Door", exchange: Exchange, protocol: Protocol) -> None:
    decoded = await exchange.decoded(door.settings.limits, protocol.decode)
    await reply_to(door, exchange, decoded, protocol)


async def reply_to(
    door: "Door", exchange: Exchange, decoded: GenerationRequest, telling: Telling, settle: Settle | None = None
) -> None:
    """Generate, and tell it. `settle` is called when the reply is complete, just before the caller hears so."""
    engagement = door.engagement(exchange)
    try:
        request = await _found(door, exchange, engagement, decoded)
        if request.delivery.stream:
            await _stream(door, exchange, engagement, request, telling.encoder(request, int(time.time())), settle)
            return
        collection = Collection()
        await _run(door, exchange, engagement, request, _collector(door, exchange, collection))
    finally:
        engagement.close()
    told = telling.encode_reply(request, int(time.time()), collection.reply())
    if settle is not None:
        await settle()
    await exchange.reply_json(told)


async def _found(
    door: "Door", exchange: Exchange, engagement: Engaging, decoded: GenerationRequest
) -> GenerationRequest:
    """The request as its model gets it."""
    record = exchange.record
    wish = Wish(decoded.model, decoded.asked, estimated(decoded, exchange.weight), door.is_strict(exchange))
    try:
        found = await engagement.find(wish)
    finally:
        record.model = engagement.model
    if found.ignored:
        exchange.ignore(found.ignored)
    request = msgspec.structs.replace(
        with_defaults(decoded, found.sampling), id=record.id, model=found.model, principal=record.principal
    )
    if door.settings.telemetry.log_prompts:
        asked = msgspec.json.encode(request.messages or request.prompts).decode()
        log.info("request %s asks: %s", record.id, asked, extra={"request_id": record.id})
    return request


def with_defaults(request: GenerationRequest, defaults: SamplingDefaults | None) -> GenerationRequest:
    """What the request leaves open, as the configuration of its model has it."""
    if defaults is None:
        return request
    most = defaults.max_tokens if request.max_tokens is None else request.max_tokens
    return msgspec.structs.replace(request, sampling=defaults.fill(request.sampling), max_tokens=most)


async def _run(door: "Door", exchange: Exchange, engagement: Engaging, request: GenerationRequest, take: Take) -> None:
    """The generation, from the moment the model is there and a slot is free."""
    limits, record = door.settings.limits, exchange.record
    try:
        check_limits(request, limits.choices, limits.stop_strings)
        # Only now may a silent stream begin with a comment: until here there was a status and a header to decide.
        exchange.streaming = request.delivery.stream
        exchange.meter = Meter(record, door.telemetry.metrics.of(request.model), exchange.started)
        engine = await engagement.start()
        record.queue_us = engagement.queue_us
        exchange.expect(limits.stall_seconds, silent_engine)
        await generate(engine, request, engagement.turns, take, exchange.note_running)
        begun = exchange.started + (record.first_event_us or 0) / 1e6
        engagement.note_speed(record.completion_tokens, exchange.heard - begun)
    finally:
        engagement.close()


def _collector(door: "Door", exchange: Exchange, collection: Collection) -> Take:
    def take(choice: int, events: Sequence[Event]) -> None:
        _note(door, exchange, choice, events)
        collection.add(choice, events)

    return take


async def _stream(
    door: "Door",
    exchange: Exchange,
    engagement: Engaging,
    request: GenerationRequest,
    encoder: Encoder,
    settle: Settle | None,
) -> None:
    failure: Exception | None
    try:
        await _run(door, exchange, engagement, request, _frame_writer(door, exchange, encoder))
        end = encoder.end()
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
    await exchange.end(encoder.fail(exchange.told(failure)))


def _frame_writer(door: "Door", exchange: Exchange, encoder: Encoder) -> Take:
    held = b""

    def take(choice: int, events: Sequence[Event]) -> Awaitable[None] | None:
        nonlocal held
        _note(door, exchange, choice, events)
        frames = encoder.feed(choice, events)
        if not exchange.begun and all(type(event) is Started for event in events):
            held += frames
            return None
        frames, held = held + frames, b""
        return None if not frames or exchange.write_now(frames) else exchange.write(frames)

    return take


def silent_engine(seconds: float) -> DragomanError:
    return EngineTimeout(f"the engine was silent for {seconds:g} s")


def _note(door: "Door", exchange: Exchange, choice: int, events: Sequence[Event]) -> None:
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
