"""Items of an array in a body that arrives in pieces, compared with a parser that has the whole body."""

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.core.errors import BadRequest, TooLarge
from dragoman.protocols import item_scanner
from dragoman.protocols.item_scanner import ItemScanner

TEXT = st.text(st.sampled_from('ab"\\{}[]:, \n\tü\u2028'), max_size=8)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
ITEMS = st.lists(st.dictionaries(TEXT, JSON, max_size=4), max_size=5)
OTHERS = st.dictionaries(TEXT, JSON, max_size=3)


def scan(body: bytes, cuts: list[int], largest: int = 10_000) -> tuple[list[Any], dict[str, Any]]:
    scanner = ItemScanner("requests", largest)
    places = sorted({0, len(body), *(cut % (len(body) + 1) for cut in cuts)})
    items = [item for begin, end in itertools.pairwise(places) for item in scanner.feed(body[begin:end])]
    return [json.loads(item) for item in items], scanner.end()


@given(ITEMS, OTHERS, OTHERS, st.sampled_from([None, 0, 2]), st.booleans(), st.lists(st.integers(0, 2000), max_size=12))
def test_items_are_found_however_the_body_is_cut(
    items: list[Any], before: dict[str, Any], after: dict[str, Any], indent: int | None, escapes: bool, cuts: list[int]
) -> None:
    fields = before | {"requests": items} | {name: value for name, value in after.items() if name not in before}
    body = json.dumps(fields, indent=indent, ensure_ascii=escapes).encode()
    found, others = scan(body, cuts)
    assert found == items
    assert set(others) == set(fields) - {"requests"}


@given(ITEMS)
def test_items_are_found_byte_by_byte(items: list[Any]) -> None:
    body = json.dumps({"x": '"requests":[', "requests": items, "y": {"requests": [{}]}}).encode()
    found, others = scan(body, list(range(len(body))))
    assert found == items
    assert set(others) == {"x", "y"}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "not valid JSON"),
        (b"[]", "must be a JSON object"),
        (b'{"requests": [}', "not valid JSON"),
        (b'{"requests": []', "not valid JSON"),
        (b'{"requests": []}}', "not valid JSON"),
        (b'{"requests": [{} {}]}', "not valid JSON"),
        (b'{"requests": [{}, ]}', "not valid JSON"),
        (b'{"requests": [{}', "not valid JSON"),
        (b'{"requests": [{}]} x', "not valid JSON"),
        (b"{}", "requests: required"),
        (b'{"requests": null}', "requests: expected an array"),
        (b'{"requests": {"a": []}}', "requests: expected an array"),
        (b'{"requests": [{}, 5]}', "requests[1]: expected an object"),
        (b'{"requests": [[{}]]}', "requests[0]: expected an object"),
        (b'{"requests": [{}], "requests": []}', "duplicate key"),
        (rb'{"\u0072equests": [{}]}', "without escapes"),
        (b'{"requests": [{"a": "\xff"}], "\xff": 1}', "not valid UTF-8"),
    ],
)
def test_other_bodies_are_refused(body: bytes, message: str) -> None:
    for cuts in ([], list(range(len(body)))):
        with pytest.raises(BadRequest) as caught:
            _scan_only(body, cuts)
        assert message in caught.value.message


def _scan_only(body: bytes, cuts: list[int]) -> None:
    scanner = ItemScanner("requests", 10_000)
    places = sorted({0, len(body), *cuts})
    for begin, end in itertools.pairwise(places):
        scanner.feed(body[begin:end])
    scanner.end()


def test_size_of_an_item_and_of_the_rest_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TooLarge, match=r"requests\[1\]: larger than 30 bytes"):
        scan(b'{"requests": [{}, {"a": "%b' % (b"x" * 40), [], largest=30)
    monkeypatch.setattr(item_scanner, "MAX_REST", 100)
    spaces = b" " * 1000
    assert scan(b'{"requests": [{},%b{}]}' % spaces, []) == ([{}, {}], {})
    with pytest.raises(TooLarge):
        scan(b'{"requests": [], "other": "%b"}' % (b"x" * 100), [])
