"""Decodes the fields that constrain the output: OpenAI's `response_format` and those of other servers.

    response_format := {type: text | json_object [, schema] | json_schema, json_schema: {schema, name, strict}}
                     | {type: regex, pattern} | {type: grammar, grammar}
    schema          := json_schema | guided_json | structured_outputs.json             an object or JSON text
    regex           := regex | guided_regex | structured_outputs.regex
    choice          := guided_choice | structured_outputs.choice
    grammar         := grammar | guided_grammar | ebnf | structured_outputs.grammar    in Lark or GBNF

Rules
1. A request sets at most one constraint, even if two would agree.
2. A field that is null or false is ignored; text must not be empty.
3. `ebnf` is SGLang's. XGrammar, which reads it there, allows more than two digits after `\\x`; they are refused here.
"""

import re
from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from dragoman.core.errors import BadRequest
from dragoman.core.features import Feature
from dragoman.core.request import Asked, Constraint, Grammar, JsonObject, JsonSchema, OneOf, Regex
from dragoman.protocols import json_body

LONG_ESCAPE = re.compile(r"(?<!\\)(?:\\\\)*(\\x[0-9A-Fa-f]{3,12})")
Choices = Annotated[list[str], msgspec.Meta(min_length=1)]
Schema = dict[str, Any]
T = TypeVar("T")


class SchemaField(msgspec.Struct, frozen=True):
    schema: Schema | None = None
    name: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, frozen=True):
    type: Literal["text", "json_object", "json_schema", "regex", "grammar", "structural_tag"]
    json_schema: SchemaField | None = None
    schema: Schema | None = None
    pattern: str | None = None
    regex: str | None = None
    grammar: str | None = None


class StructuredOutputs(msgspec.Struct, frozen=True):
    json: Schema | str | None = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Any = None


class ConstraintFields(msgspec.Struct, frozen=True):
    response_format: ResponseFormat | None = None
    json_schema: Schema | None = None
    guided_json: Schema | str | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    structured_outputs: StructuredOutputs | None = None
    regex: str | None = None
    grammar: str | None = None
    ebnf: str | None = None
    structural_tag: Any = None


FIELDS = frozenset(ConstraintFields.__struct_fields__)


def decode(parsed: dict[str, Any], asked: list[Asked]) -> Constraint | None:
    if parsed.keys().isdisjoint(FIELDS):
        return None
    fields = json_body.convert(parsed, ConstraintFields)
    constraints = _response_format(fields.response_format, asked)
    for path, decoder in DECODERS.items():
        value = json_body.get_path(parsed, path)
        if value == "":
            raise BadRequest(f"{path}: must not be empty", param=path)
        if value is not None and value is not False:
            constraints[path] = decoder(value, path)
    tags = ("structural_tag", "structured_outputs.structural_tag")
    asked += [Asked(Feature.STRUCTURAL_TAG, path) for path in tags if json_body.get_path(parsed, path) is not None]
    outputs = parsed.get("structured_outputs") or {}
    unknown = json_body.unknown_fields(outputs, StructuredOutputs)
    asked += [Asked(Feature.UNKNOWN, f"structured_outputs.{name}") for name in unknown if outputs[name] is not False]
    if len(constraints) > 1:
        first, second = list(constraints)[:2]
        raise BadRequest(f"{second}: only one output format is allowed, and {first} already sets it", param=second)
    asked += [Asked(Feature.CONSTRAINT, path) for path in constraints]
    return next(iter(constraints.values()), None)


def _ebnf(value: str, path: str) -> Constraint:
    if found := LONG_ESCAPE.search(value):
        problem = f"{found[1]} has more than two digits; write \\u and four digits, or \\U and eight"
        raise BadRequest(f"{path}: {problem}", param=path)
    return Grammar(value)


def _schema(value: Any, path: str) -> Constraint:
    return JsonSchema(json_body.parse_text(value, path) if isinstance(value, str) else value, path=path)


DECODERS: dict[str, Callable[[Any, str], Constraint]] = {
    **dict.fromkeys(("json_schema", "guided_json", "structured_outputs.json"), _schema),
    "structured_outputs.json_object": lambda value, path: JsonObject(),
    **dict.fromkeys(("guided_choice", "structured_outputs.choice"), lambda value, path: OneOf(tuple(value))),
    **dict.fromkeys(("guided_regex", "structured_outputs.regex", "regex"), lambda value, path: Regex(value)),
    **dict.fromkeys(("guided_grammar", "structured_outputs.grammar", "grammar"), lambda value, path: Grammar(value)),
    "ebnf": _ebnf,
}


def _response_format(field: ResponseFormat | None, asked: list[Asked]) -> dict[str, Constraint]:
    """Return the constraint with its path, or an empty dict."""
    if field is None or field.type == "text":
        return {}
    if field.type == "structural_tag":
        asked.append(Asked(Feature.STRUCTURAL_TAG, "response_format.type"))
        return {}
    if field.type == "grammar":
        return {"response_format": Grammar(_require(field.grammar, "grammar", field.type))}
    if field.type == "regex":
        return {"response_format": Regex(_require(field.pattern or field.regex, "pattern", field.type))}
    if field.type == "json_schema" and field.json_schema is not None:
        inner, path = field.json_schema, "response_format.json_schema.schema"
        if inner.schema is None:
            # `schema` is optional in OpenAI's API: without it, any object is valid.
            return {"response_format": JsonObject()}
        return {"response_format": JsonSchema(inner.schema, inner.name or "response", bool(inner.strict), path)}
    if field.type == "json_schema":
        _require(field.schema, "json_schema", field.type)
    if field.schema is not None:
        return {"response_format": JsonSchema(field.schema, path="response_format.schema")}
    return {"response_format": JsonObject()}


def _require(value: T | None, name: str, kind: str) -> T:
    if value is None or value == "":
        path = f"response_format.{name}"
        raise BadRequest(f"{path}: required with type {kind}", param=path)
    return value
