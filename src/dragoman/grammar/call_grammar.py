"""Builds the grammar of tool calls for every call syntax: a section, its calls and their arguments.

A required call uses the first call section of the format. An optional call may use any section with a marker.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from dragoman.formats.syntax import (
    Braced,
    CallSection,
    CallSyntax,
    Channels,
    JsonCall,
    ModelFormat,
    NamedJson,
    Pythonic,
    Tagged,
    split_fields,
)
from dragoman.grammar.argument_values import (
    ANY_NAME,
    BracedArguments,
    ParameterSchema,
    PythonArguments,
    TaggedArguments,
)
from dragoman.grammar.lark import GAP, SPACE, RuleSet, escape_regex, quote
from dragoman.grammar.schema import json_directive
from dragoman.grammar.schema_check import SchemaCheck

MAX_CALLS = 8
"""Per reply, if calls are required: a weak model may not stop."""

ANY_OBJECT = {"type": "object"}


class ToolGrammar(msgspec.Struct, frozen=True):
    """A tool with its full schema and the part that is enforced. `capture` names the arguments if the rest is checked
    afterwards."""

    name: str
    path: str
    full_schema: Any = None
    schema: Any = None
    capture: str | None = None


class CallGrammar:
    def __init__(self, rules: RuleSet, tools: Sequence[ToolGrammar]) -> None:
        self.rules = rules
        self.tools = tools
        self.relaxed: list[str] = []
        self.checks: list[SchemaCheck] = []

    def reply_calls(self, entry: CallSection, parallel: bool) -> str:
        """All calls of a reply."""
        parts = (self.rules.literal(entry.open), self.section_body(entry, parallel))
        section = " ".join(part for part in parts if part != '""')
        if parallel and not entry.multiple:
            return f"{section} ({GAP} {section}){{0,{MAX_CALLS - 1}}}"
        return section

    def section_body(self, entry: CallSection, parallel: bool, bracket_open: bool = False) -> str:
        """A section without its opening marker. `bracket_open`: the bracket of its array is part of the marker."""
        call, bracket = self._any_call(entry.call), "" if bracket_open else '"["'
        calls = self._calls_or_list(entry, parallel, call, f"{bracket} {GAP} {call}")
        parts = [GAP, calls, GAP, self.rules.literal(entry.close)] if entry.close else [calls]
        return self.rules.add_rule("section", " ".join(parts))

    def bare_calls(self, entry: CallSection, parallel: bool) -> str:
        """Calls without a marker, as an alternative to text. Each starts with one terminal up to the tool's name,
        because free text would otherwise consume the first bracket."""
        begin = self._any_call(entry.call, f'{GAP} "[" {GAP}')
        alone = "" if entry.is_list else self._any_call(entry.call, GAP)
        return self._calls_or_list(entry, parallel, alone, begin)

    def _any_call(self, call: CallSyntax, prefix: str = "") -> str:
        return self.rules.add_rule("call", " | ".join(self._call(call, tool, prefix) for tool in self.tools))

    def _further_calls(self, entry: CallSection, parallel: bool) -> str:
        """Further calls of a section, each after a separator."""
        if not parallel or not entry.multiple:
            return ""
        listed = isinstance(entry.call, Pythonic | JsonCall) and not entry.separator
        between = '","' if listed else self.rules.literal(entry.separator) if entry.separator else ""
        return f"({GAP} {between} {GAP if between else ''} {self._any_call(entry.call)}){{0,{MAX_CALLS - 1}}}"

    def _calls_or_list(self, entry: CallSection, parallel: bool, first: str, first_in_list: str) -> str:
        """Calls one after the other or as a list, as the format allows. The first call of a list comes with the
        opening bracket."""
        more = self._further_calls(entry, parallel)
        in_list = f'{first_in_list} {more} {GAP} "]"'
        if entry.is_list:
            return in_list
        if isinstance(entry.call, JsonCall) and more and not entry.separator:
            return f"({first} | {in_list})"
        return f"{first} {more}"

    def _call(self, call: CallSyntax, tool: ToolGrammar, prefix: str) -> str:
        if isinstance(call, JsonCall):
            return self._json_call(call, tool, prefix)
        if isinstance(call, NamedJson):
            end = f" {self.rules.literal(call.end)}" if call.end else ""
            return f"{self._fill_template(call.begins[0], tool.name)} {self.arguments(tool)}{end}"
        if isinstance(call, Tagged):
            return self._tagged(call, tool)
        document = self._document(tool)
        if isinstance(call, Pythonic):
            head = self.rules.add_rule("HEAD", f"{prefix} {quote(tool.name + '(')}")
            return f'{head} {PythonArguments(self.rules, document).body()} ")"'
        assert isinstance(call, Braced)
        begin = self.rules.literal(f"{call.prefix}{tool.name}{{")
        return f'{begin} {BracedArguments(self.rules, document, call.quote).body()} "}}"'

    def _json_call(self, call: JsonCall, tool: ToolGrammar, prefix: str) -> str:
        keys = [quote(quote(key)) for key in (call.name[0], call.arguments[0])]
        name, colon, comma = quote(quote(tool.name)), f'{SPACE} ":" {SPACE}', f'{SPACE} "," {SPACE}'
        head = self.rules.add_rule("HEAD", f'{prefix} "{{" {SPACE} {keys[0]} {colon} {name} {comma} {keys[1]} {colon}')
        return f'{head} {self.arguments(tool)} {SPACE} "}}"'

    def _tagged(self, call: Tagged, tool: ToolGrammar) -> str:
        def begin(key: str, text: bool) -> str:
            return self._fill_template(call.parameter, tool.name, key, "true" if text else "false")

        arguments = TaggedArguments(self.rules, self._document(tool), begin, call.value_end)
        end = f" {self.rules.literal(call.function_end)}" if call.function_end else ""
        return f"{self._fill_template(call.function, tool.name)} {GAP} {arguments.body()}{end}"

    def channel_call(self, channels: Channels, tool: ToolGrammar) -> str:
        """A call as a message to the tool."""
        header = self.rules.literal(f"{channels.open}commentary {channels.recipient}{tool.name}")
        word = self.rules.literal(" <|constrain|>json")
        return f"{header} ({word})? {self.rules.literal(channels.message)} {self.arguments(tool)}"

    def arguments(self, tool: ToolGrammar) -> str:
        directive = json_directive(ANY_OBJECT if tool.schema is None else tool.schema)
        return self.rules.add_rule("arguments", directive, capture=tool.capture)

    def _document(self, tool: ToolGrammar) -> ParameterSchema:
        return ParameterSchema(tool.schema, tool.full_schema, tool.path, self.relaxed, self.checks)

    def _fill_template(self, template: str, name: str, key: str = "", string: str = "") -> str:
        """Return a template of the format with its fields filled in."""
        values: Mapping[str, str] = {"{name}": name, "{string}": string, "{key}": key}
        open_ended = {"{index}": "/[0-9]{1,3}/", "{id}": "/[A-Za-z0-9]{9}/", "{key}": "" if key else ANY_NAME}
        parts: list[str] = []
        literal = ""
        for part in split_fields(template):
            if open_ended.get(part):
                parts += [*self.rules.literal_terms(literal), open_ended[part]]
                literal = ""
            else:
                literal += values.get(part, part)
        return " ".join((*parts, *self.rules.literal_terms(literal)))


def bare_call_pattern(syntax: ModelFormat, tools: Sequence[ToolGrammar]) -> str | None:
    """Return a regular expression for the start of a call without a marker. None if the format has no such call."""
    names = "|".join(escape_regex(tool.name) for tool in tools)
    white = "[ \\t\\r\\n]*"
    for entry in syntax.calls:
        if entry.open:
            continue
        if isinstance(entry.call, Pythonic):
            return f"{white}\\[{white}({names})\\("
        if isinstance(entry.call, JsonCall):
            keys = "|".join(escape_regex(key) for key in entry.call.name)
            return f'{white}\\[?{white}\\{{{white}"({keys})"{white}:{white}"({names})"'
    return None


def section_openers(syntax: ModelFormat) -> dict[str, list[CallSection]]:
    """Return the markers that start a section, each with its possible sections. A code fence may contain anything."""
    found: dict[str, list[CallSection]] = {}
    for entry in syntax.calls:
        if entry.open and not entry.open.startswith("```"):
            found.setdefault(entry.open, []).append(entry)
    return found


def opener_text(marker: str) -> str:
    """Return the text that starts a section unambiguously. A plain word needs the bracket after it."""
    return f"{marker}[" if marker.isalnum() else marker
