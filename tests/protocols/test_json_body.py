import json
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dragoman.core.errors import BadRequest
from dragoman.protocols import json_body

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
        json_body.parse(body)


def test_what_is_just_allowed() -> None:
    assert json_body.parse(b'{"a": ' + b"[" * 63 + b"]" * 63 + b"}")
    assert json_body.parse('{"a": "\\ud83d\\ude00 \\u0000 \u202e"}'.encode()) == {"a": "😀 \x00 \u202e"}
    assert json_body.parse(b'{"a": 1.0, "b": 1.5, "c": 1e3}') == {"a": 1, "b": 1.5, "c": 1000}


NUMBERS = st.integers(-(10**30), 10**30) | st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
)
FRAGMENTS = st.sampled_from([*'{}[],:"\\ -01é', "\x01", "1.0", "1e9", '"a"', '"a":', "\\u", '"\\u003a"'])


def outcome(parse: Callable[[bytes], object], body: bytes) -> str:
    """With the types of the values (1 is not 1.0), or the words of the refusal."""
    try:
        return repr(parse(body))
    except BadRequest as error:
        return error.message


@given(st.dictionaries(st.text(), VALUES))
def test_both_decoders_read_the_same(value: dict[str, object]) -> None:
    body = msgspec.json.encode(value)
    assert outcome(json_body.parse, body) == outcome(json_body._parse_strictly, body)


@given(st.lists(FRAGMENTS, max_size=12))
def test_both_decoders_refuse_the_same(fragments: list[str]) -> None:
    body = ('{"a":' + "".join(fragments) + "}").encode()
    assert outcome(json_body.parse, body) == outcome(json_body._parse_strictly, body)


@pytest.mark.parametrize("encode", [msgspec.json.encode, lambda value: json.dumps(value).encode()])
@given(st.text(), st.text())
def test_a_key_that_comes_twice_is_seen_whatever_else_there_is(
    encode: Callable[[str], bytes], key: str, text: str
) -> None:
    body = b"{%b: %b, %b: 1}" % (encode(key), encode(text), encode(key))
    with pytest.raises(BadRequest, match="comes twice"):
        json_body.parse(body)


@given(st.lists(st.text(alphabet=st.sampled_from('a",\\\uffff\n{}😀 ')), min_size=1, max_size=6))
@example(['a",', "b"])
@example(["a\\", '","', ""])
def test_texts_are_framed_apart(texts: list[str]) -> None:
    framed = b'["' + json_body.between_texts(texts, b'","') + b'"]'
    assert json.loads(framed) == texts
