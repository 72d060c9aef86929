"""Forms with a file: the result is the same however they are cut, and bad ones are refused."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dragoman.core.errors import BadRequest, DragomanError, TooLarge, UnsupportedMedia
from dragoman.protocols.form_reader import MAX_FIELD, MAX_NAME, MAX_PARTS, FormReader

BOUNDARY = "cut-here"
TYPE = f"multipart/form-data; boundary={BOUNDARY}".encode()
MAX_BYTES = 10_000
PURPOSE = b'Content-Disposition: form-data; name="purpose"\r\n\r\nbatch'
FILE = b'Content-Disposition: form-data; name="file"; filename="a.jsonl"\r\nContent-Type: application/jsonl\r\n\r\n'


def form(*parts: bytes) -> bytes:
    delimiter = b"--" + BOUNDARY.encode()
    return b"".join(delimiter + b"\r\n" + part + b"\r\n" for part in parts) + delimiter + b"--\r\n"


def named(name: bytes) -> bytes:
    return form(b'Content-Disposition: form-data; name="file"; filename=' + name + b"\r\n\r\nx")


def read(pieces: Sequence[bytes], content_type: bytes = TYPE) -> tuple[bytes, FormReader]:
    reader = FormReader(content_type, "file", MAX_BYTES, "storage.file_bytes")
    content = b"".join([reader.feed(piece) for piece in pieces])
    reader.end()
    return content, reader


def outcome(pieces: Sequence[bytes]) -> Any:
    """What a form is read as, or how it is refused."""
    try:
        content, reader = read(pieces)
    except DragomanError as error:
        return type(error)
    return content, reader.fields, reader.file_name, reader.media_type


def cut(data: bytes, places: Sequence[int]) -> list[bytes]:
    ends = sorted({place % (len(data) + 1) for place in places})
    return [data[start:end] for start, end in zip([0, *ends], [*ends, len(data)], strict=True)]


NEAR_BOUNDARY = st.lists(
    st.sampled_from([b"\r", b"\n", b"\r\n", b"--", b"\r\n--", b"\r\n--cut-her", b"\r\n--cut-herx", b"x", b"\0\xff"])
).map(b"".join)
PLACES = st.lists(st.integers(0, 2000), max_size=12)


@given(NEAR_BOUNDARY, st.sampled_from([b"", b"preamble\r\n"]), st.sampled_from([b"", b"epilogue", b"\r\n"]), PLACES)
def test_every_cutting_gives_the_same_result(content: bytes, before: bytes, after: bytes, places: list[int]) -> None:
    nested = b'Content-Disposition: form-data; name="expires_after[seconds]"\r\n\r\n3600'
    whole = before + form(PURPOSE, FILE + content, nested) + after
    expected = (content, {"purpose": "batch", "expires_after": {"seconds": "3600"}}, "a.jsonl", "application/jsonl")
    assert outcome([whole]) == expected
    assert outcome(cut(whole, places)) == expected
    assert outcome([whole[at : at + 1] for at in range(len(whole))]) == expected


@settings(max_examples=200)
@given(st.data())
def test_no_cutting_of_a_damaged_form_gives_another_result(data: st.DataObject) -> None:
    whole = bytearray(form(PURPOSE, FILE + b"content\r\n--cut-her"))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(len(BOUNDARY) + 4, len(whole) - 1))
        whole[at : at + data.draw(st.integers(0, 3))] = data.draw(NEAR_BOUNDARY)
    damaged = bytes(whole)
    # The parser refuses a bare line feed in a header only if the form is cut behind it.
    assert outcome(cut(damaged, data.draw(PLACES))) in (outcome([damaged]), BadRequest)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (b'"a.jsonl"', "a.jsonl"),
        (b'"/etc/passwd"', "passwd"),
        (b'"C:\\dir\\b.txt"', "b.txt"),
        (b'"../../c"', "c"),
        (b'".."', "unnamed.bin"),
        (b'"a/."', "unnamed.bin"),
        (b'""', "unnamed.bin"),
        (b'"  d  "', "d"),
        ('"größe\u202etxt.exe"'.encode(), "größe\u202etxt.exe"),
        (b'"quo%22te"', 'quo"te'),
        (b'"' + b"n" * MAX_NAME + b'"', "n" * MAX_NAME),
    ],
)
def test_file_names(name: bytes, expected: str) -> None:
    _, reader = read([named(name)])
    assert reader.file_name == expected


def test_media_types() -> None:
    start = b'Content-Disposition: form-data; name="file"; filename="%b"\r\nContent-Type: %b\r\n\r\nx'
    for name, sent, expected in (
        (b"a.png", b"image/png", "image/png"),
        (b"a", b"text/html; charset=utf-8", "text/html"),
        (b"a.txt", b"application/octet-stream", "text/plain"),
        (b"a", b"text/html\x0bx", "application/octet-stream"),
        (b"a", b"nonsense", "application/octet-stream"),
        (b"", b"application/pdf", "application/pdf"),
    ):
        _, reader = read([form(start % (name, sent))])
        assert reader.media_type == expected
    assert reader.file_name == "unnamed.pdf"


@pytest.mark.parametrize(
    ("content_type", "error"),
    [
        (b"", UnsupportedMedia),
        (b"application/json", UnsupportedMedia),
        (b"multipart/mixed; boundary=x", UnsupportedMedia),
        (b"multipart/form-data", BadRequest),
        (b"multipart/form-data; boundary=", BadRequest),
        (b'multipart/form-data; boundary=""', BadRequest),
        (b"multipart/form-data; boundary=" + b"x" * 71, BadRequest),
        (b"multipart/form-data; boundary=\xff\xfe", BadRequest),
        (b'multipart/form-data; boundary="a\x0bb"', BadRequest),
    ],
)
def test_content_types_that_are_refused(content_type: bytes, error: type[DragomanError]) -> None:
    with pytest.raises(error):
        FormReader(content_type, "file", MAX_BYTES, "storage.file_bytes")


FIELD = b'Content-Disposition: form-data; name="%b"\r\n\r\n%b'


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "malformed"),
        (b"hello", "malformed"),
        (form(PURPOSE), "^file: "),
        (form(PURPOSE, FILE + b"one", FILE + b"two"), "more than once"),
        (form(PURPOSE, PURPOSE, FILE), "more than once"),
        (form(PURPOSE, FILE)[:-10], "malformed"),
        (form(b"X: y\r\n\r\nz"), "malformed"),
        (form(b"Content-Disposition: form-data\r\n\r\nz"), "no name|malformed"),
        (form(b'Content-Disposition: form-data; name="a"\r\nX: ' + b"h" * 10_000 + b"\r\n\r\nz"), "malformed"),
        (form(b"X: y\r\n" * 20 + PURPOSE), "malformed"),
        (form(*(FIELD % (b"f%d" % at, b"x") for at in range(MAX_PARTS + 1))), "malformed"),
        (form(FIELD % (b"purpose", b"x" * (MAX_FIELD + 1))), f"longer than {MAX_FIELD} bytes"),
        (form(FIELD % (b"purpose", b"\xff")), "not valid UTF-8"),
        (form(FIELD % (b"\xff", b"x")), "malformed"),
        (named(b'"a\0b"'), "control characters"),
        (named(b'"a\x1bb"'), "control characters"),
        (named('"a\u0085b"'.encode()), "control characters"),
        (named(b'"a\r\nb"'), "malformed"),
        (named(b'"a%0D%0Ab"'), "control characters"),
        (named(b'"' + b"n" * (MAX_NAME + 1) + b'"'), f"longer than {MAX_NAME} characters"),
    ],
)
def test_hostile_forms_are_refused(body: bytes, words: str) -> None:
    with pytest.raises(BadRequest, match=words):
        read([body])
    with pytest.raises(BadRequest, match=words):
        read([body[at : at + 1] for at in range(len(body))])


def test_large_file_is_refused_as_soon_as_it_is_too_large() -> None:
    content, _ = read([form(PURPOSE, FILE + b"x" * MAX_BYTES)])
    assert len(content) == MAX_BYTES
    reader = FormReader(TYPE, "file", MAX_BYTES, "storage.file_bytes")
    reader.feed(form(PURPOSE, FILE + b"x" * 5000)[:-20])
    with pytest.raises(TooLarge, match=r"^file: larger than 10000 bytes \(`storage\.file_bytes`"):
        reader.feed(b"x" * 6000)


def test_a_field_that_is_both_a_value_and_nested_keeps_the_value() -> None:
    nested = FIELD % (b"expires_after[seconds]", b"3600")
    plain = FIELD % (b"expires_after", b"soon")
    for parts in ((nested, plain), (plain, nested)):
        _, reader = read([form(*parts, FILE)])
        assert reader.fields["expires_after"] == "soon"
