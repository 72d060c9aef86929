"""Splits a JSON schema into a part that is enforced while decoding and a part that is checked afterwards.

    prepare := check sizes and values -> relax -> check references and finiteness -> compile, relax on errors

Rules
1. A keyword that cannot be enforced is dropped alone, and its path is reported.
2. An invalid schema (unknown type, malformed pattern, dangling reference, no possible value) raises InvalidSchema with
   the path of the mistake.
3. Annotations and unknown keywords are dropped silently. Known keywords that are not enforced must still be well formed
   because they are checked afterwards.
4. The work is bounded by the size of the text, the number of schemas and a deadline for repairs.
"""

import json
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from llguidance import LLMatcher

from dragoman.core.errors import InvalidSchema, truncate
from dragoman.grammar.schema_limits import DivisorLimit, find_pattern_error, is_enforceable, is_exact
from dragoman.grammar.schema_walk import (
    SCHEMA_MAPS,
    PathParts,
    are_names,
    children,
    find_anchors,
    format_path,
    json_pointer,
    lookup,
    needs_infinite_value,
    rebase_refs,
    resolve_ref,
    rewrite_refs,
    walk_schemas,
)

MAX_BYTES = 256 * 1024
MAX_SCHEMAS = 4000
MAX_PROPERTIES = 1000
"""Per object. The time to compile is quadratic in this number."""
REPAIR_SECONDS = 0.5

WHITESPACE = r"(\x20{1,2}|\n[\x20\t]{0,20})"
"""Whitespace between JSON tokens. It is bounded because a weak model may otherwise never stop writing it."""

TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
STRING_FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
)
COUNT_KEYWORDS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
STRING_KEYWORDS = ("pattern", "format", "$ref", "$anchor", "$id", "$dynamicRef", "$recursiveRef")
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
APPLICATORS = ("$ref", "allOf", "anyOf", "oneOf", "if", "dependentSchemas", "not")
ENFORCED = frozenset(
    {
        *("$ref", "$defs", "definitions", "$anchor", "$id", "allOf", "anyOf", "oneOf", "const", "enum", "type"),
        *("items", "additionalItems", "prefixItems", "properties", "additionalProperties", "patternProperties"),
        *("required", "pattern", "format", *COUNT_KEYWORDS, *BOUNDS, "multipleOf"),
    }
)
UNENFORCED: Mapping[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("if", "then", "else", "contains", "minContains", "maxContains"), lambda value: True),
    **dict.fromkeys(("$dynamicRef", "$recursiveRef"), lambda value: True),
    **dict.fromkeys(("dependencies", "dependentRequired", "dependentSchemas"), bool),
    **dict.fromkeys(("unevaluatedItems", "unevaluatedProperties"), lambda value: value not in (True, {})),
    "not": lambda value: value is not False,
    "uniqueItems": lambda value: value is True,
    "propertyNames": lambda value: value not in (True, {}, {"type": "string"}),
}
"""Known keywords that are not enforced, each with a predicate: does this value restrict anything?"""
META_KEYWORDS = frozenset({"$schema", "$dynamicAnchor"})
"""Keywords that only the validator of finished replies uses."""
_ALWAYS_VALID = frozenset({"type", "$defs", "definitions", "$anchor", "$id"})


class PreparedSchema(msgspec.Struct, frozen=True):
    """`schema` is enforced. `relaxed` are the paths of dropped keywords. `full_schema` also has the known keywords that
    are not enforced."""

    schema: Any
    relaxed: tuple[str, ...] = ()
    full_schema: Any = None


def prepare_schema(schema: Mapping[str, Any], base: str) -> PreparedSchema:
    """Return the enforceable part of a schema. `base` is the path of the schema in the request."""
    size = len(msgspec.json.encode(schema))
    if size > MAX_BYTES:
        raise InvalidSchema(f"{base}: the schema has {size} bytes; at most {MAX_BYTES} are allowed", param=base)
    try:
        return _prepare(schema, base)
    except _SchemaError as error:
        where = truncate(format_path(base, error.parts))
        raise InvalidSchema(f"{where}: {error.problem}", param=where) from error


def json_directive(schema: Any, definitions: str = "") -> str:
    """Return the schema as a `%json` directive of a Lark grammar. `definitions` is a JSON object with more `$defs`."""
    options = {"whitespace_pattern": WHITESPACE}
    document = {**schema, "x-guidance": options} if isinstance(schema, Mapping) else {"x-guidance": options}
    text = json.dumps(document, ensure_ascii=False)
    return f'%json {text[:-1]}, "$defs": {definitions}}}' if definitions else f"%json {text}"


class _SchemaError(Exception):
    def __init__(self, problem: str, parts: PathParts = ()) -> None:
        super().__init__(problem)
        self.problem = problem
        self.parts = parts


