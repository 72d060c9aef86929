"""Splits a JSON schema into a part that is enforced while decoding and a part that is checked afterwards.

    prepare := check sizes -> clean each schema -> check references -> check finiteness -> compile, relax on errors

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
from dragoman.grammar.finiteness import needs_infinite_value
from dragoman.grammar.number_bounds import NumberBounds, is_exact
from dragoman.grammar.patterns import MalformedPattern, is_enforceable
from dragoman.grammar.schema_walk import (
    SCHEMA_LISTS,
    SCHEMA_MAPS,
    SINGLE_SCHEMAS,
    PathParts,
    find_anchors,
    format_path,
    json_pointer,
    lookup,
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
FORMATS = frozenset({"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"})
COUNT_KEYWORDS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
STRING_KEYWORDS = ("pattern", "format", "$ref", "$anchor", "$id", "$dynamicRef", "$recursiveRef")
NUMBER_KEYWORDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
APPLICATORS = ("$ref", "allOf", "anyOf", "oneOf", "if", "dependentSchemas", "not")
ENFORCED = frozenset(
    {
        *("$ref", "$defs", "definitions", "$anchor", "$id", "allOf", "anyOf", "oneOf", "const", "enum", "type"),
        *("items", "additionalItems", "prefixItems", "properties", "additionalProperties", "patternProperties"),
        *("required", "pattern", "format", *COUNT_KEYWORDS, *NUMBER_KEYWORDS),
    }
)
UNENFORCED: Mapping[str, Callable[[Any], bool]] = {
    "not": lambda value: value is not False,
    "if": lambda value: True,
    "then": lambda value: True,
    "else": lambda value: True,
    "uniqueItems": lambda value: value is True,
    "contains": lambda value: True,
    "minContains": lambda value: True,
    "maxContains": lambda value: True,
    "propertyNames": lambda value: value not in (True, {}, {"type": "string"}),
    "dependencies": bool,
    "dependentRequired": bool,
    "dependentSchemas": bool,
    "unevaluatedItems": lambda value: value not in (True, {}),
    "unevaluatedProperties": lambda value: value not in (True, {}),
    "$dynamicRef": lambda value: True,
    "$recursiveRef": lambda value: True,
}
"""Known keywords that are not enforced, each with a predicate: does this value restrict anything?"""

_ALWAYS_VALID = frozenset({"type", "$defs", "definitions", "$anchor", "$id"})
META_KEYWORDS = frozenset({"$schema", "$dynamicAnchor"})
"""Keywords that only the validator of finished replies uses."""


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
        prepared = _prepare(schema)
    except _SchemaError as error:
        where = truncate(format_path(base, error.parts))
        raise InvalidSchema(f"{where}: {error.problem}", param=where) from error
    return PreparedSchema(prepared.schema, tuple(base + path for path in prepared.relaxed), prepared.full_schema)


class _SchemaError(Exception):
    def __init__(self, problem: str, parts: PathParts = ()) -> None:
        super().__init__(problem)
        self.problem = problem
        self.parts = parts


def _prepare(schema: Mapping[str, Any]) -> PreparedSchema:
    count = sum(1 for _ in walk_schemas(schema))
    if count > MAX_SCHEMAS:
        raise _SchemaError(f"the schema has {count} subschemas; at most {MAX_SCHEMAS} are allowed")
    cleaner = _Cleaner()
    # Drop an `$id` that is never referenced, so that the document can be embedded in another one.
    document = {key: value for key, value in schema.items() if key != "$id" or _refers_by_id(schema)}
    cleaned = cleaner.clean(document, ())
    _check_references(cleaned)
    if needs_infinite_value(cleaned):
        raise _SchemaError("no finite value can satisfy this schema because it requires itself")
    repaired, relaxed = _relax_until_valid(cleaned)
    return PreparedSchema(repaired, (*cleaner.relaxed, *relaxed), rewrite_refs(document, str, _is_known))


def _is_known(keyword: str, value: Any) -> bool:
    return keyword in ENFORCED or keyword in UNENFORCED or (keyword in META_KEYWORDS and isinstance(value, str))


def json_directive(schema: Any, definitions: str = "") -> str:
    """Return the schema as a `%json` directive of a Lark grammar. `definitions` is a JSON object with more `$defs`."""
    options = {"whitespace_pattern": WHITESPACE}
    document = {**schema, "x-guidance": options} if isinstance(schema, Mapping) else {"x-guidance": options}
    text = json.dumps(document, ensure_ascii=False)
    return f'%json {text[:-1]}, "$defs": {definitions}}}' if definitions else f"%json {text}"


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


class _Cleaner:
    def __init__(self) -> None:
        self.relaxed: list[str] = []
        self.bounds = NumberBounds()

    def clean(self, schema: Any, parts: PathParts) -> Any:
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, Mapping):
            raise _SchemaError("a schema must be an object or a boolean", parts)
        copy: dict[str, Any] = {}
        for keyword, value in schema.items():
            if keyword in ENFORCED:
                self._check(keyword, value, (*parts, keyword))
                copy[keyword] = self._clean_inner(keyword, value, (*parts, keyword))
            elif keyword in UNENFORCED:
                self._check(keyword, value, (*parts, keyword))
                self._drop_unenforced(keyword, schema, copy, parts)
        self._relax_strings(copy, parts)
        for keyword in self.bounds.find_unenforceable(copy):
            self._relax(copy, keyword, parts)
        self._relax_values(copy, parts)
        return copy

    def _clean_inner(self, keyword: str, value: Any, parts: PathParts) -> Any:
        if keyword in SCHEMA_LISTS and isinstance(value, list | tuple):
            return [self.clean(inner, (*parts, index)) for index, inner in enumerate(value)]
        if keyword in SCHEMA_MAPS:
            # `dependencies` may have names instead of a schema.
            schemas = {
                name: inner for name, inner in value.items() if keyword != "dependencies" or not _are_names(inner)
            }
            return {name: self.clean(inner, (*parts, name)) for name, inner in schemas.items()}
        return self.clean(value, parts) if keyword in SINGLE_SCHEMAS else value

    def _drop_unenforced(self, keyword: str, schema: Mapping[str, Any], copy: dict[str, Any], parts: PathParts) -> None:
        # Without applicators, unevaluatedProperties means the same as additionalProperties.
        plain = "additionalProperties" not in schema and not any(other in schema for other in APPLICATORS)
        value, is_relevant = schema[keyword], UNENFORCED[keyword](schema[keyword])
        if keyword == "unevaluatedProperties" and plain and is_relevant:
            copy["additionalProperties"] = self.clean(value, (*parts, keyword))
            return
        # Only for its errors: the keyword is reported as a whole.
        _Cleaner()._clean_inner(keyword, value, (*parts, keyword))
        if is_relevant:
            self.relaxed.append(format_path("", (*parts, keyword)))

    def _relax(self, schema: dict[str, Any], keyword: str, parts: PathParts) -> None:
        del schema[keyword]
        self.relaxed.append(format_path("", (*parts, keyword)))

    def _relax_values(self, schema: dict[str, Any], parts: PathParts) -> None:
        """Relax values with numbers that llguidance would round or crash on to their types."""
        for keyword in ("const", "enum"):
            if keyword in schema and not is_exact(schema[keyword]):
                values = [schema[keyword]] if keyword == "const" else schema[keyword]
                schema.setdefault("type", list(dict.fromkeys(map(_type_of, values))))
                self._relax(schema, keyword, parts)

    def _relax_strings(self, schema: dict[str, Any], parts: PathParts) -> None:
        if "format" in schema and schema["format"] not in FORMATS:
            if "string" in _types(schema):
                self._relax(schema, "format", parts)
            else:
                del schema["format"]
        if "pattern" in schema and not self._is_enforceable(schema["pattern"], (*parts, "pattern")):
            self._relax(schema, "pattern", parts)
        patterns = schema.get("patternProperties", {})
        if not all(self._is_enforceable(pattern, (*parts, "patternProperties")) for pattern in patterns):
            self._relax(schema, "patternProperties", parts)
            if "additionalProperties" in schema:
                self._relax(schema, "additionalProperties", parts)

    def _is_enforceable(self, pattern: str, parts: PathParts) -> bool:
        try:
            return is_enforceable(pattern)
        except MalformedPattern as problem:
            raise _SchemaError(str(problem), parts) from problem

    def _check(self, keyword: str, value: Any, parts: PathParts) -> None:
        for keywords, is_valid, problem in _VALUE_CHECKS:
            if keyword in keywords and not is_valid(value):
                raise _SchemaError(problem, parts)


def _types(schema: Mapping[str, Any]) -> tuple[str, ...]:
    declared = schema.get("type", TYPES)
    return (declared,) if isinstance(declared, str) else tuple(declared)


def _type_of(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "integer" if value == int(value) else "number"
    if isinstance(value, str):
        return "string"
    return "null" if value is None else "object" if isinstance(value, Mapping) else "array"


def _are_names(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(name, str) for name in value)


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
    (("required",), _are_names, "must be an array of names"),
    (
        ("dependentRequired",),
        lambda value: isinstance(value, Mapping) and all(map(_are_names, value.values())),
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


def _compile_error(document: Any) -> str:
    return LLMatcher.validate_grammar(f"%llguidance {{}}\nstart: {json_directive(document)}")


def _relax_until_valid(document: Any) -> tuple[Any, list[str]]:
    """Drop keywords until the document compiles. Return it with the paths of the dropped keywords."""
    relaxed: list[str] = []
    deadline = time.monotonic() + REPAIR_SECONDS
    while error := _compile_error(document):
        parts, problem = _find_invalid(document, error, deadline)
        relaxation = None if "Unsatisfiable" in problem else _drop_keyword(document, parts)
        if relaxation is None or time.monotonic() > deadline:
            # Without the position in the generated grammar.
            line = problem.splitlines()[0]
            raise _SchemaError(line.partition("JSON schema: ")[2] or line, parts)
        document, keyword = relaxation
        relaxed.append(format_path("", (*parts, keyword)))
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
