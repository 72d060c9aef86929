"""Decodes all variants of server-sent events: whole, byte by byte and split at random."""

import pytest
from hypothesis import given

from dragoman.protocols import sse
from dragoman.protocols.sse import FrameTooLong, SseDecoder, SseFrame
from tests.support.text_splits import cut_bytes, cuttings

CASES = {
    b"data: a\n\ndata: b\n\n": [SseFrame("a"), SseFrame("b")],
    b"data: a\r\n\r\ndata: b\r\n\r\n": [SseFrame("a"), SseFrame("b")],
    b"data: a\r\rdata: b\r\r": [SseFrame("a"), SseFrame("b")],
    b"data: a\r\n\ndata: b\n\r\n": [SseFrame("a"), SseFrame("b")],
    b"data:a\n\n": [SseFrame("a")],
    b"data:  a\n\n": [SseFrame(" a")],
    b"data: a\ndata: b\n\n": [SseFrame("a\nb")],
    b"data: a\ndata\ndata: b\n\n": [SseFrame("a\n\nb")],
    b": comment\n\n:\n\ndata: a\n\n": [SseFrame("a")],
    b"data: a\n: comment\ndata: b\n\n": [SseFrame("a\nb")],
    b"event: x\nid: 7\nretry: 10\ndata: a\n\ndata: b\n\n": [SseFrame("a", "x"), SseFrame("b")],
    b"event: nothing\n\ndata: a\n\n": [SseFrame("a")],
    b"\xef\xbb\xbfdata: a\n\n": [SseFrame("a")],
    b"data: a\n\n\xef\xbb\xbfdata: b\n\n": [SseFrame("a")],
    b"data: a": [SseFrame("a")],
    b"data: a\n": [SseFrame("a")],
    b"data: a\n\ndata: [DONE]": [SseFrame("a"), SseFrame("[DONE]")],
    "data: 😀é\u2028x\n\n".encode(): [SseFrame("😀é\u2028x")],
    b"data: \xff\n\n": [SseFrame("\ufffd")],
    b"data: a\x0bb\x1cc\n\n": [SseFrame("a\x0bb\x1cc")],
    b'error: {"code": 500}\n\n': [SseFrame('{"code": 500}', "error")],
    b"data: a\nerror: b\n\n": [SseFrame("a"), SseFrame("b", "error")],
    b'data: {"a": 1}\ndata: {"b": 2}\ndata: [DONE]\n': [SseFrame('{"a": 1}'), SseFrame('{"b": 2}'), SseFrame("[DONE]")],
    b'event: x\ndata: {"a": 1}\nevent: y\ndata: {"b": 2}\n\n': [SseFrame('{"a": 1}', "x"), SseFrame('{"b": 2}', "y")],
    b'data: {"a": 1}\ndata: {"b":\ndata: 2}\n\n': [SseFrame('{"a": 1}'), SseFrame('{"b":\n2}')],
    b'data: {"a": 1}\nevent: x\n\n': [SseFrame('{"a": 1}', "x")],
    b"\xef\xbb": [],
    b"": [],
    b"\n\n\n": [],
}


def decoded(pieces: list[bytes]) -> list[SseFrame]:
    decoder = SseDecoder()
    frames = [frame for piece in pieces for frame in decoder.feed(piece)]
    return frames + decoder.end()


@pytest.mark.parametrize("data", CASES)
def test_whole_and_byte_by_byte(data: bytes) -> None:
    assert decoded([data]) == CASES[data]
    assert decoded([bytes([byte]) for byte in data]) == CASES[data]


@given(cuts=cuttings())
def test_any_split(cuts: list[int]) -> None:
    data = b"".join(case for case in CASES if case.endswith((b"\n\n", b"\r\n", b"\r\r")))
    assert decoded(cut_bytes(data, cuts)) == decoded([data])


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
@given(cuts=cuttings())
def test_any_split_of_frames_without_empty_lines(end: bytes, cuts: list[int]) -> None:
    lines = [
        b"event: x",
        b'data: {"a": "\xc3\xa9"}',
        b"event: y",
        b'data: {"b": 2}',
        b'data: {"c": 3}',
        b"data: [DONE]",
    ]
    frames = [SseFrame('{"a": "é"}', "x"), SseFrame('{"b": 2}', "y"), SseFrame('{"c": 3}'), SseFrame("[DONE]")]
    assert decoded(cut_bytes(b"".join(line + end for line in lines), cuts)) == frames


def test_frame_is_ready_with_its_line_once_empty_lines_are_known_to_be_missing() -> None:
    decoder = SseDecoder()
    assert decoder.feed(b'data: {"a": 1}\n') == []
    assert len(decoder.feed(b'data: {"b": 2}\n')) == 2
    assert decoder.feed(b'data: {"c": 3}\n') == [SseFrame('{"c": 3}')]


def test_frame_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "MAX_FRAME_BYTES", 1000)
    with pytest.raises(FrameTooLong):
        decoded([b"data: " + b"x" * 20 + b"\n"] * 100)
    with pytest.raises(FrameTooLong):
        decoded([b"x" * 20] * 100)
    assert len(decoded([b"data: " + b"x" * 20 + b"\n\n: comment\n"] * 100)) == 100


@pytest.mark.parametrize("nothing", [b"\n", b": ping\n\n", b": ping\n", b"id: 7\n\n"])
def test_limit_for_empty_lines(monkeypatch: pytest.MonkeyPatch, nothing: bytes) -> None:
    monkeypatch.setattr(sse, "MAX_EMPTY_BYTES", 1000)
    with pytest.raises(FrameTooLong):
        decoded([nothing] * 1001)
    assert len(decoded([nothing * 50 + b"data: a\n\n"] * 100)) == 100