def _prepare(schema: Mapping[str, Any], base: str) -> PreparedSchema:
    count = sum(1 for _ in walk_schemas(schema))
    if count > MAX_SCHEMAS:
        raise _SchemaError(f"the schema has {count} subschemas; at most {MAX_SCHEMAS} are allowed")
    # Drop an `$id` that is never referenced, so that the document can be embedded in another one.
    document = {key: value for key, value in schema.items() if key != "$id" or _refers_by_id(schema)}
    full_schema = rewrite_refs(document, str, _is_known)
    _check_values(full_schema)
    enforced = rewrite_refs(full_schema, str, lambda keyword, _: keyword not in META_KEYWORDS)
    relaxed = _relax_keywords(enforced)
    _check_references(enforced)
    if needs_infinite_value(enforced):
        raise _SchemaError("no finite value can satisfy this schema because it requires itself")
    enforced, repaired = _relax_until_valid(enforced)
    return PreparedSchema(enforced, tuple(format_path(base, parts) for parts in relaxed + repaired), full_schema)


def _is_known(keyword: str, value: Any) -> bool:
    return keyword in ENFORCED or keyword in UNENFORCED or (keyword in META_KEYWORDS and isinstance(value, str))


def _refers_by_id(schema: Any) -> bool:
    references = (inner.get("$ref") for _, inner in walk_schemas(schema) if isinstance(inner, Mapping))
    return any(isinstance(reference, str) and not reference.startswith("#") for reference in references)


def _check_references(document: Any) -> None:
    names = find_anchors(document)
    known = {inner["$id"] for _, inner in walk_schemas(document) if isinstance(inner, Mapping) and "$id" in inner}
    for parts, inner in walk_schemas(document):
        reference = inner.get("$ref") if isinstance(inner, Mapping) else None
        if reference is None or resolve_ref(document, reference, names) is not None:
            continue
        target = reference.partition("#")[0].removeprefix(".")
        if not target or not any(target.endswith(name) or name.endswith(target) for name in known):
            raise _SchemaError(
                "the reference is not in this schema, and remote schemas are not fetched", (*parts, "$ref")
            )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_type(value: Any) -> bool:
    types = [value] if isinstance(value, str) else value
    return isinstance(types, list | tuple) and bool(types) and all(name in TYPES for name in types)


_VALUE_CHECKS: tuple[tuple[tuple[str, ...], Callable[[Any], bool], str], ...] = (
    (("type",), _is_type, f"must be one or more of {', '.join(TYPES)}"),
    (SCHEMA_MAPS, lambda value: isinstance(value, Mapping), "must be an object whose values are schemas"),
    (SCHEMA_MAPS, lambda value: len(value) <= MAX_PROPERTIES, f"at most {MAX_PROPERTIES} properties are allowed"),
    (
        ("allOf", "anyOf", "oneOf", "prefixItems", "enum"),
        lambda value: isinstance(value, list | tuple),
        "must be an array",
    ),
    (("required",), are_names, "must be an array of names"),
    (
        ("dependentRequired",),
        lambda value: isinstance(value, Mapping) and all(map(are_names, value.values())),
        "must be an object whose values are arrays of names",
    ),
    (("uniqueItems",), lambda value: isinstance(value, bool), "must be true or false"),
    (STRING_KEYWORDS, lambda value: isinstance(value, str), "must be a string"),
    (
        (*COUNT_KEYWORDS, "minContains", "maxContains"),
        lambda value: _is_number(value) and value >= 0 and value == int(value),
        "must be a whole number, 0 or more",
    ),
    (("exclusiveMinimum", "exclusiveMaximum"), lambda value: isinstance(value, int | float), "must be a number"),
    (("minimum", "maximum", "multipleOf"), _is_number, "must be a number"),
)


def _check_values(document: Any) -> None:
    for parts, schema in walk_schemas(document):
        if isinstance(schema, bool):
            continue
        if not isinstance(schema, Mapping):
            raise _SchemaError("a schema must be an object or a boolean", parts)
        for keyword, value in schema.items():
            for keywords, is_valid, problem in _VALUE_CHECKS:
                if keyword in keywords and not is_valid(value):
                    raise _SchemaError(problem, (*parts, keyword))
            for pattern in [value] if keyword == "pattern" else value if keyword == "patternProperties" else ():
                if (error := find_pattern_error(pattern)) is not None:
                    raise _SchemaError(error, (*parts, keyword))


def _relax_keywords(document: Any) -> list[PathParts]:
    """Drop all keywords that are known not to be enforceable. Return their paths."""
    relaxed: list[PathParts] = []
    divisors = DivisorLimit()
    found: list[tuple[PathParts, Any]] = [((), document)]
    for parts, schema in found:
        if isinstance(schema, dict):
            relaxed += [(*parts, keyword) for keyword in _relax_schema(schema, divisors)]
            # The loop continues with the schemas inside what is left.
            found += [(parts + step, inner) for step, inner in children(schema)]
    return relaxed


