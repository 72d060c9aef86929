"""Builds grammars for arguments that are not JSON: tagged parameters, Python keyword arguments, Gemma's braces.

The grammars are derived from the schema parameter by parameter. JSON values inside them are left to llguidance.
Parameters follow the order of the schema; optional ones may be missing.

Keywords for strings that are not written as JSON (pattern, length) and for the object as a whole (number of properties,
combinations) are not enforced here. They are reported.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import msgspec

from dragoman.grammar.lark import GAP, RuleSet, one_of, quote
from dragoman.grammar.schema import json_directive
from dragoman.grammar.schema_check import SchemaCheck
from dragoman.grammar.schema_walk import (
    PathParts,
    find_anchors,
    format_path,
    lookup,
    rebase_refs,
    resolve_ref,
    rewrite_refs,
    walk_schemas,
)

ANY_NAME = "/[A-Za-z0-9_.-]{1,64}/"
"""A parameter name that is not in a schema."""
MEMBER_NAME = r"/[^:{}\[\],]{1,64}/"
"""The same between braces."""
MAX_UNKNOWN_PARAMETERS = 16
MAX_DEPTH = 8
"""Depth to which values follow their schema. Deeper values may be anything."""

STRING_KEYWORDS = ("pattern", "format", "minLength", "maxLength")
DEFINITION_KEYWORDS = frozenset({"$defs", "definitions", "$anchor"})
"""Keywords that are dropped because references point to the copied definitions instead."""
OBJECT_KEYWORDS = ("minProperties", "maxProperties", "patternProperties", "allOf", "anyOf", "oneOf")


class Subschemas:
    """Writes single schemas of a document with only the definitions they refer to.

    A tool may have a thousand parameters that refer to the same definitions. Each definition is copied once, and a
    schema is written with only the definitions it can reach.
    """

    def __init__(self, document: Any) -> None:
        self.document = document
        self._numbers: dict[PathParts, int] = {}
        self._copies: dict[PathParts, tuple[str, tuple[PathParts, ...]]] = {}
        self._definition_texts: dict[tuple[PathParts, ...], str] = {}

    def json_directive(self, schema: Mapping[str, Any]) -> str:
        """Return one of the schemas as a `%json` directive."""
        if not self._has_only_local_refs:
            return json_directive(rebase_refs(schema, "/$defs/all"), self._whole_document)
        copy, targets = self._rewrite(schema)
        reachable = self._find_reachable(targets)
        if reachable not in self._definition_texts:
            members = (f"{json.dumps(self._name(parts))}: {self._definition(parts)[0]}" for parts in reachable)
            self._definition_texts[reachable] = f"{{{', '.join(members)}}}"
        return json_directive(copy, self._definition_texts[reachable] if reachable else "")

    @cached_property
    def _anchors(self) -> dict[str, PathParts]:
        return find_anchors(self.document)

    @cached_property
    def _has_only_local_refs(self) -> bool:
        """Whether every reference can be resolved here. References by `$id` need the whole document."""
        schemas = [inner for _, inner in walk_schemas(self.document) if isinstance(inner, Mapping)]
        return not any("$id" in inner for inner in schemas) and all(
            resolve_ref(self.document, inner["$ref"], self._anchors) is not None for inner in schemas if "$ref" in inner
        )

    @cached_property
    def _whole_document(self) -> str:
        return json.dumps({"all": rebase_refs(self.document, "/$defs/all")}, ensure_ascii=False)

    def _name(self, parts: PathParts) -> str:
        return str(self._numbers.setdefault(parts, len(self._numbers)))

    def _rewrite(self, schema: Any) -> tuple[Any, tuple[PathParts, ...]]:
        """Return the schema with references to copied definitions, and the paths of those definitions."""
        targets: dict[PathParts, None] = {}

        def refer(reference: str) -> str:
            parts = resolve_ref(self.document, reference, self._anchors)
            assert parts is not None
            targets[parts] = None
            return f"#/$defs/{self._name(parts)}"

        copy = rewrite_refs(schema, refer, lambda keyword, _: keyword not in DEFINITION_KEYWORDS)
        return copy, tuple(targets)

    def _definition(self, parts: PathParts) -> tuple[str, tuple[PathParts, ...]]:
        if parts not in self._copies:
            copy, targets = self._rewrite(lookup(self.document, parts))
            self._copies[parts] = json.dumps(copy, ensure_ascii=False), targets
        return self._copies[parts]

    def _find_reachable(self, targets: Iterable[PathParts]) -> tuple[PathParts, ...]:
        found = dict.fromkeys(targets)
        pending = list(found)
        while pending:
            for parts in self._definition(pending.pop())[1]:
                if parts not in found:
                    found[parts] = None
                    pending.append(parts)
        return tuple(found)


class Parameter(msgspec.Struct, frozen=True):
    name: str
    schema: Any
    required: bool
    parts: PathParts


class ParameterSchema:
    """The schema of a tool's parameters, with references resolved. `relaxed` and `checks` receive what is not enforced
    here."""

    def __init__(self, schema: Any, full_schema: Any, base: str, relaxed: list[str], checks: list[SchemaCheck]) -> None:
        self.schema = schema if isinstance(schema, Mapping) else {}
        self.full_schema = full_schema
        self.base = base
        self.relaxed = relaxed
        self.checks = checks
        self.subschemas = Subschemas(self.schema)

    def properties(self, schema: Any, parts: PathParts = ()) -> list[Parameter] | None:
        """Return the properties of an object schema, or None if any are allowed."""
        schema, parts = self.follow_refs(schema, parts)
        self.relaxed += [format_path(self.base, (*parts, keyword)) for keyword in OBJECT_KEYWORDS if keyword in schema]
        known = schema.get("properties", {})
        required = dict.fromkeys(schema.get("required", ()))
        if not known and not required and schema.get("additionalProperties") is not False:
            return None
        names = dict.fromkeys((*known, *required))
        return [
            Parameter(name, known.get(name, True), name in required, (*parts, "properties", name)) for name in names
        ]

    def follow_refs(self, schema: Any, parts: PathParts) -> tuple[Mapping[str, Any], PathParts]:
        """Follow a schema that is only a reference."""
        for _ in range(MAX_DEPTH):
            if not isinstance(schema, Mapping) or set(schema) - {"$defs", "definitions"} != {"$ref"}:
                break
            target = resolve_ref(self.schema, schema["$ref"], {})
            if target is None:
                break
            schema, parts = lookup(self.schema, target), target
        return schema if isinstance(schema, Mapping) else {}, parts

    def string_values(self, schema: Mapping[str, Any], parts: PathParts) -> tuple[str, ...] | None:
        """Return the allowed strings; an empty tuple if any string is allowed, None if the value is not a string."""
        options = [schema["const"]] if "const" in schema else schema.get("enum")
        if options is not None:
            return tuple(options) if options and all(isinstance(option, str) for option in options) else None
        if "string" not in schema_types(schema) and not any(
            "string" in schema_types(self.follow_refs(inner, parts)[0]) for inner in schema.get("anyOf", ())
        ):
            return None
        if "type" not in schema and "anyOf" not in schema:
            return None
        self.relaxed += [format_path(self.base, (*parts, keyword)) for keyword in STRING_KEYWORDS if keyword in schema]
        return ()

    def add_check(self, parts: PathParts, end: str) -> str | None:
        """Return the capture name for a string that must be validated afterwards. None if no check is necessary."""
        full_schema = lookup(self.full_schema, parts) if isinstance(self.full_schema, Mapping) else {}
        keywords = {keyword: full_schema[keyword] for keyword in STRING_KEYWORDS if keyword in full_schema}
        if not keywords:
            return None
        place = format_path(self.base, parts)
        self.checks.append(SchemaCheck(place, keywords, place, end))
        return place


def schema_types(schema: Mapping[str, Any]) -> tuple[str, ...]:
    declared = schema.get("type", ())
    return (declared,) if isinstance(declared, str) else tuple(declared)


def optional_sequence(rules: RuleSet, items: Sequence[tuple[str, bool]], separator: str) -> str:
    """Items in order with separators between them. Items that are not required may be missing."""
    rest_first, rest_next = '""', '""'
    for item, required in reversed(items):
        first = rules.add_rule("list", f"{item} {rest_next}")
        more = rules.add_rule("list", f"{separator} {item} {rest_next}")
        if required:
            rest_first, rest_next = first, more
        else:
            rest_first = rules.add_rule("list", one_of((first, rest_first)))
            rest_next = rules.add_rule("list", one_of((more, rest_next)))
    return rest_first


class TaggedArguments(msgspec.Struct):
    """Parameters between tags. `begin` returns the text before the value of a parameter, given its name and whether it
    is a string."""

    rules: RuleSet
    document: ParameterSchema
    begin: Callable[[str, bool], str]
    end: str

    def body(self) -> str:
        parameters = self.document.properties(self.document.schema)
        if parameters is None:
            unknown = f"{self.begin('', True)} {self.rules.until(self.end)} {GAP}"
            return f"({unknown}){{0,{MAX_UNKNOWN_PARAMETERS}}}"
        return " ".join(self._parameter(parameter) for parameter in parameters) or '""'

    def _parameter(self, parameter: Parameter) -> str:
        schema, parts = self.document.follow_refs(parameter.schema, parameter.parts)
        texts = self.document.string_values(schema, parts)
        if texts is None:
            rule = self.rules.add_rule("value", self.document.subschemas.json_directive(schema))
            value = f"{rule} {self.rules.literal(self.end)}"
        elif texts:
            value = f"{one_of([quote(text) for text in texts])} {self.rules.literal(self.end)}"
        else:
            value = self.rules.until(
                self.end, capture=self.document.add_check(parts, self.rules.until_suffix(self.end))
            )
        written = self.rules.add_rule("parameter", f"{self.begin(parameter.name, texts is not None)} {value} {GAP}")
        return written if parameter.required else f"{written}?"


class PythonArguments(msgspec.Struct):
    """`a=1, b="x"`: strings and numbers as in JSON, which is valid Python."""

    rules: RuleSet
    document: ParameterSchema

    def body(self) -> str:
        parameters = self.document.properties(self.document.schema)
        if parameters is None:
            one = f'{ANY_NAME} "=" {self._value({}, ())}'
            return f'({one} ("," GAP? {one}){{0,{MAX_UNKNOWN_PARAMETERS}}})?'
        items = [(self._item(parameter), parameter.required) for parameter in parameters]
        return optional_sequence(self.rules, items, '"," GAP?')

    def _item(self, parameter: Parameter) -> str:
        value = self._value(parameter.schema, parameter.parts)
        return self.rules.add_rule("argument", f"{quote(parameter.name + '=')} {value}")

    def _value(self, schema: Any, parts: PathParts) -> str:
        schema, parts = self.document.follow_refs(schema, parts)
        if schema_types(schema) == ("boolean",) and "enum" not in schema and "const" not in schema:
            return '("True" | "False")'
        if schema_types(schema) == ("null",):
            return '"None"'
        return self.rules.add_rule("literal", self.document.subschemas.json_directive(schema))


class BracedArguments(msgspec.Struct):
    """`key:value` pairs with strings between special quotes."""

    rules: RuleSet
    document: ParameterSchema
    quote: str
    _values: dict[tuple[PathParts, int], str] = {}

    def body(self) -> str:
        return self._members(self.document.schema, (), 0)

    def _members(self, schema: Any, parts: PathParts, depth: int) -> str:
        properties = self.document.properties(schema, parts)
        if properties is None:
            one = f'{MEMBER_NAME} ":" {self._any()}'
            return f'({one} ("," {one})*)?'
        items = [(self._item(member, depth), member.required) for member in properties]
        return optional_sequence(self.rules, items, '","')

    def _item(self, member: Parameter, depth: int) -> str:
        value = self._value(member.schema, member.parts, depth)
        return self.rules.add_rule("member", f"{quote(member.name + ':')} {value}")

    def _value(self, schema: Any, parts: PathParts, depth: int) -> str:
        schema, parts = self.document.follow_refs(schema, parts)
        # Several members may refer to the same schema.
        if (parts, depth) not in self._values:
            self._values[parts, depth] = self._build_value(schema, parts, depth)
        return self._values[parts, depth]

    def _build_value(self, schema: Mapping[str, Any], parts: PathParts, depth: int) -> str:
        texts = self.document.string_values(schema, parts)
        if texts:
            mark = self.rules.literal(self.quote)
            return self.rules.add_rule("text", " | ".join(f"{mark} {quote(text)} {mark}" for text in texts))
        if texts is not None:
            return self._string(self.document.add_check(parts, self.rules.until_suffix(self.quote)))
        if depth < MAX_DEPTH and schema_types(schema) == ("object",):
            return f'"{{" {self._members(schema, parts, depth + 1)} "}}"'
        if depth < MAX_DEPTH and schema_types(schema) == ("array",):
            one = self.rules.add_rule("item", self._value(schema.get("items", True), (*parts, "items"), depth + 1))
            return f'"[" ({one} ("," {one})*)? "]"'
        if set(schema_types(schema)) and set(schema_types(schema)) <= {"number", "integer", "boolean", "null"}:
            return self.rules.add_rule("scalar", self.document.subschemas.json_directive(schema))
        return self._any()

    def _string(self, capture: str | None = None) -> str:
        return f"{self.rules.literal(self.quote)} {self.rules.until(self.quote, capture=capture)}"

    def _any(self) -> str:
        # The rule refers to itself, so it has a fixed name.
        if ("anything",) not in self.rules.names:
            self.rules.names["anything",] = "anything"
            scalar = self.rules.add_rule("scalar", json_directive({"type": ["number", "boolean", "null"]}))
            member = f'{MEMBER_NAME} ":" anything'
            array, members = '"[" (anything ("," anything)*)? "]"', f'"{{" ({member} ("," {member})*)? "}}"'
            self.rules.lines.append(f"anything: {self._string()} | {scalar} | {array} | {members}")
        return "anything"
