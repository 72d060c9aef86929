"""Decodes the fields that constrain the output: OpenAI's `response_format` and those of other servers.

    response_format := {type: text | json_object [, schema] | json_schema, json_schema: {schema, name, strict}}
                     | {type: regex, pattern} | {type: grammar, grammar}
    schema          := json_schema | guided_json | structured_outputs.json             an object or JSON text
    regex           := regex | guided_regex | structured_outputs.regex
    choice          := guided_choice | structured_outputs.choice
    grammar         := grammar | guided_grammar | structured_outputs.grammar           in Lark syntax

Rules
1. A request sets at most one constraint, even if two would agree.
2. A field that is null or false is ignored; text must not be empty.
"""

from collections.abc import Callable
from typing import Annotated, Any, Literal

import msgspec

from dragoman.core.errors import BadRequest
from dragoman.core.request import Asked, Constraint, Grammar, JsonObject, JsonSchema, OneOf, Regex
from dragoman.protocols import json_body

Choices = Annotated[list[str], msgspec.Meta(min_length=1)]
Schema = dict[str, Any]


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
    structural_tag: Any = None


FIELDS = frozenset(ConstraintFields.__struct_fields__)


def decode(parsed: dict[str, Any], asked: list[Asked]) -> Constraint | None:
    if parsed.keys().isdisjoint(FIELDS):
        return None
    fields = json_body.convert(parsed, ConstraintFields)
    _note_unsupported(fields, parsed, asked)
    constraints = _response_format(fields.response_format)
    for path, decoder in DECODERS.items():
        value = json_body.get_path(parsed, path)
        if value == "":
            raise BadRequest(f"{path}: must not be empty", param=path)
        if value is not None and value is not False:
            constraints[path] = decoder(value, path)
    if len(constraints) > 1:
        first, second = list(constraints)[:2]
        raise BadRequest(f"{second}: only one output format is allowed, and {first} already sets it", param=second)
    asked += [Asked("constraint", path) for path in constraints]
    return next(iter(constraints.values()), None)


def _note_unsupported(fields: ConstraintFields, parsed: dict[str, Any], asked: list[Asked]) -> None:
    if fields.response_format is not None and fields.response_format.type == "structural_tag":
        asked.append(Asked("structural_tag", "response_format.type"))
    if fields.structural_tag is not None:
        asked.append(Asked("structural_tag", "structural_tag"))
    if fields.structured_outputs is None:
        return
    if fields.structured_outputs.structural_tag is not None:
        asked.append(Asked("structural_tag", "structured_outputs.structural_tag"))
    inner = parsed["structured_outputs"]
    unknown = [name for name in json_body.unknown_fields(inner, StructuredOutputs) if inner[name] not in (None, False)]
    asked += [Asked("unknown", f"structured_outputs.{name}") for name in unknown]


def _schema(value: Any, path: str) -> Constraint:
    return JsonSchema(json_body.parse_text(value, path) if isinstance(value, str) else value, path=path)


DECODERS: dict[str, Callable[[Any, str], Constraint]] = {
    "json_schema": _schema,
    "guided_json": _schema,
    "structured_outputs.json": _schema,
    "structured_outputs.json_object": lambda value, path: JsonObject(),
    "guided_choice": lambda value, path: OneOf(tuple(value)),
    "structured_outputs.choice": lambda value, path: OneOf(tuple(value)),
    "guided_regex": lambda value, path: Regex(value),
    "structured_outputs.regex": lambda value, path: Regex(value),
    "regex": lambda value, path: Regex(value),
    "guided_grammar": lambda value, path: Grammar(value),
    "structured_outputs.grammar": lambda value, path: Grammar(value),
    "grammar": lambda value, path: Grammar(value),
}


def _response_format(field: ResponseFormat | None) -> dict[str, Constraint]:
    """Return the constraint with its path, or an empty dict."""
    if field is None or field.type in ("text", "structural_tag"):
        return {}
    if field.type == "json_schema":
        return {"response_format": _format_schema(field)}
    if field.type == "json_object":
        return {"response_format": JsonObject() if field.schema is None else _inline_schema(field.schema)}
    if field.type == "grammar":
        return {"response_format": Grammar(_require(field.grammar, "grammar", field.type))}
    return {"response_format": Regex(_require(field.pattern or field.regex, "pattern", field.type))}


def _format_schema(field: ResponseFormat) -> Constraint:
    path = "response_format.json_schema"
    inner = field.json_schema
    if inner is None:
        if field.schema is None:
            raise BadRequest(f"{path}: required with type json_schema", param=path)
        return _inline_schema(field.schema)
    if inner.schema is None:
        # `schema` is optional in OpenAI's API: without it, any object is valid.
        return JsonObject()
    return JsonSchema(inner.schema, inner.name or "response", bool(inner.strict), f"{path}.schema")


def _inline_schema(schema: Schema) -> Constraint:
    """Return the constraint for a schema in `response_format` itself."""
    return JsonSchema(schema, path="response_format.schema")


def _require(value: str | None, name: str, kind: str) -> str:
    if not value:
        path = f"response_format.{name}"
        raise BadRequest(f"{path}: required with type {kind}", param=path)
    return value
