"""Target `websocket`: messages and raw frames on the WebSocket of `/v1/responses`.

    known    messages, also ones that cannot be used, in fragments, with control frames between them, and a close frame
             when all are answered: each message has one end, each ping one pong
    wrong    the same, then a violation of the protocol: the close frame has its code
    damaged  the same with bytes changed: whatever comes back must be whole frames with valid events

After the handshake the server sends only whole frames. The events of each stream are those of the responses of HTTP.
"""

from collections.abc import Iterator
from random import Random
from typing import Any, NamedTuple

import msgspec

from tools.fuzz import bodies, values
from tools.fuzz.cases import SocketCase, random_for
from tools.fuzz.client import Malformed, Reply, read_replies
from tools.fuzz.servers import BODY_BYTES, KEYS
from tools.fuzz.shapes import Wrong, check_error
from tools.fuzz.streams import check_stream
from tools.websocket import BINARY, CLOSE, CONTINUATION, HANDSHAKE, PING, PONG, TEXT, fragmented, frame, read_frame

HEAD = b"\r\n".join(
    (b"GET /v1/responses HTTP/1.1", b"host: 127.0.0.1", b"authorization: Bearer " + KEYS[0].encode(), HANDSHAKE)
)
HANDSHAKE_BYTES = HEAD + b"\r\n\r\n"
MODELS = ("echo", "poet", "caller", "harmony", "xml", "short", "missing", "failing", "failing-at-once", "slow")
STREAM_IDS = ("a", "b.2", "c-3_", "", "x y", 5, "z" * 300)
ODD_MESSAGES: tuple[bytes, ...] = (
    *(b"", b"null", b"[]", b"{}", b"{", b'{"type": 1}', b'{"type": "response.delete"}', b'"\xf0\x9f\x98\x80"'),
    *(b'{"type": "response.steer"}', b'{"type": "response.steer", "previous_response_id": "resp_x", "input": "stop"}'),
    *(b'{"type": "response.create"}', b'{"type": "response.create", "input": "x", "background": true}'),
    *(b'{"type": "response.create", "input": "x", "previous_response_id": "resp_x"}', b"[" * 5000, b"1e999"),
    *(
        b'{"type": "response.create", "type": "response.create", "input": "x"}',
        b'{"type": "response.create", "input": 5}',
    ),
)
CANCEL = b'{"type": "response.cancel"}'
WRONG: tuple[tuple[bytes, int], ...] = (
    *((frame(TEXT, b"{}", mask=None), 1002), (frame(TEXT, b"{}", rsv=4), 1002), (frame(TEXT, b"{}", rsv=1), 1002)),
    *((frame(3, b"x"), 1002), (frame(15), 1002), (frame(CONTINUATION, b"x"), 1002), (frame(PING, fin=False), 1002)),
    *((frame(PONG, b"a" * 126), 1002), (frame(TEXT, b"{", fin=False) + frame(BINARY, b"}"), 1002)),
    *((frame(CLOSE, b"\x03"), 1002), (frame(CLOSE, b"\x03\xee"), 1002), (frame(CLOSE, b"\x03\xe8\xff"), 1007)),
    *((frame(TEXT, b"\xff"), 1007), (frame(TEXT, b"\xed\xa0\x80"), 1007), (frame(TEXT, b"\xe2\x82"), 1007)),
    *((b"\x81\xfe\x00\x01mask", 1002), (b"\x81\xff" + b"\xff" * 8 + b"mask", 1002)),
    *((frame(TEXT, b"a" * (BODY_BYTES + 1)), 1009), (frame(BINARY, b"a" * (BODY_BYTES + 1)), 1009)),
    *((b"\x81\xff\x7f" + b"\xff" * 7 + b"mask" + b"a" * (BODY_BYTES + 1), 1009),),
    *((b"".join(fragmented(b"a" * (BODY_BYTES + 1), 60_000)), 1009), (frame(PING) * 5100, 1008)),
    *((frame(TEXT, fin=False) + frame(CONTINUATION, fin=False) * 5100, 1008), (b"GET / HTTP/1.1\r\n\r\n", 1002)),
)
STATUSES = frozenset({400, 401, 404, 413, 429, 500, 501, 503})
"""Of error events. 500: the model fails on purpose."""
REFUSALS = frozenset({400, 401, 403, 404, 405, 408, 426, 431, 501})
"""Of a handshake with bytes changed."""
CODES = frozenset({1000, 1001, 1002, 1005, 1007, 1008, 1009, 1011})
LAST_EVENTS = ("response.completed", "response.incomplete", "response.failed", "response.steer.failed")


