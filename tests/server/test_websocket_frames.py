"""Frames of WebSockets without I/O: cutting, fragments, limits and violations."""

import itertools
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tools.websocket import BINARY, CLOSE, CONTINUATION, PING, PONG, TEXT, fragmented, frame
from wsproto.events import BytesMessage, CloseConnection, Event, Ping, Pong, TextMessage

from dragoman.server.http import websocket_frames
from dragoman.server.http.websocket_frames import MAX_SMALL_FRAMES, SMALL_FRAME, WebSocketFrames, WebSocketViolation

LIMIT = 1000


def feed(pieces: Iterable[bytes], limit: int = LIMIT) -> tuple[list[Event], tuple[int, str] | None]:
    """The events of these pieces, and the violation that ends them."""
    frames = WebSocketFrames(limit)
    events: list[Event] = []
    try:
        for piece in pieces:
            events += frames.feed(piece, 0.0)
    except WebSocketViolation as violation:
        return events, (violation.code, violation.reason)
    return events, None


def bytewise(data: bytes) -> list[bytes]:
    return [data[at : at + 1] for at in range(len(data))]


messages = st.one_of(
    st.tuples(st.just(TEXT), st.text(max_size=200).map(str.encode)), st.tuples(st.just(BINARY), st.binary(max_size=200))
)
controls = st.tuples(st.sampled_from((PING, PONG)), st.binary(max_size=125))


@st.composite
def valid_frames(draw: st.DrawFn) -> tuple[list[bytes], list[tuple[int, bytes]]]:
    """Frames of messages in fragments, with control frames anywhere between them, and what they mean in order."""
    frames: list[bytes] = []
    meaning: list[tuple[int, bytes]] = []
    for opcode, payload in draw(st.lists(messages, max_size=5)):
        for fragment in fragmented(payload, draw(st.integers(1, 300)), opcode):
            for kind, data in draw(st.lists(controls, max_size=2)):
                frames.append(frame(kind, data, mask=draw(st.binary(min_size=4, max_size=4))))
                meaning.append((kind, data))
            frames.append(fragment)
        meaning.append((opcode, payload))
    return frames, meaning


@given(valid_frames(), st.lists(st.integers(1, 40), min_size=1))
def test_events_are_the_same_for_every_cutting(
    generated: tuple[list[bytes], list[tuple[int, bytes]]], sizes: Sequence[int]
) -> None:
    frames, meaning = generated
    data = b"".join(frames)
    expected: list[Event] = []
    for opcode, payload in meaning:
        if opcode == TEXT:
            expected.append(TextMessage(data=payload.decode()))
        elif opcode == BINARY:
            expected.append(BytesMessage(data=payload))
        else:
            expected.append(Ping(payload=payload) if opcode == PING else Pong(payload=payload))
    starts = list(itertools.takewhile(lambda at: at < len(data), itertools.accumulate(itertools.cycle(sizes))))
    cut = [data[begin:end] for begin, end in zip([0, *starts], [*starts, len(data)], strict=True)]
    for pieces in ([data], bytewise(data), cut, frames):
        assert feed(pieces) == (expected, None)


