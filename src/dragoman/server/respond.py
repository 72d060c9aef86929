"""From a generation's events to JSON or to a stream of frames.

Rules
1. The status goes out with the first event that says something, so that what fails before has a status of its own;
   after a long silence, in the queue too, a stream begins without waiting for it.
2. A failure after that is the protocol's error frame, and the stream ends without its normal end.
3. Whatever is ready leaves in one write.
"""

import asyncio
import os
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from dragoman.catalog import Model
from dragoman.conversation import GenerationRequest
from dragoman.errors import DragomanError, EngineTimeout
from dragoman.events import Event, Finished, Started
from dragoman.generate import check, check_limits, generate
from dragoman.protocols import Encoder, Protocol
from dragoman.reply import Batch, Collector
from dragoman.server.exchange import Exchange

if TYPE_CHECKING:
    from dragoman.server.app import App

LARGE_BODY = 256 * 1024
"""Bodies above this many bytes are decoded in a thread: meanwhile others stream."""

LONGEST_LIST = 1000
"""Characters of a header that lists names."""


Respond = Callable[[Exchange, GenerationRequest, AsyncIterator[Batch]], Awaitable[None]]
"""Sends the reply that the batches make."""


def new_id(prefix: str) -> str:
    return prefix + os.urandom(12).hex()


async def answer(app: "App", exchange: Exchange, protocol: Protocol) -> None:
    body = await exchange.body(app.settings.limits)
    decoded = await asyncio.to_thread(protocol.decode, body) if len(body) > LARGE_BODY else protocol.decode(body)
    model = app.catalog.resolve(decoded.model)
    record = exchange.record
    record.model = model.name
    request = msgspec.structs.replace(decoded, id=record.id, model=model.name, principal=record.principal)
    if not request.delivery.stream:
        await _generate(app, exchange, model, request, partial(_whole, protocol=protocol))
        return
    exchange.streaming = True
    encoder = protocol.encoder(request, int(time.time()))
    try:
        await _generate(app, exchange, model, request, partial(_stream, encoder=encoder))
    except (Exception, asyncio.CancelledError) as error:
        failure = exchange.why_cancelled() if isinstance(error, asyncio.CancelledError) else error
        if failure is None:
            raise
        if not exchange.begun:
            raise failure from None
        await exchange.end(encoder.fail(exchange.told(failure)))


async def _generate(app: "App", exchange: Exchange, model: Model, request: GenerationRequest, respond: Respond) -> None:
    host, limits = model.host, app.settings.limits
    check_limits(request, limits.choices, limits.stop_strings)
    engine = await host.ready()
    ignored = check(request, host.supports, app.is_strict(exchange))
    if ignored:
        exchange.extra_headers.append((b"x-dragoman-ignored", _listed(ignored)))
    await host.admission.enter(request.principal)
    try:
        exchange.expect(limits.stall_seconds, _silent_engine)
        async with aclosing(generate(engine, request)) as batches:
            await respond(exchange, request, batches)
    finally:
        host.admission.leave()


def _silent_engine(seconds: float) -> DragomanError:
    return EngineTimeout(f"the engine was silent for {seconds:g} s")


def _listed(params: Sequence[str]) -> bytes:
    """Names as the value of a header. A caller may have called a field anything, so that it needs care."""
    names = ", ".join(params)
    shown = names if len(names) <= LONGEST_LIST else names[:LONGEST_LIST] + "..."
    return re.sub(rb"[^ -~]", b"?", shown.encode("ascii", "replace"))


async def _whole(
    exchange: Exchange, request: GenerationRequest, batches: AsyncIterator[Batch], protocol: Protocol
) -> None:
    collector = Collector()
    async for choice, events in batches:
        _note(exchange, events)
        collector.add(choice, events)
    await exchange.reply_json(protocol.encode_reply(request, int(time.time()), collector.reply()))


async def _stream(
    exchange: Exchange, request: GenerationRequest, batches: AsyncIterator[Batch], encoder: Encoder
) -> None:
    held = b""
    async for choice, events in batches:
        _note(exchange, events)
        frames = encoder.feed(choice, events)
        if not exchange.begun and all(type(event) is Started for event in events):
            held += frames
            continue
        frames, held = held + frames, b""
        if frames and not exchange.write_now(frames):
            await exchange.write(frames)
    await exchange.end(encoder.end())


def _note(exchange: Exchange, events: Sequence[Event]) -> None:
    exchange.note_progress()
    record = exchange.record
    if record.first_event_us is None:
        record.first_event_us = int((exchange.heard - exchange.started) * 1e6)
    last = events[-1]
    if type(last) is Finished:
        record.finish = last.reason
        if last.usage is not None:
            record.count(last.usage)
