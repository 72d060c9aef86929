"""Decodes chat requests and parses chat streams for tests."""

import json
from typing import Any

from dragoman.core.events import Event
from dragoman.core.reply import Collection, Reply
from dragoman.core.request import GenerationRequest
from dragoman.protocols.registry import PROTOCOLS

CHAT = PROTOCOLS["chat"]
REQUEST = GenerationRequest(id="chatcmpl-1", model="m")
HEADER = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1700000000, "model": "m"}


def decode(**fields: Any) -> GenerationRequest:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}
    return CHAT.decode(json.dumps(body).encode())


def asked(request: GenerationRequest) -> set[tuple[str, str]]:
    return {(entry.feature, entry.param) for entry in request.asked} - {("chat", "messages")}


def frames(request: GenerationRequest, *batches: tuple[int, list[Event]]) -> list[Any]:
    encoder = CHAT.encoder(request, 1700000000)
    return parse(b"".join(encoder.feed(choice, events) for choice, events in batches) + encoder.end())


def parse(body: bytes) -> list[Any]:
    assert body.endswith(b"\n\n")
    lines = body.decode().removesuffix("\n\n").split("\n\n")
    assert all(line.startswith("data: ") for line in lines)
    return [line if line == "data: [DONE]" else json.loads(line.removeprefix("data: ")) for line in lines]


def collected(*batches: list[Event]) -> Reply:
    collection = Collection()
    for events in batches:
        collection.add(0, events)
    return collection.reply()


def chunk(delta: dict[str, Any], index: int = 0, logprobs: Any = None, finish: str | None = None) -> dict[str, Any]:
    return {**HEADER, "choices": [{"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}]}