VIOLATIONS = [
    ("unmasked", frame(TEXT, b"{}", mask=None), 1002),
    ("reserved bit", frame(TEXT, b"{}", rsv=4), 1002),
    ("reserved opcode", frame(3, b"{}"), 1002),
    ("reserved control opcode", frame(11), 1002),
    ("fragmented ping", frame(PING, fin=False), 1002),
    ("long ping", frame(PING, b"a" * 126), 1002),
    ("continuation without a beginning", frame(CONTINUATION, b"{}"), 1002),
    ("text within a message", frame(TEXT, b"{", fin=False) + frame(TEXT, b"}"), 1002),
    ("close with one byte", frame(CLOSE, b"\x03"), 1002),
    ("close with a reserved code", frame(CLOSE, b"\x03\xed"), 1002),
    ("close with an unknown code", frame(CLOSE, b"\x00\x01"), 1002),
    ("close whose reason is not UTF-8", frame(CLOSE, b"\x03\xe8\xff"), 1007),
    ("length in too many bytes", b"\x81\xfe\x00\x05mask" + b"a" * 5, 1002),
    ("length above 63 bits", b"\x81\xff" + b"\xff" * 8 + b"mask", 1002),
    ("text that is not UTF-8", frame(TEXT, b"\xc3\x28"), 1007),
    ("text that ends within a character", frame(TEXT, b"\xe2\x82"), 1007),
    ("a surrogate", frame(TEXT, b"\xed\xa0\x80"), 1007),
    ("large message", frame(TEXT, b"a" * (LIMIT + 1)), 1009),
    ("large binary message", frame(BINARY, b"a" * (LIMIT + 1)), 1009),
    ("large message in fragments", b"".join(fragmented(b"a" * (LIMIT + 1), 100)), 1009),
    ("beginning of an enormous message", b"\x81\xff" + b"\x00\x00\x00\x7f" * 2 + b"mask" + b"a" * (LIMIT + 1), 1009),
]


@pytest.mark.parametrize(("data", "code"), [case[1:] for case in VIOLATIONS], ids=[case[0] for case in VIOLATIONS])
def test_violation_ends_the_connection_after_what_came_before(data: bytes, code: int) -> None:
    before = frame(PING, b"a") + frame(TEXT, b"{}")
    for pieces in ([before + data], bytewise(before + data)):
        events, violation = feed(pieces)
        assert events == [Ping(payload=b"a"), TextMessage(data="{}")]
        assert violation is not None
        assert violation[0] == code
        assert len(violation[1].encode()) <= 123


def test_message_may_be_as_large_as_the_limit() -> None:
    # The limit counts bytes, not characters.
    assert feed([frame(TEXT, "é".encode() * (LIMIT // 2))])[1] is None
    assert feed([frame(TEXT, "é".encode() * (LIMIT // 2) + b"a")])[1] is not None


@pytest.mark.parametrize(
    "flood",
    [
        frame(PING),
        frame(PONG, b"a" * 125),
        frame(TEXT, b"{}"),
        frame(BINARY),
        frame(TEXT, b"a" * (SMALL_FRAME - 1)),
    ],
)
def test_only_so_many_small_frames_are_read_in_a_minute(flood: bytes) -> None:
    frames = WebSocketFrames(LIMIT * 10)
    assert len(list(frames.feed(flood * MAX_SMALL_FRAMES, 5.0))) == MAX_SMALL_FRAMES
    assert len(list(frames.feed(flood * MAX_SMALL_FRAMES, 65.0))) == MAX_SMALL_FRAMES
    with pytest.raises(WebSocketViolation) as error:
        list(frames.feed(flood, 124.0))
    assert error.value.code == 1008


def test_endless_empty_fragments_are_refused() -> None:
    begun, more = frame(TEXT, b"{", fin=False), frame(CONTINUATION, fin=False)
    events, violation = feed([begun, *([more] * (MAX_SMALL_FRAMES + 1))])
    assert events == []
    assert violation is not None
    assert violation[0] == 1008


def test_large_fragments_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(websocket_frames, "MAX_SMALL_FRAMES", 3)
    payload = b"a" * (SMALL_FRAME * 50)
    events, violation = feed(bytewise(b"".join(fragmented(payload, SMALL_FRAME))), limit=len(payload))
    assert (events, violation) == ([TextMessage(data=payload.decode())], None)


def test_close_frames_of_both_sides() -> None:
    frames = WebSocketFrames(LIMIT)
    closing = frame(CLOSE, b"\x03\xe8bye") + frame(TEXT, b"{}")
    assert list(frames.feed(closing, 0.0)) == [CloseConnection(code=1000, reason="bye")]
    assert frames.close(1000) == b"\x88\x02\x03\xe8"
    frames = WebSocketFrames(LIMIT)
    assert frames.close(1001, "é" * 100)[:4] == b"\x88\x7c\x03\xe9"
    events = frames.feed(frame(TEXT, b"{}") + frame(CLOSE), 0.0)
    assert [type(event) for event in events] == [TextMessage, CloseConnection]
