import pytest

from dragoman.errors import BadRequest
from dragoman.protocols import wire

BAD_BODIES = [
    b"",
    b"{",
    b'{"a": 1',
    b"[]",
    b'"text"',
    b"null",
    b'\xff{"a": 1}',
    b'{"a": "\xc3\x28"}',
    b'{"a": "\\ud800"}',
    b'{"a": ["x", {"\\udfff": 1}]}',
    b'{"a": NaN}',
    b'{"a": -Infinity}',
    b'{"a": 1e999}',
    b'{"a": 1, "a": 2}',
    b'{"b": {"a": 1, "a": 1}}',
    b'{"a": ' + b"9" * 5000 + b"}",
    b'{"a": ' + b"[" * 64 + b"]" * 64 + b"}",
    b'{"a": ' + b"[" * 100_000,
    b'{"a": 1} trailing',
    b"{'a': 1}",
]


@pytest.mark.parametrize("body", BAD_BODIES)
def test_bad_bodies_are_refused(body: bytes) -> None:
    with pytest.raises(BadRequest):
        wire.parse(body)


def test_what_is_just_allowed() -> None:
    assert wire.parse(b'{"a": ' + b"[" * 63 + b"]" * 63 + b"}")
    assert wire.parse('{"a": "\\ud83d\\ude00 \\u0000 \u202e"}'.encode()) == {"a": "😀 \x00 \u202e"}
    assert wire.parse(b'{"a": 1.0, "b": 1.5, "c": 1e3}') == {"a": 1, "b": 1.5, "c": 1000}
