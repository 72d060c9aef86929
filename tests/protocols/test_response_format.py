"""Decoding of the fields that constrain the output."""

import json
from functools import partial
from typing import Any

import pytest

from dragoman.core.errors import BadRequest
from dragoman.core.request import Constraint, Grammar, JsonObject, JsonSchema, OneOf, Regex
from tests.protocols import wire
from tests.protocols.wire import features, invalid, rejected_param

decode = partial(wire.decode, "chat")


SCHEMA_PATH = "response_format.json_schema.schema"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 9007199254740991}}}
LARK = 'start: "a" | "b"'


def output(kind: str, **fields: Any) -> dict[str, Any]:
    return {"response_format": {"type": kind, **fields}}


def nested(path: str, value: Any) -> dict[str, Any]:
    """Return the fields of a request that has this value at the path."""
    outer, dot, inner = path.partition(".")
    return {outer: {inner: value} if dot else value}


FORMATS: list[tuple[dict[str, Any], Constraint]] = [
    (output("json_object"), JsonObject()),
    (output("json_object", schema=SCHEMA), JsonSchema(SCHEMA, path="response_format.schema")),
    (
        output("json_schema", json_schema={"name": "r", "schema": SCHEMA, "strict": True, "description": "d"}),
        JsonSchema(SCHEMA, "r", strict=True, path=SCHEMA_PATH),
    ),
    (output("json_schema", json_schema={"schema": SCHEMA}), JsonSchema(SCHEMA, strict=False, path=SCHEMA_PATH)),
    (output("json_schema", json_schema={"name": "r"}), JsonObject()),
    (output("json_schema", schema=SCHEMA), JsonSchema(SCHEMA, path="response_format.schema")),
    (output("regex", pattern="a+"), Regex("a+")),
    (output("regex", regex="a+"), Regex("a+")),
    (output("grammar", grammar=LARK), Grammar(LARK)),
]
OTHER_FIELDS: list[tuple[str, Any, Constraint]] = [
    ("json_schema", SCHEMA, JsonSchema(SCHEMA, path="json_schema")),
    ("guided_json", SCHEMA, JsonSchema(SCHEMA, path="guided_json")),
    ("guided_json", json.dumps(SCHEMA), JsonSchema(SCHEMA, path="guided_json")),
    ("structured_outputs.json", SCHEMA, JsonSchema(SCHEMA, path="structured_outputs.json")),
    ("structured_outputs.json", json.dumps(SCHEMA), JsonSchema(SCHEMA, path="structured_outputs.json")),
    ("structured_outputs.json_object", True, JsonObject()),
    ("guided_choice", ["yes", "no"], OneOf(("yes", "no"))),
    ("structured_outputs.choice", ["yes"], OneOf(("yes",))),
    *((path, "a+", Regex("a+")) for path in ("regex", "guided_regex", "structured_outputs.regex")),
    *((path, LARK, Grammar(LARK)) for path in ("grammar", "guided_grammar", "structured_outputs.grammar", "ebnf")),
]
CASES = [(fields, constraint, "response_format") for fields, constraint in FORMATS]
CASES += [(nested(path, value), constraint, path) for path, value, constraint in OTHER_FIELDS]


@pytest.mark.parametrize(("fields", "constraint", "param"), CASES)
def test_constraint_fields(fields: dict[str, Any], constraint: Constraint, param: str) -> None:
    request = decode(**fields)
    assert request.constraint == constraint
    assert features(request) == {("constraint", param)}


@pytest.mark.parametrize("grammar", [r'root ::= "\x41" [\x30-\x39g]', r'root ::= "\\x41A"'])
def test_ebnf_with_unambiguous_escapes(grammar: str) -> None:
    assert decode(ebnf=grammar).constraint == Grammar(grammar)
    assert features(wire.decode("completions", ebnf=grammar)) == {("constraint", "ebnf")}


@pytest.mark.parametrize(
    "fields",
    [
        output("text"),
        {"grammar": None, "regex": None, "guided_json": None, "structural_tag": None},
        {"structured_outputs": {"json_object": False, "regex": None, "whitespace_pattern": None}},
        {**output("text"), "structured_outputs": None},
    ],
)
def test_no_constraint(fields: dict[str, Any]) -> None:
    request = decode(**fields)
    assert request.constraint is None
    assert features(request) == set()


def test_unsupported_fields_are_reported() -> None:
    request = decode(**output("structural_tag", structures=[]))
    assert (request.constraint, features(request)) == (None, {("structural_tag", "response_format.type")})
    request = decode(structural_tag={"structures": [], "triggers": []})
    assert (request.constraint, features(request)) == (None, {("structural_tag", "structural_tag")})
    assert features(decode(structured_outputs={"structural_tag": "{}", "whitespace_pattern": " "})) == {
        ("structural_tag", "structured_outputs.structural_tag"),
        ("unknown", "structured_outputs.whitespace_pattern"),
    }


DEEP: dict[str, Any] = {"guided_json": '{"a":' * 70 + "1" + "}" * 70}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (output("json_schema"), "response_format.json_schema"),
        (output("json_schema", json_schema={"schema": True}), "response_format.json_schema.schema"),
        (output("json_schema", json_schema={"schema": "{}"}), "response_format.json_schema.schema"),
        (output("json_object", schema=[1]), "response_format.schema"),
        (output("regex"), "response_format.pattern"),
        (output("grammar", pattern="a"), "response_format.grammar"),
        (output("poem"), "response_format.type"),
        ({"response_format": "json"}, "response_format"),
        ({"json_schema": True}, "json_schema"),
        *invalid("guided_json", "guided_json", "true", "{", '{"a": 1, "a": 2}'),
        (DEEP, "guided_json"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": [1]}, "guided_choice[0]"),
        ({"structured_outputs": {"choice": "a"}}, "structured_outputs.choice"),
        ({"structured_outputs": {"json": "["}}, "structured_outputs.json"),
        ({"ebnf": 5}, "ebnf"),
        ({"ebnf": ""}, "ebnf"),
        ({"ebnf": r'root ::= "\x1F600"'}, "ebnf"),
        ({"ebnf": r'root ::= "\\\x41A"'}, "ebnf"),
    ],
)
def test_invalid_field_is_named(fields: dict[str, Any], param: str) -> None:
    assert rejected_param("chat", **fields) == param


@pytest.mark.parametrize("name", ["regex", "guided_regex", "grammar", "guided_grammar", "guided_json"])
def test_empty_text_is_rejected(name: str) -> None:
    with pytest.raises(BadRequest, match=f"^{name}: must not be empty$"):
        decode(**{name: ""})
    kind = name.removeprefix("guided_")
    with pytest.raises(BadRequest, match=rf"^structured_outputs\.{kind}: must not be empty$"):
        decode(structured_outputs={kind: ""})


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({**output("json_object"), "guided_json": SCHEMA}, "guided_json"),
        ({"regex": "a", "grammar": LARK}, "grammar"),
        ({"grammar": LARK, "ebnf": LARK}, "ebnf"),
        ({"structured_outputs": {"json": SCHEMA, "regex": "a"}}, "structured_outputs.regex"),
    ],
)
def test_two_constraints_are_rejected(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest, match="only one output format") as caught:
        decode(**fields)
    assert caught.value.param == param
