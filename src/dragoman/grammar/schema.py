"""What of a JSON Schema can be enforced while a model writes, and what cannot.

    prepare := sizes -> clean every schema -> references -> finite -> compile -> repair what does not

Rules
1. A keyword that cannot be enforced is left out alone, at its own place, and that place is reported.
2. What can mean nothing (an unknown type, a pattern that is none, a reference that leads nowhere, a schema without a
   value) is an InvalidSchema that names the place.
3. Annotations and unknown keywords are nobody's business here and are left out silently. A keyword that is known and
   not enforced is looked at afterwards, so it has to be well formed like the others.
4. The work is bounded before it begins: by the size of the text, the number of schemas, and a deadline for repairs.
"""

import json
import time
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import msgspec
from llguidance import LLMatcher

from dragoman.core.errors import InvalidSchema, cut
from dragoman.grammar.finiteness import endless
from dragoman.grammar.number_bounds import Bounds, is_exact
from dragoman.grammar.patterns import MalformedPattern, enforceable
from dragoman.grammar.schema_walk import (
    NAMED,
    ONE,
    SEVERAL,
    Parts,
    anchors,
    at,
    named,
    pointer,
    rebased,
    referring,
    resolve,
)
from dragoman.grammar.schema_walk import walk as all_schemas

MOST_BYTES = 256 * 1024
MOST_SCHEMAS = 4000
MOST_PROPERTIES = 1000
"""Of one object: the time to compile grows with their square."""
REPAIR_SECONDS = 0.5

WHITE = r"(\x20{1,2}|\n[\x20\t]{0,20})"
"""White space between the tokens of JSON. Bounded: a weak model would go on with it forever."""

TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"},
)
COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
COUNTS_OF_SOME = ("minContains", "maxContains")
TEXTS = ("pattern", "format", "$ref", "$anchor", "$id", "$dynamicRef", "$recursiveRef")
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
APPLICATORS = ("$ref", "allOf", "anyOf", "oneOf", "if", "dependentSchemas", "not")
KEPT = frozenset(
    {
        *("$ref", "$defs", "definitions", "$anchor", "$id", "allOf", "anyOf", "oneOf", "const", "enum", "type"),
        *("items", "additionalItems", "prefixItems", "properties", "additionalProperties", "patternProperties"),
        *("required", "pattern", "format", *COUNTS, *BOUNDS),
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
"""Keywords that mean something and are not enforced, each with whether this value of it asks for anything."""

NAMING = frozenset({"$schema", "$dynamicAnchor"})
"""Keywords that say how others are meant to whoever looks at a value afterwards."""


class Prepared(msgspec.Struct, frozen=True):
    """What can be enforced; where that is not all, the places of the rest, and the whole (`told`) without what is no
    keyword."""

    schema: Any
    relaxed: tuple[str, ...] = ()
    told: Any = None


def prepare(schema: Mapping[str, Any], base: str) -> Prepared:
    """The part of the schema that is enforced; `base` is the path under which the caller knows the schema."""
    size = len(msgspec.json.encode(schema))
    if size > MOST_BYTES:
        raise InvalidSchema(f"{base}: a schema may have {MOST_BYTES} bytes, not {size}", param=base)
    try:
        found = _prepare(schema)
    except _MistakenError as mistake:
        where = cut(named(base, mistake.parts))
        raise InvalidSchema(f"{where}: {mistake.problem}", param=where) from mistake
    return Prepared(found.schema, tuple(base + place for place in found.relaxed), found.told)


class _MistakenError(Exception):
    def __init__(self, problem: str, parts: Parts = ()) -> None:
        super().__init__(problem)
        self.problem = problem
        self.parts = parts


def _prepare(schema: Mapping[str, Any]) -> Prepared:
    count = sum(1 for _ in all_schemas(schema))
    if count > MOST_SCHEMAS:
        raise _MistakenError(f"a schema may hold {MOST_SCHEMAS} schemas, not {count}")
    cleaner = _Cleaner()
    given = schema if _refers_by_id(schema) else _without_id(schema)
    cleaned = cleaner.clean(given, ())
    _check_references(cleaned)
    if endless(cleaned):
        raise _MistakenError("no finite value can satisfy this schema: it needs itself inside")
    repaired, relaxed = _repaired(cleaned)
    return Prepared(repaired, (*cleaner.relaxed, *relaxed), referring(given, str, _is_known))


def _is_known(keyword: str, value: Any) -> bool:
    return keyword in KEPT or keyword in UNENFORCED or (keyword in NAMING and isinstance(value, str))


def inline(schema: Any, definitions: str = "") -> str:
    """The schema as a piece of a grammar; `definitions` are more of them as JSON."""
    options = {"whitespace_pattern": WHITE}
    document = {**schema, "x-guidance": options} if isinstance(schema, Mapping) else {"x-guidance": options}
    text = json.dumps(document, ensure_ascii=False)
    return f'%json {text[:-1]}, "$defs": {definitions}}}' if definitions else f"%json {text}"


def _refers_by_id(schema: Any) -> bool:
    references = (inner.get("$ref") for _, inner in all_schemas(schema) if isinstance(inner, Mapping))
    return any(isinstance(reference, str) and not reference.startswith("#") for reference in references)


def _without_id(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """A document that nothing in it refers to by name needs none, and can be put into another one."""
    return {key: value for key, value in schema.items() if key != "$id"}


def _check_references(document: Any) -> None:
    names = anchors(document)
    known = {inner["$id"] for _, inner in all_schemas(document) if isinstance(inner, Mapping) and "$id" in inner}
    for parts, inner in all_schemas(document):
        reference = inner.get("$ref") if isinstance(inner, Mapping) else None
        if reference is None or resolve(document, reference, names) is not None:
            continue
        target = reference.partition("#")[0].removeprefix(".")
        if not target or not any(target.endswith(name) or name.endswith(target) for name in known):
            raise _MistakenError("there is no such place in this schema, and no other is fetched", (*parts, "$ref"))


class _Cleaner:
    def __init__(self) -> None:
        self.relaxed: list[str] = []
        self.bounds = Bounds()

    def clean(self, schema: Any, parts: Parts) -> Any:
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, Mapping):
            self._refuse("a schema is an object or a boolean", parts)
        copy: dict[str, Any] = {}
        for keyword, value in schema.items():
            if keyword in KEPT:
                self._check(keyword, value, (*parts, keyword))
                copy[keyword] = self._inner(keyword, value, (*parts, keyword))
            elif keyword in UNENFORCED:
                self._check(keyword, value, (*parts, keyword))
                self._unenforced(keyword, schema, copy, parts)
        self._relax_strings(copy, parts)
        for keyword in self.bounds.unenforceable(copy):
            self._relax(copy, keyword, parts)
        self._relax_values(copy, parts)
        return copy

    def _inner(self, keyword: str, value: Any, parts: Parts) -> Any:
        if keyword in SEVERAL and isinstance(value, list | tuple):
            return [self.clean(inner, (*parts, index)) for index, inner in enumerate(value)]
        if keyword in NAMED:
            return {
                name: self.clean(inner, (*parts, name)) for name, inner in value.items() if not _lists(keyword, inner)
            }
        return self.clean(value, parts) if keyword in ONE else value

    def _unenforced(self, keyword: str, schema: Mapping[str, Any], copy: dict[str, Any], parts: Parts) -> None:
        # Without anything beside it that evaluates properties too, the one means the same as the other.
        plain = "additionalProperties" not in schema and not any(other in schema for other in APPLICATORS)
        value, asks = schema[keyword], UNENFORCED[keyword](schema[keyword])
        if keyword == "unevaluatedProperties" and plain and asks:
            copy["additionalProperties"] = self.clean(value, (*parts, keyword))
            return
        # What is wrong in there is refused; what cannot be enforced in there is part of what is not anyway.
        _Cleaner()._inner(keyword, value, (*parts, keyword))
        if asks:
            self.relaxed.append(named("", (*parts, keyword)))

    def _relax(self, schema: dict[str, Any], keyword: str, parts: Parts) -> None:
        del schema[keyword]
        self.relaxed.append(named("", (*parts, keyword)))

    def _relax_values(self, schema: dict[str, Any], parts: Parts) -> None:
        """Relax values with numbers that llguidance would round, or crash on, to their types."""
        for keyword in ("const", "enum"):
            if keyword in schema and not is_exact(schema[keyword]):
                values = [schema[keyword]] if keyword == "const" else schema[keyword]
                schema.setdefault("type", list(dict.fromkeys(map(_type_of, values))))
                self._relax(schema, keyword, parts)

    def _relax_strings(self, schema: dict[str, Any], parts: Parts) -> None:
        if "format" in schema and schema["format"] not in FORMATS:
            if "string" in _types(schema):
                self._relax(schema, "format", parts)
            else:
                del schema["format"]
        if "pattern" in schema and not self._enforceable(schema["pattern"], (*parts, "pattern")):
            self._relax(schema, "pattern", parts)
        patterns = schema.get("patternProperties", {})
        if not all(self._enforceable(pattern, (*parts, "patternProperties")) for pattern in patterns):
            self._relax(schema, "patternProperties", parts)
            if "additionalProperties" in schema:
                self._relax(schema, "additionalProperties", parts)

    def _enforceable(self, pattern: str, parts: Parts) -> bool:
        try:
            return enforceable(pattern)
        except MalformedPattern as problem:
            self._refuse(str(problem), parts)

    def _check(self, keyword: str, value: Any, parts: Parts) -> None:
        problem = _problem(keyword, value)
        if problem:
            self._refuse(problem, parts)

    def _refuse(self, problem: str, parts: Parts) -> NoReturn:
        raise _MistakenError(problem, parts)


def _types(schema: Mapping[str, Any]) -> tuple[str, ...]:
    given = schema.get("type", TYPES)
    return (given,) if isinstance(given, str) else tuple(given)


def _type_of(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "integer" if value == int(value) else "number"
    if isinstance(value, str):
        return "string"
    return "null" if value is None else "object" if isinstance(value, Mapping) else "array"


def _lists(keyword: str, value: Any) -> bool:
    """Whether names stand where other keywords have a schema."""
    return keyword == "dependencies" and _is_names(value)


def _is_names(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(name, str) for name in value)


def _problem(keyword: str, value: Any) -> str | None:
    """What is wrong with the value of a keyword."""
    if keyword == "type":
        types = [value] if isinstance(value, str) else value
        if not isinstance(types, list | tuple) or not types or any(given not in TYPES for given in types):
            return f"a type is one or several of {', '.join(TYPES)}"
    elif keyword in NAMED:
        if not isinstance(value, Mapping):
            return "an object with schemas as its values is needed"
        if len(value) > MOST_PROPERTIES:
            return f"an object may have {MOST_PROPERTIES} properties, not {len(value)}"
    elif keyword in ("allOf", "anyOf", "oneOf", "prefixItems", "enum"):
        if not isinstance(value, list | tuple):
            return "an array is needed"
    elif keyword == "required":
        if not _is_names(value):
            return "an array of names is needed"
    elif keyword == "dependentRequired":
        if not isinstance(value, Mapping) or not all(map(_is_names, value.values())):
            return "an object with arrays of names as its values is needed"
    elif keyword == "uniqueItems":
        if not isinstance(value, bool):
            return "true or false is needed"
    elif keyword in TEXTS:
        if not isinstance(value, str):
            return "a string is needed"
    elif keyword in (*COUNTS, *COUNTS_OF_SOME):
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0 or value != int(value):
            return "a count is a whole number, 0 or more"
    elif keyword in BOUNDS:
        flag = keyword.startswith("exclusive") and isinstance(value, bool)
        if not flag and (isinstance(value, bool) or not isinstance(value, int | float)):
            return "a number is needed"
    return None


def _error(document: Any) -> str:
    return LLMatcher.validate_grammar(f"%llguidance {{}}\nstart: {inline(document)}")


def _repaired(document: Any) -> tuple[Any, list[str]]:
    """The document without what compiles nowhere, and the places where that stood."""
    relaxed: list[str] = []
    deadline = time.monotonic() + REPAIR_SECONDS
    while error := _error(document):
        parts, problem = _culprit(document, error, deadline)
        found = None if "Unsatisfiable" in problem else _without(document, parts)
        if found is None or time.monotonic() > deadline:
            raise _MistakenError(_reason(problem), parts)
        document, keyword = found
        relaxed.append(named("", (*parts, keyword)))
    return document, relaxed


def _reason(error: str) -> str:
    """What llguidance says, without the place in a grammar that nobody has seen."""
    return error.splitlines()[0].partition("JSON schema: ")[2] or error.splitlines()[0]


def _culprit(document: Any, error: str, deadline: float) -> tuple[Parts, str]:
    """The innermost schema that does not compile, and what is said of it."""
    for parts, inner in all_schemas(document):
        if time.monotonic() > deadline:
            break
        if parts and isinstance(inner, Mapping) and _suspicious(inner):
            problem = _error(_alone(document, parts))
            if problem:
                return parts, problem
    return (), error


def _suspicious(schema: Mapping[str, Any]) -> bool:
    return any(keyword in schema for keyword in KEPT - {"type", "$defs", "definitions", "$anchor", "$id"})


def _alone(document: Any, parts: Parts) -> dict[str, Any]:
    """One schema of a document, with everything that it may refer to."""
    return {"$ref": f"#/$defs/all{pointer(parts)}", "$defs": {"all": rebased(document, "/$defs/all")}}


def _without(document: Any, parts: Parts) -> tuple[Any, str] | None:
    """The document without the keyword that keeps the schema at a place from compiling."""
    schema = at(document, parts)
    for keyword in ("oneOf", "minProperties", "maxProperties", "patternProperties", "multipleOf", "allOf", *schema):
        if keyword not in schema:
            continue
        less = {key: value for key, value in schema.items() if key != keyword}
        if keyword == "oneOf":
            less["allOf"] = [*less.get("allOf", ()), {"anyOf": schema["oneOf"]}]
        if keyword == "patternProperties":
            less.pop("additionalProperties", None)
        changed = _replaced(document, parts, less)
        if not _error(_alone(changed, parts)):
            return changed, keyword
    return None


def _replaced(document: Any, parts: Parts, schema: Any) -> Any:
    if not parts:
        return schema
    copy = dict(document) if isinstance(document, Mapping) else list(document)
    copy[parts[0]] = _replaced(document[parts[0]], parts[1:], schema)  # type: ignore[index]
    return copy
