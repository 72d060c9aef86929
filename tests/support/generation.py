"""Runs a request without a server."""

from dragoman.core.engine import Engine
from dragoman.core.reply import Reply, ReplyBuilder
from dragoman.core.request import GenerationRequest
from dragoman.models.admission import Admission, Slots
from dragoman.pipeline.generate import generate


async def whole(engine: Engine, request: GenerationRequest, admission: Admission | None = None) -> Reply:
    slots = Slots(admission or Admission(None, 0, 1), "alice")
    await slots.acquire_first()
    builder = ReplyBuilder()
    try:
        await generate(engine, request, slots, builder.add)
    finally:
        slots.close()
    return builder.reply()
