"""The shape a caller wants the reply to have. OpenAI has one word for it, other servers have theirs; all of them do.

    response_format := {type: text | json_object [, schema] | json_schema, json_schema: {schema, name, strict}}
                     | {type: regex, pattern} | {type: grammar, grammar}
    schema          := json_schema | guided_json | structured_outputs.json             an object, or its JSON text
    regex           := regex | guided_regex | structured_outputs.regex
    choice          := guided_choice | structured_outputs.choice
    grammar         := grammar | guided_grammar | structured_outputs.grammar           in Lark's notation

Rules
1. A request has one shape; two are a mistake, even where they agree.
2. A field that is null or false asks for nothing; text must not be empty.
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


class ShapeFields(msgspec.Struct, frozen=True):
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


FIELDS = frozenset(ShapeFields.__struct_fields__)


def decode(parsed: dict[str, Any], asked: list[Asked]) -> Constraint | None:
    if parsed.keys().isdisjoint(FIELDS):
        return None
    fields = json_body.convert(parsed, ShapeFields)
    _note_what_nobody_offers(fields, parsed, asked)
    shapes = _response_format(fields.response_format)
    for path, read in READERS.items():
        value = json_body.at(parsed, path)
        if value == "":
            raise BadRequest(f"{path}: must not be empty", param=path)
        if value is not None and value is not False:
            shapes[path] = read(value, path)
    if len(shapes) > 1:
        first, second = list(shapes)[:2]
        raise BadRequest(f"{second}: a reply has one shape, and {first} gives it already", param=second)
    asked += [Asked("constraint", path) for path in shapes]
    return next(iter(shapes.values()), None)


def _note_what_nobody_offers(fields: ShapeFields, parsed: dict[str, Any], asked: list[Asked]) -> None:
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


def _regex(value: Any, path: str) -> Constraint:
    return Regex(value)


def _grammar(value: Any, path: str) -> Constraint:
    return Grammar(value)


def _choices(value: Any, path: str) -> Constraint:
    return OneOf(tuple(value))


def _any_object(value: Any, path: str) -> Constraint:
    return JsonObject()


READERS: dict[str, Callable[[Any, str], Constraint]] = {
    "json_schema": _schema,
    "guided_json": _schema,
    "structured_outputs.json": _schema,
    "structured_outputs.json_object": _any_object,
    "guided_choice": _choices,
    "structured_outputs.choice": _choices,
    "guided_regex": _regex,
    "structured_outputs.regex": _regex,
    "regex": _regex,
    "guided_grammar": _grammar,
    "structured_outputs.grammar": _grammar,
    "grammar": _grammar,
}


def _response_format(field: ResponseFormat | None) -> dict[str, Constraint]:
    """What it gives under its path; nothing where it asks for nothing that is a shape."""
    if field is None or field.type in ("text", "structural_tag"):
        return {}
    if field.type == "json_schema":
        return {"response_format": _format_schema(field)}
    if field.type == "json_object":
        return {"response_format": JsonObject() if field.schema is None else _plain_schema(field.schema)}
    if field.type == "grammar":
        return {"response_format": Grammar(_needed(field.grammar, "grammar", field.type))}
    return {"response_format": Regex(_needed(field.pattern or field.regex, "pattern", field.type))}


def _format_schema(field: ResponseFormat) -> Constraint:
    if field.json_schema is None and field.schema is None:
        path = "response_format.json_schema"
        raise BadRequest(f"{path}: required with type json_schema", param=path)
    given = field.json_schema
    if given is None:
        return _plain_schema(field.schema or {})
    if given.schema is None:
        # OpenAI's `schema` may be left out: then any object will do.
        return JsonObject()
    path = "response_format.json_schema.schema"
    return JsonSchema(given.schema, given.name or "response", bool(given.strict), path)


def _plain_schema(schema: Schema) -> Constraint:
    """One that stands in the field itself."""
    return JsonSchema(schema, path="response_format.schema")


def _needed(value: str | None, name: str, kind: str) -> str:
    if not value:
        path = f"response_format.{name}"
        raise BadRequest(f"{path}: required with type {kind}", param=path)
    return value
