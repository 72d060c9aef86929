"""JSON Schema keyword by keyword: valid values are accepted; invalid ones are rejected or the keyword is reported."""

import itertools
import json
from collections.abc import Iterator
from typing import Any

import pytest

from dragoman.core.errors import InvalidSchema
from dragoman.grammar.schema import MAX_BYTES, json_directive, prepare_schema
from tests.grammar.matching import matcher, tokens

TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"type": "integer"},
                "children": {"type": "array", "items": {"$ref": "#/$defs/node"}},
            },
            "required": ["value"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}

ENFORCED: list[tuple[Any, list[Any], list[Any]]] = [
    ({"type": "integer"}, [0, -1, 12], [1.5, "1", None, True, [], {}]),
    ({"type": "number"}, [0, -1.5, 1e10], ["1", None, False]),
    ({"type": "string"}, ["", "a", "☃", 'q"\\\n\u0001'], [1, None, ["a"]]),
    ({"type": "boolean"}, [True, False], [0, "true", None]),
    ({"type": "null"}, [None], [False, 0, "", "null"]),
    ({"type": "array"}, [[], [1, "a"]], [{}, "[]"]),
    ({"type": "object"}, [{}, {"a": 1}], [[], "{}"]),
    ({"type": ["integer", "null"]}, [1, None], ["a", 1.5]),
    ({}, [1, "a", None, [], {"a": [1]}], []),
    ({"enum": [1, "two", None, {"a": 1}, [3]]}, [1, "two", None, {"a": 1}, [3]], [2, "three", {}, [1]]),
    ({"const": "x"}, ["x"], ["y", None]),
    ({"const": {"a": [1, 2]}}, [{"a": [1, 2]}], [{"a": [2, 1]}, {}]),
    ({"type": "string", "enum": ["a", 1]}, ["a"], [1, "b"]),
    ({"enum": ["a\\b", 'c"d']}, ["a\\b", 'c"d'], ["ab"]),
    ({"type": "integer", "minimum": 3}, [3, 100], [2, -3]),
    ({"type": "integer", "maximum": 3}, [3, -100], [4]),
    ({"type": "integer", "exclusiveMinimum": 3}, [4], [3]),
    ({"type": "integer", "exclusiveMaximum": 3}, [2], [3]),
    ({"type": "number", "minimum": 1.1, "maximum": 2.25}, [1.1, 2, 2.25], [1.05, 2.3]),
    ({"type": "number", "exclusiveMinimum": 0}, [0.1, 5], [0, -1]),
    ({"type": "integer", "minimum": -9007199254740991, "maximum": 9007199254740991}, [0, 9007199254740991], [10**17]),
    ({"type": "integer", "multipleOf": 3}, [0, 9, -3], [1, 10]),
    ({"type": "number", "multipleOf": 0.01}, [4.25, 0.01], [0.001]),
    ({"type": "string", "minLength": 2}, ["ab", "💩💩"], ["a", ""]),
    ({"type": "string", "maxLength": 2}, ["ab", "", "💩💩"], ["abc"]),
    ({"type": "string", "minLength": 1, "maxLength": 3}, ["a", "abc"], ["", "abcd"]),
    ({"type": "string", "pattern": "^a*$"}, ["", "aaa"], ["ab"]),
    ({"type": "string", "pattern": "a+"}, ["xxaay"], ["xyz"]),
    ({"type": "string", "pattern": "^\\d{3}-\\w+$"}, ["123-ab"], ["12-ab", "123-"]),
    ({"type": "string", "pattern": "(a+)+b"}, ["aaab"], ["aaaa"]),
    ({"type": "string", "pattern": "^\\p{Lu}"}, ["Ab"], ["ab"]),
    ({"type": "string", "format": "date"}, ["2024-02-29"], ["2024-13-01", "x"]),
    ({"type": "string", "format": "date-time"}, ["2024-01-01T10:00:00Z"], ["2024-01-01"]),
    ({"type": "string", "format": "uuid"}, ["2eb8aa08-aa98-11ea-b4aa-73b441d16380"], ["2eb8"]),
    ({"type": "string", "format": "email"}, ["a@b.co"], ["a"]),
    ({"type": "string", "format": "ipv4"}, ["127.0.0.1"], ["127.0.0"]),
    ({"type": "string", "format": "uri"}, ["http://a.b/c?d#e"], ["a b"]),
    ({"type": "integer", "format": "int64"}, [1], ["a"]),
    ({"type": "array", "items": {"type": "integer"}}, [[], [1, 2]], [["a"], [1, "a"]]),
    ({"type": "array", "items": False}, [[]], [[1]]),
    ({"type": "array", "minItems": 1}, [[1]], [[]]),
    ({"type": "array", "maxItems": 2}, [[], [1, 2]], [[1, 2, 3]]),
    ({"type": "array", "minItems": 2, "maxItems": 2, "items": {"type": "string"}}, [["a", "b"]], [["a"], [1, 2]]),
    ({"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}]}, [[1, "a"], [1], []], [["a"], [1, 2]]),
    ({"type": "array", "prefixItems": [{"type": "integer"}], "items": False}, [[1], []], [[1, 2]]),
    ({"type": "array", "items": [{"type": "integer"}], "additionalItems": False}, [[1]], [["a"], [1, 2]]),
    ({"type": "object", "properties": {"a": {"type": "integer"}}}, [{}, {"a": 1}, {"b": []}], [{"a": "x"}]),
    ({"type": "object", "properties": {"a": {}}, "required": ["a"]}, [{"a": None}], [{}, {"b": 1}]),
    ({"type": "object", "required": ["a", "b"]}, [{"a": 1, "b": 2}], [{"a": 1}, {"b": 1}]),
    ({"type": "object", "properties": {"a": {}}, "additionalProperties": False}, [{}, {"a": 1}], [{"b": 1}]),
    ({"type": "object", "additionalProperties": {"type": "integer"}}, [{"x": 1, "y": 2}], [{"x": "a"}]),
    ({"type": "object", "properties": {"a": False}}, [{}, {"b": 1}], [{"a": 1}]),
    ({"type": "object", "patternProperties": {"^n": {"type": "integer"}}}, [{"n1": 1}, {"x": "a"}], [{"n1": "a"}]),
    (
        {"type": "object", "patternProperties": {"^n": {"type": "integer"}}, "additionalProperties": False},
        [{"n": 1}],
        [{"x": 1}],
    ),
    ({"type": "object", "minProperties": 1}, [{"a": 1}], [{}]),
    ({"type": "object", "maxProperties": 1}, [{}, {"a": 1}], [{"a": 1, "b": 2}]),
    ({"type": "object", "properties": {'q"\\\n': {"type": "integer"}}}, [{'q"\\\n': 1}], [{'q"\\\n': "a"}]),
    ({"type": "object", "properties": {"a": {}}, "unevaluatedProperties": False}, [{"a": 1}], [{"b": 1}]),
    ({"type": "object", "propertyNames": {"type": "string"}}, [{"a": 1}], [[]]),
    ({"type": "array", "uniqueItems": False}, [[1, 1]], [{}]),
    ({"anyOf": [{"type": "integer"}, {"type": "string", "minLength": 2}]}, [1, "ab"], ["a", None]),
    ({"oneOf": [{"type": "integer"}, {"type": "string"}]}, [1, "a"], [None]),
    (
        {"oneOf": [{"type": "object", "properties": {"k": {"const": k}}, "required": ["k"]} for k in ("a", "b")]},
        [{"k": "a"}, {"k": "b"}],
        [{"k": "c"}, {}],
    ),
    ({"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 5}]}, [3, 5], [2, 6]),
    (
        {
            "allOf": [
                {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
                {"type": "object", "properties": {"b": {"type": "string"}}, "required": ["b"]},
            ]
        },
        [{"a": 1, "b": "x"}],
        [{"a": 1}, {"a": 1, "b": 2}],
    ),
    ({"type": "integer", "anyOf": [{"minimum": 10}, {"maximum": 0}]}, [10, 0], [5]),
    (TREE, [{"value": 1}, {"value": 1, "children": [{"value": 2, "children": []}]}], [{"value": 1, "children": [{}]}]),
    ({"$defs": {"a": {"$anchor": "here", "type": "integer"}}, "$ref": "#here"}, [1], ["a"]),
    (
        {"type": "object", "properties": {"next": {"$ref": "#"}}, "additionalProperties": False},
        [{}, {"next": {"next": {}}}],
        [{"next": 1}],
    ),
    (
        {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"$ref": "#/properties/a"}}},
        [{"a": 1, "b": 2}],
        [{"b": "x"}],
    ),
    ({"$defs": {"a/b": {"type": "null"}, "c%d": {"type": "null"}}, "$ref": "#/$defs/a~1b"}, [None], [1]),
    ({"$schema": "http://json-schema.org/draft-04/schema#", "minimum": 3, "exclusiveMinimum": True}, [4], [3]),
    (
        {"type": "string", "title": "t", "description": "d", "default": "x", "examples": ["y"], "nullable": True},
        ["a"],
        [1],
    ),
    ({"x-guidance": {"lenient": True}, "type": "integer"}, [1], ["a"]),
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


class Reader:
    def __init__(self, schema: Any) -> None:
        prepared = prepare_schema(schema, "schema")
        self.relaxed = prepared.relaxed
        self.matcher = matcher(f"%llguidance {{}}\nstart: {json_directive(prepared.schema)}")

    def accepts(self, value: Any) -> bool:
        return any(self._accepts(json.dumps(way, ensure_ascii=False)) for way in orderings(value))

    def _accepts(self, text: str) -> bool:
        self.matcher.reset()
        ids = tokens(text)
        return self.matcher.try_consume_tokens(ids) == len(ids) and self.matcher.is_accepting()


@pytest.mark.parametrize(("schema", "valid", "invalid"), ENFORCED, ids=[json.dumps(case[0])[:60] for case in ENFORCED])
def test_enforced_keywords(schema: Any, valid: list[Any], invalid: list[Any]) -> None:
    reader = Reader(schema)
    assert reader.relaxed == ()
    assert [value for value in valid if not reader.accepts(value)] == []
    assert [value for value in invalid if reader.accepts(value)] == []


A = {"type": "string", "pattern": "^a"}
RELAXED: list[tuple[Any, set[str], list[Any], list[Any]]] = [
    ({"type": "string", "pattern": "^(?!x)a", "maxLength": 3}, {".pattern"}, ["abc", "xyz"], ["abcd", 1]),
    ({"type": "string", "pattern": "(a)\\1"}, {".pattern"}, ["aa"], [1]),
    ({"type": "string", "pattern": "\\bfoo\\b"}, {".pattern"}, ["foo"], [1]),
    ({"type": "string", "format": "postcode"}, {".format"}, ["x"], [1]),
    ({"format": "postcode"}, {".format"}, ["x", 1], []),
    ({"type": "array", "uniqueItems": True, "items": {"type": "integer"}}, {".uniqueItems"}, [[1, 1]], [["a"]]),
    ({"type": "array", "contains": {"type": "integer"}}, {".contains"}, [["a"]], [1]),
    ({"type": "array", "contains": {}, "minContains": 2}, {".contains", ".minContains"}, [[1]], [1]),
    ({"type": "integer", "not": {"const": 3}}, {".not"}, [3, 4], ["a"]),
    ({"type": "integer", "if": {"minimum": 3}, "then": {"maximum": 5}}, {".if", ".then"}, [9], ["a"]),
    ({"type": "object", "propertyNames": {"maxLength": 1}}, {".propertyNames"}, [{"ab": 1}], [1]),
    ({"type": "object", "dependentRequired": {"a": ["b"]}}, {".dependentRequired"}, [{"a": 1}], [1]),
    ({"type": "object", "dependencies": {"a": ["b"], "c": {}}}, {".dependencies"}, [{"a": 1}], [1]),
    ({"type": "integer", "$schema": 5, "$id": 5, "not": {"const": 3}}, {".not"}, [3], ["a"]),
    ({"type": "object", "dependentSchemas": {"a": {}}}, {".dependentSchemas"}, [{"a": 1}], [1]),
    ({"allOf": [{"type": "object"}], "unevaluatedProperties": False}, {".unevaluatedProperties"}, [{"a": 1}], [1]),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, {".oneOf"}, [1, 1.5], ["a"]),
    ({"type": "number", "minimum": -1e308, "maximum": 10}, {".minimum"}, [-5, 10], [11]),
    ({"type": "integer", "minimum": -(10**30), "maximum": 5}, {".minimum"}, [5], [6]),
    ({"type": "integer", "multipleOf": 1000003}, {".multipleOf"}, [1], ["a"]),
    ({"allOf": [{"type": "integer", "multipleOf": n} for n in (997, 991)]}, {".allOf[1].multipleOf"}, [997], [1]),
    ({"type": "object", "properties": {"a": {}, "b": {}}, "minProperties": 2}, {".minProperties"}, [{"a": 1}], [1]),
    (
        {"type": "object", "patternProperties": {"^a": {"type": "integer"}, "b$": {}}, "additionalProperties": False},
        {".patternProperties"},
        [{"a": 1}, {"c": 1}],
        [1],
    ),
    (
        {"type": "object", "properties": {"x y": {"type": "array", "items": {"not": A}}, "z": A}},
        {'.properties["x y"].items.not'},
        [{"x y": ["a"], "z": "a"}],
        [{"z": "b"}],
    ),
]


@pytest.mark.parametrize(
    ("schema", "paths", "accepted", "rejected"), RELAXED, ids=[str(case[0])[:60] for case in RELAXED]
)
def test_relaxed_keywords(schema: Any, paths: set[str], accepted: list[Any], rejected: list[Any]) -> None:
    reader = Reader(schema)
    assert set(reader.relaxed) == {f"schema{path}" for path in paths}
    assert [value for value in accepted if not reader.accepts(value)] == []
    assert [value for value in rejected if reader.accepts(value)] == []


INVALID: list[tuple[Any, str]] = [
    ({"type": "strin"}, ".type"),
    ({"type": 5}, ".type"),
    ({"type": []}, ".type"),
    ({"properties": {"a": {"type": "any"}}}, ".properties.a.type"),
    ({"properties": []}, ".properties"),
    ({"properties": {"a": 5}}, ".properties.a"),
    ({"required": "a"}, ".required"),
    ({"required": [1]}, ".required"),
    ({"anyOf": {}}, ".anyOf"),
    ({"enum": "a"}, ".enum"),
    ({"properties": {"a": ["b"]}}, ".properties.a"),
    ({"dependentRequired": 5}, ".dependentRequired"),
    ({"dependentRequired": {"a": "b"}}, ".dependentRequired"),
    ({"dependentSchemas": {"a": []}}, ".dependentSchemas.a"),
    ({"dependencies": {"a": [1]}}, ".dependencies.a"),
    ({"if": 5}, ".if"),
    ({"not": {"properties": {"a": {"type": "any"}}}}, ".not.properties.a.type"),
    ({"type": "array", "contains": "x"}, ".contains"),
    ({"type": "array", "contains": {}, "minContains": "1"}, ".minContains"),
    ({"type": "array", "uniqueItems": 1}, ".uniqueItems"),
    ({"propertyNames": 1}, ".propertyNames"),
    ({"unevaluatedItems": None}, ".unevaluatedItems"),
    ({"$dynamicRef": 5}, ".$dynamicRef"),
    ({"minLength": -1}, ".minLength"),
    ({"maxItems": 1.5}, ".maxItems"),
    ({"minimum": "3"}, ".minimum"),
    ({"pattern": 5}, ".pattern"),
    ({"type": "string", "pattern": "(["}, ".pattern"),
    ({"type": "string", "pattern": "a{1000000}"}, ".pattern"),
    ({"type": "string", "pattern": "^(a{1000}){1000}$"}, ".pattern"),
    ({"type": "string", "pattern": "a" * 5000}, ".pattern"),
    ({"$ref": "http://example.com/schema"}, ".$ref"),
    ({"$ref": "file:///etc/passwd"}, ".$ref"),
    ({"items": {"$ref": "#/$defs/none"}}, ".items.$ref"),
    ({"$ref": "#nowhere"}, ".$ref"),
    ({"$ref": "#"}, ""),
    ({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, ""),
    ({"$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"}, ""),
    ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, ""),
    ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, ""),
    ({"type": "string", "minLength": 5, "maxLength": 2}, ""),
    ({"type": "object", "properties": {"a": {"type": "string", "enum": [1]}}, "required": ["a"]}, ".properties.a"),
    ({"enum": []}, ""),
    ({"type": "string", "description": "x" * MAX_BYTES}, ""),
    ({"anyOf": [{"const": i} for i in range(5000)]}, ""),
    ({"type": "object", "properties": {f"p{i}": {} for i in range(2000)}}, ".properties"),
]


@pytest.mark.parametrize(("schema", "path"), INVALID, ids=[str(case[0])[:60] for case in INVALID])
def test_invalid_schema_is_rejected_with_its_path(schema: Any, path: str) -> None:
    with pytest.raises(InvalidSchema) as raised:
        Reader(schema)
    assert raised.value.param == f"schema{path}"
    assert str(raised.value).startswith(f"schema{path}: ")
    assert raised.value.status == 400
