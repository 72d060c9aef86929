import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.core.errors import InvalidSchema
from dragoman.grammar.schema import ENFORCED, META_KEYWORDS, UNENFORCED, prepare_schema
from dragoman.grammar.schema_check import SchemaCheck, find_violations

CASES = [
    ({"type": "array", "uniqueItems": True}, b"[1, 2]", b"[1, 1]"),
    ({"pattern": "^(?!x)"}, b'"abc"', b'"xbc"'),
    ({"not": {"const": 3}}, b"4", b"3"),
    ({"if": {"minimum": 3}, "then": {"maximum": 5}}, b"4", b"9"),
    ({"propertyNames": {"maxLength": 1}}, b'{"a": 1}', b'{"ab": 1}'),
    (
        {"patternProperties": {"^a(?=b)": {"type": "integer"}}, "additionalProperties": False},
        b'{"ab": 1}',
        b'{"ac": 1}',
    ),
    ({"patternProperties": {"^a(?=b)": {"type": "integer"}}}, b'{"ab": 1}', b'{"ab": "x"}'),
]


@pytest.mark.parametrize(("schema", "good", "bad"), CASES, ids=[str(case[0])[:50] for case in CASES])
def test_unenforced_keywords_are_checked(schema: dict[str, Any], good: bytes, bad: bytes) -> None:
    check = SchemaCheck("answer", schema, "response_format.json_schema.schema")
    assert find_violations([check], [("answer", good), ("other", bad)]) == ()
    (message,) = find_violations([check], [("answer", bad)])
    assert message.startswith("the reply does not match response_format.json_schema.schema: ")


def test_slow_pattern_counts_as_match() -> None:
    check = SchemaCheck("answer", {"pattern": "^(?=a)(a|aa)+$"}, "here")
    start = time.process_time()
    assert find_violations([check], [("answer", b'"' + b"a" * 60 + b'!"')]) == ()
    assert time.process_time() - start < 4


def test_uncheckable_reply_has_no_warning() -> None:
    check = SchemaCheck("answer", {"$ref": "http://127.0.0.1:9/schema"}, "here")
    assert find_violations([check], [("answer", b"1"), ("answer", b'{"cut')]) == ()


WORD = "a" * 60 + "!"
BRANCHES = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(40)} | {"d40": {"const": 1}}


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"allOf": [{"pattern": f"^(?={i}|a)(a|aa)+$"} for i in range(300)]}, WORD),
        ({"patternProperties": {f"^(?={i}|a)(a|aa)+$": {} for i in range(300)}}, {WORD: 1}),
        ({"$defs": BRANCHES, "$ref": "#/$defs/d0"}, 2),
        ({"type": "array", "uniqueItems": True}, [{"a": i} for i in range(5000)]),
    ],
    ids=["patterns", "names", "branches", "items"],
)
def test_time_limit_covers_the_whole_reply(schema: dict[str, Any], value: Any) -> None:
    text = json.dumps(value).encode()
    start = time.process_time()
    assert find_violations([SchemaCheck("answer", schema, "here")], [("answer", text)] * 3) == ()
    assert time.process_time() - start < 3


@pytest.mark.parametrize("draft", ["draft-03/schema#", "draft-04/schema#", "draft-07/schema#"])
def test_boolean_schemas_in_every_draft(draft: str) -> None:
    schema = {
        "$schema": f"http://json-schema.org/{draft}",
        "items": True,
        "properties": {"a": True},
        "not": {"enum": [1]},
    }
    check = SchemaCheck("answer", schema, "here")
    assert find_violations([check], [("answer", b"[1]"), ("answer", b'{"a": 1}')]) == ()
    assert len(find_violations([check], [("answer", b"1")])) == 1


def test_unique_items_compares_values() -> None:
    check = SchemaCheck("answer", {"uniqueItems": True}, "here")
    assert find_violations([check], [("answer", b'[1, true, "1", 1.5, [1], {"a": 1, "b": 2}]')]) == ()
    assert len(find_violations([check], [("answer", b"[1, 1.0]")])) == 1
    assert len(find_violations([check], [("answer", b'[{"a": 1, "b": 2}, {"b": 2, "a": 1}]')])) == 1


odd: st.SearchStrategy[Any] = st.sampled_from(
    [5, 1.5, "x", "#", "#/a", "http://[", True, None, [], {}, ["a"], [1], {"a": 5}, {"a": ["b"]}, [{}]]
)
keywords = st.sampled_from(sorted({*ENFORCED, *UNENFORCED, *META_KEYWORDS}))
schemas = st.recursive(odd, lambda inner: st.dictionaries(keywords, inner | st.lists(inner, max_size=2), max_size=4))
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "b"]), inner),
)


@given(st.dictionaries(keywords, schemas, min_size=1), values)
def test_every_accepted_schema_can_be_checked(schema: dict[str, Any], value: Any) -> None:
    try:
        full_schema = prepare_schema(schema, "here").full_schema
    except InvalidSchema:
        return
    find_violations([SchemaCheck("answer", full_schema, "here")], [("answer", json.dumps(value).encode())])
