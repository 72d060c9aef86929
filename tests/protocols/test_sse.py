"""Decodes all variants of server-sent events: whole, byte by byte and split at random."""

import pytest
from hypothesis import given

from dragoman.protocols import sse
from dragoman.protocols.sse import Decoder, Frame, FrameTooLong
from tests.support.cuttings import cut_bytes, cuttings

CASES = {
    b"data: a\n\ndata: b\n\n": [Frame("a"), Frame("b")],
    b"data: a\r\n\r\ndata: b\r\n\r\n": [Frame("a"), Frame("b")],
    b"data: a\r\rdata: b\r\r": [Frame("a"), Frame("b")],
    b"data: a\r\n\ndata: b\n\r\n": [Frame("a"), Frame("b")],
    b"data:a\n\n": [Frame("a")],
    b"data:  a\n\n": [Frame(" a")],
    b"data: a\ndata: b\n\n": [Frame("a\nb")],
    b"data: a\ndata\ndata: b\n\n": [Frame("a\n\nb")],
    b": comment\n\n:\n\ndata: a\n\n": [Frame("a")],
    b"data: a\n: comment\ndata: b\n\n": [Frame("a\nb")],
    b"event: x\nid: 7\nretry: 10\ndata: a\n\ndata: b\n\n": [Frame("a", "x"), Frame("b")],
    b"event: nothing\n\ndata: a\n\n": [Frame("a")],
    b"\xef\xbb\xbfdata: a\n\n": [Frame("a")],
    b"data: a\n\n\xef\xbb\xbfdata: b\n\n": [Frame("a")],
    b"data: a": [Frame("a")],
    b"data: a\n": [Frame("a")],
    b"data: a\n\ndata: [DONE]": [Frame("a"), Frame("[DONE]")],
    "data: 😀é\u2028x\n\n".encode(): [Frame("😀é\u2028x")],
    b"data: \xff\n\n": [Frame("\ufffd")],
    b"data: a\x0bb\x1cc\n\n": [Frame("a\x0bb\x1cc")],
    b'error: {"code": 500}\n\n': [Frame('{"code": 500}', "error")],
    b"data: a\nerror: b\n\n": [Frame("a"), Frame("b", "error")],
    b"\xef\xbb": [],
    b"": [],
    b"\n\n\n": [],
}


def decoded(pieces: list[bytes]) -> list[Frame]:
    decoder = Decoder()
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