class Session(NamedTuple):
    """Frames of a client, and what they are answered with."""

    frames: list[bytes]
    answers: int
    pongs: int


def _message(random: Random) -> tuple[bytes, int]:
    """A message, and how many ends its answer has."""
    kind = random.random()
    if kind < 0.2:
        return random.choice(ODD_MESSAGES), 1
    if kind < 0.3:
        return CANCEL, 0
    body: dict[str, Any] = {"type": "response.create", "model": random.choice(MODELS), **bodies.response(random)}
    bodies.maybe(
        random,
        body,
        0.15,
        generate=lambda: random.random() < 0.5,
        stream_id=lambda: random.choice(STREAM_IDS),
        store=lambda: False,
    )
    if random.random() < 0.15:
        values.mutate(random, body, 1)
        # What is no object, or has another type, gets an error too.
        body["type"] = "response.create"
    message = values.encoded(body)
    return (message if len(message) < BODY_BYTES and _is_text(message) else b"{}"), 1


def _is_text(message: bytes) -> bool:
    try:
        message.decode()
    except UnicodeDecodeError:
        return False
    return True


def _session(random: Random) -> Session:
    frames, answers, pongs = [], 0, 0
    for _ in range(random.choice((1, 1, 2, 4))):
        message, ends = _message(random)
        answers += ends
        opcode = BINARY if ends and random.random() < 0.05 else TEXT
        size = random.choice((len(message) + 1, 1000, 50 if len(message) < 10_000 else 1000))
        for fragment in fragmented(message, size, opcode):
            if random.random() < 0.2:
                frames.append(frame(PING, random.randbytes(random.choice((0, 4, 125)))))
                pongs += 1
            if random.random() < 0.1:
                frames.append(frame(PONG, b"x"))
            frames.append(fragment)
    return Session(frames, answers, pongs)


def _pieces(random: Random, data: bytes) -> tuple[bytes, ...]:
    if random.random() < 0.5 or len(data) < 2:
        return (data,)
    cuts = sorted(random.randrange(1, len(data)) for _ in range(random.choice((1, 3, 8))))
    return tuple(data[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(data)], strict=True))


def case(engine: str, seed: str, number: int) -> SocketCase:
    random = random_for("websocket", seed, number)
    kind, session = random.random(), _session(random)
    pause = 0.001 if random.random() < 0.3 else 0.0
    data = HANDSHAKE_BYTES + b"".join(session.frames)
    if kind < 0.5:
        return SocketCase(_pieces(random, data), session.answers, session.pongs, frozenset({1000}), pause)
    if kind < 0.7:
        violation, code = random.choice(WRONG)
        return SocketCase(_pieces(random, data + violation), None, None, frozenset({code}), pause)
    if kind < 0.9:
        end = len(HANDSHAKE_BYTES)
        damaged = HANDSHAKE_BYTES + values.damage(random, data[end:])
    else:
        damaged = values.damage(random, data)
    return SocketCase(_pieces(random, damaged), None, None, None, pause, leave=random.random() < 0.2)


class Received(NamedTuple):
    """What a server has sent: an HTTP response, or the 101 and frames."""

    refusals: list[Reply]
    is_open: bool
    events: list[dict[str, Any]]
    pongs: int
    code: int | None
    """Of the close frame; 1005 for one without a code."""
    rest: bytes

    @property
    def answers(self) -> int:
        return sum(_is_last(event) for event in self.events)


