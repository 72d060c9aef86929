"""JSON Schema keyword by keyword: valid values are accepted; invalid ones are rejected or the keyword is reported."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dragoman.core.errors import InvalidSchema
from dragoman.grammar.schema import MAX_BYTES, json_directive, prepare_schema
from tests.grammar.matching import Matcher

DATA = Path(__file__).parent.parent / "data" / "json_schemas.jsonl"
ROWS = [json.loads(line) for line in DATA.read_text().splitlines()]
"""Each row has a schema. If it is valid, it has the paths of relaxed keywords and values that must pass or fail;
otherwise the path of the mistake."""
VALID = [row for row in ROWS if "mistake" not in row]
INVALID = [(row["schema"], row["mistake"]) for row in ROWS if "mistake" in row] + [
    ({"type": "string", "pattern": "a" * 5000}, ".pattern"),
    ({"type": "string", "description": "x" * MAX_BYTES}, ""),
    ({"anyOf": [{"const": i} for i in range(5000)]}, ""),
    ({"type": "object", "properties": {f"p{i}": {} for i in range(2000)}}, ".properties"),
    ({"anyOf": [{}], "$ref": "#/anyOf/" + "9" * 5000}, ".$ref"),
]


def orderings(value: Any) -> Iterator[Any]:
    """Yield the value with its members in every order: a grammar has a fixed order."""
    if isinstance(value, dict):
        for order in itertools.permutations(value.items()):
            for members in itertools.product(*([(key, way) for way in orderings(inner)] for key, inner in order)):
                yield dict(members)
    elif isinstance(value, list):
        yield from map(list, itertools.product(*(list(orderings(inner)) for inner in value)))
    else:
        yield value


def accepts(matcher: Matcher, value: Any) -> bool:
    return any(matcher.accepts(json.dumps(way, ensure_ascii=False)) for way in orderings(value))


@pytest.mark.parametrize("row", VALID, ids=[str(row["schema"])[:60] for row in VALID])
def test_enforced_and_relaxed_keywords(row: Any) -> None:
    prepared = prepare_schema(row["schema"], "schema")
    assert set(prepared.relaxed) == {f"schema{path}" for path in row.get("relaxed", ())}
    matcher = Matcher(f"%llguidance {{}}\nstart: {json_directive(prepared.schema)}")
    assert [value for value in row["valid"] if not accepts(matcher, value)] == []
    assert [value for value in row["invalid"] if accepts(matcher, value)] == []


@pytest.mark.parametrize(("schema", "path"), INVALID, ids=[str(case[0])[:60] for case in INVALID])
def test_invalid_schema_is_rejected_with_its_path(schema: Any, path: str) -> None:
    with pytest.raises(InvalidSchema) as raised:
        prepare_schema(schema, "schema")
    assert raised.value.param == f"schema{path}"
    assert str(raised.value).startswith(f"schema{path}: ")
    assert raised.value.status == 400
