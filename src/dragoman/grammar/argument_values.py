"""Arguments that are not one JSON text: parameters between tags, Python's keyword arguments, Gemma's braces.

Their grammars are written here from the schema, parameter by parameter; what stands inside one of them as JSON is left
to llguidance. Parameters come in the order of the schema, those that are not required may be missing.

A keyword that says something about a text which is not written as JSON (its pattern, its length) or about the object as
a whole (how many properties, which together) is not enforced here, and is reported.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from dragoman.grammar.lark import GAP, Rules, either, quoted
from dragoman.grammar.schema import inline
from dragoman.grammar.schema_check import Check
from dragoman.grammar.schema_walk import Parts, at, named, resolve
from dragoman.grammar.subschemas import Excerpts

ANYTHING = "/[A-Za-z0-9_.-]{1,64}/"
"""A name of a parameter that no schema knows."""
MOST_UNKNOWN = 16
DEEPEST = 8
"""How deep values are followed by their schema; below they may be anything."""

OF_TEXT = ("pattern", "format", "minLength", "maxLength")
OF_WHOLE = ("minProperties", "maxProperties", "patternProperties", "allOf", "anyOf", "oneOf")


class Parameter(msgspec.Struct, frozen=True):
    name: str
    schema: Any
    required: bool
    parts: Parts


class Document:
    """A tool's schema of parameters, in which references are followed."""

    def __init__(self, schema: Any, told: Any, base: str) -> None:
        """`told` is the schema with all that it came with."""
        self.schema = schema if isinstance(schema, Mapping) else {}
        self.told = told
        self.base = base
        self.relaxed: list[str] = []
        self.checks: list[Check] = []
        self.excerpts = Excerpts(self.schema)

    def parameters(self) -> list[Parameter] | None:
        """None: whatever the model likes."""
        return self.properties(self.schema, ())

    def properties(self, schema: Any, parts: Parts) -> list[Parameter] | None:
        schema, parts = self.followed(schema, parts)
        self.relaxed += [named(self.base, (*parts, keyword)) for keyword in OF_WHOLE if keyword in schema]
        known = schema.get("properties", {})
        required = dict.fromkeys(schema.get("required", ()))
        if not known and not required and schema.get("additionalProperties") is not False:
            return None
        names = dict.fromkeys((*known, *required))
        return [
            Parameter(name, known.get(name, True), name in required, (*parts, "properties", name)) for name in names
        ]

    def followed(self, schema: Any, parts: Parts) -> tuple[Mapping[str, Any], Parts]:
        """The schema that a reference without anything beside it means."""
        for _ in range(DEEPEST):
            target = resolve(self.schema, schema["$ref"], {}) if self._refers(schema) else None
            if target is None:
                break
            schema, parts = at(self.schema, target), target
        return schema if isinstance(schema, Mapping) else {}, parts

    def _refers(self, schema: Any) -> bool:
        return isinstance(schema, Mapping) and set(schema) - {"$defs", "definitions"} == {"$ref"}

    def text(self, schema: Mapping[str, Any], parts: Parts) -> tuple[str, ...] | None:
        """The texts that a string may be; none at all stands for any text, None for no string."""
        options = [schema["const"]] if "const" in schema else schema.get("enum")
        if options is not None:
            return tuple(options) if options and all(isinstance(option, str) for option in options) else None
        if "string" not in kinds(schema) and not any(
            "string" in kinds(self.followed(inner, parts)[0]) for inner in schema.get("anyOf", ())
        ):
            return None
        if "type" not in schema and "anyOf" not in schema:
            return None
        self.relaxed += [named(self.base, (*parts, keyword)) for keyword in OF_TEXT if keyword in schema]
        return ()

    def watched(self, parts: Parts, end: str) -> str | None:
        """The name under which a text is captured, to be looked at afterwards; None where anything will do."""
        told = at(self.told, parts) if isinstance(self.told, Mapping) else {}
        asked = {keyword: told[keyword] for keyword in OF_TEXT if keyword in told}
        if not asked:
            return None
        place = named(self.base, parts)
        self.checks.append(Check(place, asked, place, end))
        return place


def kinds(schema: Mapping[str, Any]) -> tuple[str, ...]:
    given = schema.get("type", ())
    return (given,) if isinstance(given, str) else tuple(given)


def sequence(rules: Rules, items: Sequence[tuple[str, bool]], separator: str) -> str:
    """Items in order, those that are not required may be missing; the separator between those that are there."""
    rest_first, rest_next = '""', '""'
    for item, required in reversed(items):
        first = rules.rule("list", f"{item} {rest_next}")
        more = rules.rule("list", f"{separator} {item} {rest_next}")
        if required:
            rest_first, rest_next = first, more
        else:
            rest_first = rules.rule("list", either((first, rest_first)))
            rest_next = rules.rule("list", either((more, rest_next)))
    return rest_first


