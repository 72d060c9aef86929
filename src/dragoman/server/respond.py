"""From a generation's events to JSON or to a stream of frames.

Rules
1. The status goes out with the first event that says something, so that what fails before has a status of its own;
   after a long silence a stream begins without waiting for it.
2. A failure after that is the protocol's error frame, and the stream ends without its normal end.
3. Whatever is ready leaves in one write.
"""

import asyncio
import os
import re
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING

import msgspec

from dragoman.conversation import GenerationRequest
from dragoman.errors import DragomanError, EngineTimeout
from dragoman.events import Event, Finished, Started
from dragoman.generate import check, check_limits, generate
from dragoman.protocols import Protocol
from dragoman.reply import Batch, Collector
from dragoman.server.exchange import Exchange

if TYPE_CHECKING:
    from dragoman.server.app import App

LARGE_BODY = 256 * 1024
"""Bodies above this many bytes are decoded in a thread: meanwhile others stream."""

LONGEST_LIST = 1000
"""Characters of a header that lists names."""


def new_id(prefix: str) -> str:
    return prefix + os.urandom(12).hex()


async def answer(app: "App", exchange: Exchange, protocol: Protocol) -> None:
    body = await exchange.body(app.settings.limits)
    decoded = await asyncio.to_thread(protocol.decode, body) if len(body) > LARGE_BODY else protocol.decode(body)
    await _generate(app, exchange, protocol, decoded)


async def _generate(app: "App", exchange: Exchange, protocol: Protocol, decoded: GenerationRequest) -> None:
    record, limits = exchange.record, app.settings.limits
    model = app.catalog.resolve(decoded.model)
    record.model = model.name
    request = msgspec.structs.replace(decoded, id=record.id, model=model.name, principal=record.principal)
    check_limits(request, limits.choices, limits.stop_strings)
    engine = await model.host.ready()
    ignored = check(request, model.host.supports, app.is_strict(exchange))
    if ignored:
        exchange.extra_headers.append((b"x-dragoman-ignored", _listed(ignored)))
    admission = model.host.admission
    await admission.enter(record.principal)
    try:
        exchange.expect(limits.stall_seconds, _silent_engine)
        async with aclosing(generate(engine, request)) as batches:
            respond = _stream if request.delivery.stream else _whole
            await respond(exchange, protocol, request, batches)
    finally:
        admission.leave()


def _silent_engine(seconds: float) -> DragomanError:
    return EngineTimeout(f"the engine was silent for {seconds:g} s")


def _listed(params: Sequence[str]) -> bytes:
    """Names as the value of a header. A caller may have called a field anything, so that it needs care."""
    names = ", ".join(params)
    shown = names if len(names) <= LONGEST_LIST else names[:LONGEST_LIST] + "..."
    return re.sub(rb"[^ -~]", b"?", shown.encode("ascii", "replace"))


async def _whole(
    exchange: Exchange, protocol: Protocol, request: GenerationRequest, batches: AsyncGenerator[Batch, None]
) -> None:
    collector = Collector()
    async for choice, events in batches:
        _note(exchange, events)
        collector.add(choice, events)
    await exchange.reply_json(protocol.encode_reply(request, int(time.time()), collector.reply()))


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


async def _stream(
    exchange: Exchange, protocol: Protocol, request: GenerationRequest, batches: AsyncGenerator[Batch, None]
) -> None:
    encoder = protocol.encoder(request, int(time.time()))
    exchange.streaming = True
    held = b""
    try:
        async for choice, events in batches:
            _note(exchange, events)
            frames = encoder.feed(choice, events)
            if not exchange.begun and all(type(event) is Started for event in events):
                held += frames
                continue
            frames, held = held + frames, b""
            if frames and not exchange.write_now(frames):
                await exchange.write(frames)
    except (Exception, asyncio.CancelledError) as error:
        failure = exchange.why_cancelled() if isinstance(error, asyncio.CancelledError) else error
        if failure is None or not exchange.begun:
            raise
        await exchange.end(encoder.fail(exchange.told(failure)))
        return
    await exchange.end(encoder.end())
