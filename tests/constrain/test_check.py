import time
from typing import Any

import pytest

from dragoman.constrain.check import Check, warnings

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
def test_what_was_not_enforced_is_looked_at(schema: dict[str, Any], good: bytes, bad: bytes) -> None:
    check = Check("answer", schema, "response_format.json_schema.schema")
    assert warnings([check], [("answer", good), ("other", bad)]) == ()
    (words,) = warnings([check], [("answer", bad)])
    assert words.startswith("the reply does not fit response_format.json_schema.schema: ")


def test_a_pattern_that_takes_forever_is_let_go() -> None:
    check = Check("answer", {"pattern": "^(?=a)(a|aa)+$"}, "here")
    begun = time.monotonic()
    assert warnings([check], [("answer", b'"' + b"a" * 60 + b'!"')]) == ()
    assert time.monotonic() - begun < 2


def test_what_cannot_be_looked_at_is_not_called_wrong() -> None:
    check = Check("answer", {"$ref": "http://127.0.0.1:9/schema"}, "here")
    assert warnings([check], [("answer", b"1"), ("answer", b'{"cut')]) == ()