class Tags:
    """Parameters between tags of their own."""

    def __init__(self, rules: Rules, document: Document, begin: Callable[[str, bool], str], end: str) -> None:
        """`begin` gives what stands before the value of a parameter of a name that is a string, or is not."""
        self.rules = rules
        self.document = document
        self.begin = begin
        self.end = end

    def body(self) -> str:
        parameters = self.document.parameters()
        if parameters is None:
            unknown = f"{self.begin('', True)} {self.rules.until(self.end)} {GAP}"
            return f"({unknown}){{0,{MOST_UNKNOWN}}}"
        return " ".join(self._parameter(parameter) for parameter in parameters) or '""'

    def _parameter(self, parameter: Parameter) -> str:
        schema, parts = self.document.followed(parameter.schema, parameter.parts)
        texts = self.document.text(schema, parts)
        if texts is None:
            value = f"{self.rules.rule('value', self.document.excerpts.inline(schema))} {self.rules.text(self.end)}"
        elif texts:
            value = f"{either([quoted(text) for text in texts])} {self.rules.text(self.end)}"
        else:
            value = self.rules.until(self.end, capture=self.document.watched(parts, self.rules.ending(self.end)))
        written = self.rules.rule("parameter", f"{self.begin(parameter.name, texts is not None)} {value} {GAP}")
        return written if parameter.required else f"{written}?"


class Python:
    """`a=1, b="x"`: strings and numbers as in JSON, which Python reads the same way."""

    def __init__(self, rules: Rules, document: Document) -> None:
        self.rules = rules
        self.document = document

    def body(self) -> str:
        parameters = self.document.parameters()
        if parameters is None:
            one = f'{ANYTHING} "=" {self._value({}, ())}'
            return f'({one} ("," GAP? {one}){{0,{MOST_UNKNOWN}}})?'
        items = [(self._item(parameter), parameter.required) for parameter in parameters]
        return sequence(self.rules, items, '"," GAP?')

    def _item(self, parameter: Parameter) -> str:
        value = self._value(parameter.schema, parameter.parts)
        return self.rules.rule("argument", f"{quoted(parameter.name + '=')} {value}")

    def _value(self, schema: Any, parts: Parts) -> str:
        schema, parts = self.document.followed(schema, parts)
        if kinds(schema) == ("boolean",) and "enum" not in schema and "const" not in schema:
            return '("True" | "False")'
        if kinds(schema) == ("null",):
            return '"None"'
        return self.rules.rule("literal", self.document.excerpts.inline(schema))


class Braces:
    """`key:value` pairs, strings between two quotes of the family's own."""

    def __init__(self, rules: Rules, document: Document, quote: str) -> None:
        self.rules = rules
        self.document = document
        self.quote = quote
        self._values: dict[tuple[Parts, int], str] = {}

    def body(self) -> str:
        return self._members(self.document.schema, (), 0)

    def _members(self, schema: Any, parts: Parts, depth: int) -> str:
        properties = self.document.properties(schema, parts)
        if properties is None:
            one = f'/[^:{{}}\\[\\],]{{1,64}}/ ":" {self._any()}'
            return f'({one} ("," {one})*)?'
        items = [(self._item(member, depth), member.required) for member in properties]
        return sequence(self.rules, items, '","')

    def _item(self, member: Parameter, depth: int) -> str:
        value = self._value(member.schema, member.parts, depth)
        return self.rules.rule("member", f"{quoted(member.name + ':')} {value}")

    def _value(self, schema: Any, parts: Parts, depth: int) -> str:
        schema, parts = self.document.followed(schema, parts)
        # Many members may refer to one place.
        if (parts, depth) not in self._values:
            self._values[parts, depth] = self._written(schema, parts, depth)
        return self._values[parts, depth]

    def _written(self, schema: Mapping[str, Any], parts: Parts, depth: int) -> str:
        texts = self.document.text(schema, parts)
        if texts:
            mark = self.rules.text(self.quote)
            return self.rules.rule("text", " | ".join(f"{mark} {quoted(text)} {mark}" for text in texts))
        if texts is not None:
            return self._string(self.document.watched(parts, self.rules.ending(self.quote)))
        if depth < DEEPEST and kinds(schema) == ("object",):
            return f'"{{" {self._members(schema, parts, depth + 1)} "}}"'
        if depth < DEEPEST and kinds(schema) == ("array",):
            one = self.rules.rule("item", self._value(schema.get("items", True), (*parts, "items"), depth + 1))
            return f'"[" ({one} ("," {one})*)? "]"'
        if set(kinds(schema)) and set(kinds(schema)) <= {"number", "integer", "boolean", "null"}:
            return self.rules.rule("scalar", self.document.excerpts.inline(schema))
        return self._any()

    def _string(self, capture: str | None = None) -> str:
        return f"{self.rules.text(self.quote)} {self.rules.until(self.quote, capture=capture)}"

    def _any(self) -> str:
        scalar = inline({"type": ["number", "boolean", "null"]})
        if "anything" not in self.rules.fixed:
            self.rules.fixed.add("anything")
            self.rules.lines.append("anything: held")
            member = '/[^:{}\\[\\],]{1,64}/ ":" anything'
            options = [
                self._string(),
                self.rules.rule("scalar", scalar),
                '"[" (anything ("," anything)*)? "]"',
                f'"{{" ({member} ("," {member})*)? "}}"',
            ]
            self.rules.lines.append("held: " + " | ".join(options))
        return "anything"
