"""The messages of a WebSocket of the Responses protocol: JSON objects as text.

    client := {"type": "response.create", "stream_id"?, "generate"?, the fields of a request}
            | {"type": "response.cancel", "stream_id"?, "response_id"?}
            | {"type": "response.steer", "previous_response_id", "input"}
    server := an event of a stream | error, each with the "stream_id" of its request
    error  := {"type": "error", "status", "error": {"message", "type", "param", "code", "headers"?}, "headers"?}

Rules
1. An event is the JSON of its frame. The event `error` of a failed response also gets the object `error`, which
   WebSocket clients read. It has no status: that belongs to requests which have no response.
2. `stream_id` names one of several streams of a connection. Without it, both sides leave it out.
3. `background` is refused. `stream` has no effect.
4. Clients look for the headers of an error at different places, so it has them twice.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from dragoman.core.errors import DECODE_ERRORS, BadRequest, InvalidStreamId, TooLarge, parse_validation_error
from dragoman.protocols import json_body
from dragoman.protocols.responses import server
from dragoman.protocols.responses.frames import FRAME_END

ENVELOPE = ("type", "stream_id", "generate")
"""Fields of `response.create` that are not those of a request."""
ERROR_FRAME = b"event: error\n"
DATA = b"\ndata: "
STREAM_ID = re.compile(r"[A-Za-z0-9_.-]{1,256}")
CLIENT_CODES = frozenset({"context_length_exceeded", "invalid_prompt"})
"""Codes of failed responses whose request was at fault."""


class ClientMessage(msgspec.Struct, frozen=True):
    """The fields of a message that decide what it is."""

    type: str
    stream_id: Any = None
    response_id: str | None = None


class SteerFields(msgspec.Struct, frozen=True):
    previous_response_id: str
    input: str | list[dict[str, Any]]


_decoder = msgspec.json.Decoder(ClientMessage)


def decode_message(message: bytes) -> ClientMessage:
    """Read a message without decoding the rest of it."""
    try:
        return _decoder.decode(message)
    except msgspec.ValidationError as error:
        path, reason = parse_validation_error(error)
        param = path.removeprefix(".") or None
        raise BadRequest(f"{param or 'the message'}: {reason}", param=param) from None
    except DECODE_ERRORS as error:
        raise BadRequest(f"the message is not valid JSON: {parse_validation_error(error)[1]}") from None


def read_stream_id(message: ClientMessage) -> str | None:
    stream_id = message.stream_id
    if stream_id is None:
        return None
    if not isinstance(stream_id, str) or STREAM_ID.fullmatch(stream_id) is None:
        reason = (
            "must be 1 to 256 letters, digits, underscores, hyphens or periods; leave it out for the default stream"
        )
        raise InvalidStreamId(f"stream_id: {reason}", param="stream_id")
    return stream_id


class CreateOptions(msgspec.Struct, frozen=True):
    generate: bool | None = None
    background: bool | None = None


def parse_create(message: bytes) -> server.ParsedRequest:
    """The request of a `response.create`."""
    parsed = json_body.parse(message)
    options = json_body.convert(parsed, CreateOptions)
    if options.background:
        raise BadRequest("background: not supported on a WebSocket; send POST /v1/responses", param="background")
    fields = {name: value for name, value in parsed.items() if name not in ENVELOPE}
    return server.read({**fields, "stream": True}, generates=options.generate is not False)


def split_frames(part: bytes) -> Iterator[bytes]:
    """The frames of a part of a stream. No frame is cut off."""
    return (frame for frame in part.split(FRAME_END) if frame)


def encode_event(frame: bytes, stream_id: str | None) -> str:
    event = frame.partition(DATA)[2]
    if frame.startswith(ERROR_FRAME):
        fields = msgspec.json.decode(event)
        kind = "invalid_request_error" if fields["code"] in CLIENT_CODES else "server_error"
        error = {"message": fields["message"], "type": kind, "param": fields["param"], "code": fields["code"]}
        event = msgspec.json.encode({**fields, "error": error})
    if stream_id is not None:
        event = b'%b,"stream_id":"%b"}' % (event[:-1], stream_id.encode())
    return event.decode()


def encode_error(
    status: int, error: Mapping[str, Any], headers: Mapping[str, str], stream_id: str | None = None
) -> str:
    """The event for a message that was refused; `error` is the object in the body of an HTTP error."""
    shown = {"headers": headers} if headers else {}
    stream = {} if stream_id is None else {"stream_id": stream_id}
    event = {"type": "error", "status": status, "error": {**error, **shown}, **shown, **stream}
    return msgspec.json.encode(event).decode()


def refuse_steering(message: bytes) -> str:
    """The answer to `response.steer`. It returns the input, so that the client can send it with the next request."""
    if len(message) > json_body.LARGE_BODY:
        raise TooLarge(f"the message is larger than {json_body.LARGE_BODY} bytes", param="input")
    fields = json_body.convert(json_body.parse(message), SteerFields)
    reason = "a running response cannot be steered; send the input with response.create when it has ended"
    event = {
        "type": "response.steer.failed",
        "sequence_number": 0,
        "error": {"type": "invalid_request_error", "code": "steering_not_supported", "message": reason},
        "steer": {"previous_response_id": fields.previous_response_id, "input": fields.input},
    }
    return msgspec.json.encode(event).decode()