def _relax_schema(schema: dict[str, Any], divisors: DivisorLimit) -> list[str]:
    """Drop the keywords of one schema that cannot be enforced. Return those that restrict anything."""
    if "unevaluatedProperties" in schema and not any(keyword in schema for keyword in APPLICATORS):
        # Without applicators, it means the same as additionalProperties.
        schema.setdefault("additionalProperties", schema.pop("unevaluatedProperties"))
    dropped = [keyword for keyword in BOUNDS if keyword in schema and not is_exact(schema[keyword])]
    if "multipleOf" in schema and not divisors.accept(schema["multipleOf"]):
        dropped.append("multipleOf")
    if "pattern" in schema and not is_enforceable(schema["pattern"]):
        dropped.append("pattern")
    if not all(map(is_enforceable, schema.get("patternProperties", ()))):
        dropped += [keyword for keyword in ("patternProperties", "additionalProperties") if keyword in schema]
    for keyword in ("const", "enum"):
        if keyword in schema and not is_exact(schema[keyword]):
            dropped.append(keyword)
            values = [schema[keyword]] if keyword == "const" else schema[keyword]
            schema.setdefault("type", list(dict.fromkeys(map(_type_of, values))))
    ignored = [keyword for keyword in schema if keyword in UNENFORCED]
    dropped += [keyword for keyword in ignored if UNENFORCED[keyword](schema[keyword])]
    if "format" in schema and schema["format"] not in STRING_FORMATS:
        ignored.append("format")
        dropped += ["format"] if "string" in schema.get("type", TYPES) else []
    for keyword in {*dropped, *ignored}:
        del schema[keyword]
    return dropped


def _type_of(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "integer" if value == int(value) else "number"
    if isinstance(value, str):
        return "string"
    return "null" if value is None else "object" if isinstance(value, Mapping) else "array"


def _compile_error(document: Any) -> str:
    return LLMatcher.validate_grammar(f"%llguidance {{}}\nstart: {json_directive(document)}")


def _relax_until_valid(document: Any) -> tuple[Any, list[PathParts]]:
    """Drop keywords until the document compiles. Return it with the paths of the dropped keywords."""
    relaxed: list[PathParts] = []
    deadline = time.monotonic() + REPAIR_SECONDS
    while error := _compile_error(document):
        parts, problem = _find_invalid(document, error, deadline)
        relaxation = None if "Unsatisfiable" in problem else _drop_keyword(document, parts)
        if relaxation is None or time.monotonic() > deadline:
            # Without the position in the generated grammar.
            line = problem.splitlines()[0]
            raise _SchemaError(line.partition("JSON schema: ")[2] or line, parts)
        document, keyword = relaxation
        relaxed.append((*parts, keyword))
    return document, relaxed


def _find_invalid(document: Any, error: str, deadline: float) -> tuple[PathParts, str]:
    """Return the path of the innermost schema that does not compile, and its error."""
    for parts, inner in walk_schemas(document):
        if time.monotonic() > deadline:
            break
        if parts and isinstance(inner, Mapping) and not _ALWAYS_VALID.issuperset(inner):
            problem = _compile_error(_isolate(document, parts))
            if problem:
                return parts, problem
    return (), error


def _isolate(document: Any, parts: PathParts) -> dict[str, Any]:
    """Return one schema of a document as a document of its own, with everything it may refer to."""
    return {"$ref": f"#/$defs/all{json_pointer(parts)}", "$defs": {"all": rebase_refs(document, "/$defs/all")}}


def _drop_keyword(document: Any, parts: PathParts) -> tuple[Any, str] | None:
    """Drop the keyword that prevents the schema at a path from compiling. None if no single keyword does."""
    schema = lookup(document, parts)
    for keyword in ("oneOf", "minProperties", "maxProperties", "patternProperties", "multipleOf", "allOf", *schema):
        if keyword not in schema:
            continue
        reduced = {key: value for key, value in schema.items() if key != keyword}
        if keyword == "oneOf":
            reduced["allOf"] = [*reduced.get("allOf", ()), {"anyOf": schema["oneOf"]}]
        if keyword == "patternProperties":
            reduced.pop("additionalProperties", None)
        candidate = _replace_at(document, parts, reduced)
        if not _compile_error(_isolate(candidate, parts)):
            return candidate, keyword
    return None


def _replace_at(document: Any, parts: PathParts, schema: Any) -> Any:
    if not parts:
        return schema
    copy = dict(document) if isinstance(document, Mapping) else list(document)
    copy[parts[0]] = _replace_at(document[parts[0]], parts[1:], schema)  # type: ignore[index]
    return copy