def _is_last(event: dict[str, Any]) -> bool:
    return event["type"] in LAST_EVENTS or (event["type"] == "error" and "status" in event)


def read_received(data: bytes) -> Received:
    if not data.startswith(b"HTTP/1.1 101 "):
        refusals, rest = read_replies(data)
        return Received(refusals, False, [], 0, None, rest)
    at = data.find(b"\r\n\r\n") + 4
    if at < 4:
        return Received([], False, [], 0, None, data)
    events: list[dict[str, Any]] = []
    pongs, code = 0, None
    for opcode, payload, end in _frames(data, at):
        at = end
        if code is not None:
            raise Malformed(f"a frame after the close frame: {payload[:100]!r}")
        if opcode == TEXT:
            events.append(_read_event(payload))
        elif opcode == CLOSE:
            code = int.from_bytes(payload[:2]) if payload else 1005
        elif opcode == PONG:
            pongs += 1
        elif opcode != PING:
            raise Malformed(f"a frame of the kind {opcode}: {payload[:100]!r}")
    return Received([], True, events, pongs, code, data[at:])


def _frames(data: bytes, at: int) -> Iterator[tuple[int, bytes, int]]:
    try:
        while (found := read_frame(data, at)) is not None:
            yield found
            at = found[2]
    except ValueError as error:
        raise Malformed(str(error)) from error


def _read_event(payload: bytes) -> dict[str, Any]:
    try:
        event = msgspec.json.decode(payload, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise Malformed(f"not an event: {error}: {payload[:200]!r}") from error
    if not isinstance(event.get("type"), str):
        raise Malformed(f"an event without a type: {payload[:200]!r}")
    return event


def check_socket(case: SocketCase, received: Received) -> None:
    """Raise Wrong if this is not what the case may get. The connection has ended."""
    if not received.is_open:
        if case.codes is not None:
            raise Wrong(f"no WebSocket: {[reply.status for reply in received.refusals]} {received.rest[:200]!r}")
        for reply in received.refusals:
            if reply.status not in REFUSALS:
                raise Wrong(f"a handshake gets {reply.status}: {reply.body[:200]!r}")
        return
    if received.rest:
        raise Wrong(f"an incomplete frame: {received.rest[:100]!r}")
    _check_events(received.events, has_ended=case.answers is not None)
    codes = CODES if case.codes is None else case.codes
    if received.code not in codes and (case.codes is not None or received.code is not None):
        raise Wrong(f"closed with {received.code} instead of {sorted(codes)}")
    if case.answers is not None and (received.answers, received.pongs) != (case.answers, case.pongs):
        got = f"{received.answers} answers and {received.pongs} pongs"
        raise Wrong(f"{got} instead of {case.answers} and {case.pongs}")


def _check_events(events: list[dict[str, Any]], *, has_ended: bool) -> None:
    """Each stream has complete responses one after the other."""
    open_responses: dict[str | None, list[bytes]] = {}
    for event in events:
        stream_id = event.pop("stream_id", None)
        if event["type"] == "error" and "status" in event:
            # It may belong to a message that was sent while a response was running.
            _check_error(event)
            continue
        if event["type"] == "response.steer.failed":
            continue
        if event["type"] == "error":
            check_error("openai", {"error": event.pop("error")}, None)
        data = b"event: %b\ndata: %b\n\n" % (event["type"].encode(), msgspec.json.encode(event))
        open_responses.setdefault(stream_id, []).append(data)
        if event["type"] in LAST_EVENTS:
            response = open_responses.pop(stream_id)
            if event["type"] != "response.incomplete" or event["response"]["status"] != "cancelled":
                check_stream("responses", b"".join(response), None)
    if has_ended and open_responses:
        raise Wrong(f"responses that do not end: {list(open_responses)}")


def _check_error(event: dict[str, Any]) -> None:
    if event["status"] not in STATUSES:
        raise Wrong(f"an error event with {event['status']}: {event}")
    error = {name: value for name, value in event["error"].items() if name != "headers"}
    check_error("openai", {"error": error}, event["status"])
