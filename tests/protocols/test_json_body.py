import json
from collections.abc import Callable
from typing import Annotated, Any, Literal

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dragoman.config.settings import Limits
from dragoman.core.errors import BadRequest
from dragoman.protocols import json_body

INVALID_BODIES = [
    *(b"", b"{", b'{"a": 1', b"[]", b'"text"', b"null"),
    *(b'\xff{"a": 1}', b'{"a": "\xc3\x28"}', b'{"a": "\\ud800"}', b'{"a": ["x", {"\\udfff": 1}]}'),
    *(b'{"a": NaN}', b'{"a": -Infinity}', b'{"a": 1e999}', b'{"a": ' + b"9" * 5000 + b"}"),
    *(b'{"a": 1, "a": 2}', b'{"b": {"a": 1, "a": 1}}'),
    b'{"a": ' + b"[" * 64 + b"]" * 64 + b"}",
    b'{"a": ' + b"[" * 100_000,
    b'{"a": 1} trailing',
    b"{'a': 1}",
]


@pytest.mark.parametrize("body", INVALID_BODIES)
def test_invalid_body_is_rejected(body: bytes) -> None:
    with pytest.raises(BadRequest):
        json_body.parse(body)


def test_bodies_at_the_limits() -> None:
    assert json_body.parse(b'{"a": ' + b"[" * 63 + b"]" * 63 + b"}")
    assert json_body.parse('{"a": "\\ud83d\\ude00 \\u0000 \u202e"}'.encode()) == {"a": "😀 \x00 \u202e"}
    assert json_body.parse(b'{"a": 1.0, "b": 1.5, "c": 1e3}') == {"a": 1, "b": 1.5, "c": 1000}


NUMBERS = st.integers(-(10**30), 10**30) | st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
)
FRAGMENTS = st.sampled_from([*'{}[],:"\\ -01é', "\x01", "1.0", "1e9", '"a"', '"a":', "\\u", '"\\u003a"'])


def outcome(parse: Callable[[bytes], object], body: bytes) -> str:
    """Return the repr of the value, which distinguishes 1 from 1.0, or the error message."""
    try:
        return repr(parse(body))
    except BadRequest as error:
        return error.message


@given(st.dictionaries(st.text(), VALUES))
def test_both_decoders_agree_on_valid_bodies(value: dict[str, object]) -> None:
    body = msgspec.json.encode(value)
    assert outcome(json_body.parse, body) == outcome(json_body._parse_strictly, body)


@given(st.lists(FRAGMENTS, max_size=12))
def test_both_decoders_agree_on_fragments(fragments: list[str]) -> None:
    body = ('{"a":' + "".join(fragments) + "}").encode()
    assert outcome(json_body.parse, body) == outcome(json_body._parse_strictly, body)


@pytest.mark.parametrize("encode", [msgspec.json.encode, lambda value: json.dumps(value).encode()])
@given(st.text(), st.text())
def test_duplicate_key_is_rejected(encode: Callable[[str], bytes], key: str, text: str) -> None:
    body = b"{%b: %b, %b: 1}" % (encode(key), encode(text), encode(key))
    with pytest.raises(BadRequest, match="duplicate key"):
        json_body.parse(body)


@given(st.lists(st.text(alphabet=st.sampled_from('a",\\\uffff\n{}😀 ')), min_size=1, max_size=6))
@example(['a",', "b"])
@example(["a\\", '","', ""])
def test_encode_texts_keeps_texts_apart(texts: list[str]) -> None:
    framed = b'["' + json_body.encode_texts(texts, b'","') + b'"]'
    assert json.loads(framed) == texts


TEXT = st.text(alphabet=st.sampled_from('a,:[]{}"\\\n\u00e9'))
NESTED = st.recursive(
    st.none() | st.integers() | TEXT, lambda inner: st.lists(inner) | st.dictionaries(TEXT, inner), max_leaves=20
)


def count(value: Any) -> tuple[int, int]:
    """Return the number of elements and of keys of a decoded value."""
    if not isinstance(value, dict | list):
        return 0, 0
    keys = len(value) if isinstance(value, dict) else 0
    inner = [count(child) for child in (value.values() if isinstance(value, dict) else value)]
    commas = max(0, len(value) - 1)
    elements = json_body.CONTAINER_WEIGHT + commas + keys + sum(elements for elements, _ in inner)
    return elements, keys + sum(keys for _, keys in inner)


@pytest.mark.parametrize("chunk", [1, 2, 7, 1024 * 1024])
@settings(max_examples=200)
@given(NESTED, st.booleans())
def test_counts_match_the_decoded_value(chunk: int, value: Any, ascii_only: bool) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only).encode()
    elements, keys = count(value)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_body, "CHUNK_BYTES", chunk)
        assert json_body.count_keys(text) == keys
        assert not json_body.has_more_elements(text, elements)
        if elements:
            assert json_body.has_more_elements(text, elements - 1)


def test_strings_contain_no_elements() -> None:
    text = json.dumps({"a": 'say "[1, {2: 3}]" \\' * 100_000}).encode()
    assert not json_body.has_more_elements(text, 6)


def test_default_limit_allows_2048_inputs_of_512_token_ids() -> None:
    assert Limits().body_elements == json_body.MAX_ELEMENTS
    text = json.dumps({"input": [[50_000] * 512] * 2048, "model": "minilm"}).encode()
    assert not json_body.has_more_elements(text, json_body.MAX_ELEMENTS)


class Call(msgspec.Struct):
    mode: Literal["fast", "slow"] | int | None = None


class Body(msgspec.Struct):
    kind: Literal["a"] = "a"
    calls: list[Call] | str = ""
    named: dict[str, Call] = {}
    after: Annotated[Literal["x", "y"] | None, msgspec.Meta(description="")] = None


@pytest.mark.parametrize(
    ("parsed", "message"),
    [
        ({"kind": "b"}, "kind: invalid enum value 'b'; expected a"),
        ({"calls": [{}, {"mode": "off"}]}, "calls[1].mode: invalid enum value 'off'; expected fast or slow"),
        ({"named": {"z": {"mode": "off"}}}, "named[...].mode: invalid enum value 'off'; expected fast or slow"),
        ({"after": "z"}, "after: invalid enum value 'z'; expected x or y"),
    ],
)
def test_error_of_an_enum_lists_its_values(parsed: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRequest) as raised:
        json_body.convert(parsed, Body)
    assert raised.value.message == message
