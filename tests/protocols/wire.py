"""Decodes requests and encodes replies of every protocol, for tests."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dragoman.core.errors import BadRequest
from dragoman.core.events import Event
from dragoman.core.reply import Reply, ReplyBuilder
from dragoman.core.request import GenerationRequest
from dragoman.protocols.registry import PROTOCOLS, ReplyEncoding
from dragoman.protocols.responses import server as responses
from dragoman.protocols.responses.encoder import ResponseEncoding
from dragoman.protocols.wire_protocol import Encoder

RECORDED = Path(__file__).parents[1] / "data" / "clients"
PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions", "messages": "/v1/messages"}
PATHS |= {"responses": "/v1/responses", "embeddings": "/v1/embeddings"}
HI = {"role": "user", "content": "hi"}
SMALLEST: dict[str, dict[str, Any]] = {
    "chat": {"model": "m", "messages": [HI]},
    "completions": {"model": "m", "prompt": "hi"},
    "messages": {"model": "m", "max_tokens": 10, "messages": [HI]},
    "responses": {"input": "hello"},
}


def decode(protocol: str, **fields: Any) -> GenerationRequest:
    """Decode the smallest request with these fields."""
    return decode_body(protocol, json.dumps({**SMALLEST[protocol], **fields}).encode())


def decode_body(protocol: str, body: bytes) -> GenerationRequest:
    if protocol == "responses":
        return responses.decode(responses.parse(body)).request
    return PROTOCOLS[protocol].decode(body)


def decode_response(**fields: Any) -> responses.ResponseRequest:
    return responses.decode(responses.parse(json.dumps({**SMALLEST["responses"], **fields}).encode()))


def asked(request: GenerationRequest) -> list[tuple[str, str]]:
    """Return the requested features, except the one that every request of the protocol has."""
    return [(str(entry.feature), entry.param) for entry in request.asked[1:]]


def features(request: GenerationRequest) -> set[tuple[str, str]]:
    return set(asked(request))


def rejected_param(protocol: str, **fields: Any) -> str | None:
    """Return the field that the error names, and check that its message starts with it."""
    with pytest.raises(BadRequest) as raised:
        decode(protocol, **fields)
    assert raised.value.param is None or raised.value.message.startswith(raised.value.param.split("[")[0])
    return raised.value.param


def invalid(field: str, param: str, *values: Any) -> list[tuple[dict[str, Any], str]]:
    """Return the cases of one field: each value, and the path that the error names."""
    return [({field: value}, param) for value in values]


def encoding(protocol: str) -> ReplyEncoding:
    if protocol != "responses":
        return PROTOCOLS[protocol]
    return ResponseEncoding(responses.decode(responses.parse(b'{"input": "hello"}')).context, lambda: 0.0)


def encoder(protocol: str, request: GenerationRequest) -> Encoder:
    return encoding(protocol).encode_stream(request, 0)


def frames(protocol: str, request: GenerationRequest, *batches: tuple[int, list[Event]]) -> list[Any]:
    """Return the frames of an OpenAI stream; the last one is "[DONE]"."""
    stream_encoder = encoder(protocol, request)
    stream = b"".join(stream_encoder.feed(choice, events) for choice, events in batches) + stream_encoder.end()
    lines = stream.decode().removesuffix("\n\n").split("\n\n")
    assert all(line.startswith("data: ") for line in lines)
    return [*(json.loads(line.removeprefix("data: ")) for line in lines[:-1]), lines[-1].removeprefix("data: ")]


def encode_reply(protocol: str, request: GenerationRequest, reply: Reply) -> bytes:
    return msgspec.json.encode(encoding(protocol).encode_reply(request, 0, reply))


def collected(*batches: list[Event]) -> Reply:
    builder = ReplyBuilder()
    for events in batches:
        builder.add(0, events)
    return builder.reply()


def recordings(protocol: str) -> dict[str, dict[str, Any]]:
    """Return the bodies of the recorded requests of real clients by name."""
    found = {file.stem: json.loads(file.read_text()) for file in sorted(RECORDED.glob("*.json"))}
    return {
        name: entry["body"]
        for name, entry in found.items()
        if entry["method"] == "POST" and entry["path"].partition("?")[0] == PATHS[protocol]
    }
