"""How calls are written, for every kind of call syntax: the grammar of a section, its calls and their arguments.

The first entry of a format's calls is the one that is written where a call must be made; all that begin with a marker
are followed where a call may be made.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from dragoman.formats.syntax import (
    Braced,
    Calls,
    CallSyntax,
    Channels,
    JsonCall,
    ModelFormat,
    NamedJson,
    Pythonic,
    Tagged,
    cut_at_fields,
)
from dragoman.grammar.argument_values import ANYTHING, Braces, Document, Python, Tags
from dragoman.grammar.lark import GAP, SPACE, Rules, escaped, quoted
from dragoman.grammar.schema import inline
from dragoman.grammar.schema_check import Check

MOST_CALLS = 8
"""In one reply where calls must be made: a weak model would not stop making them."""

ANY_OBJECT = {"type": "object"}


class ToolShape(msgspec.Struct, frozen=True):
    """A tool with the schema it came with, and the part of that which can be enforced; `capture` where the rest is
    looked at afterwards."""

    name: str
    path: str
    told: Any = None
    schema: Any = None
    capture: str | None = None


class CallGrammar:
    def __init__(self, rules: Rules, tools: Sequence[ToolShape]) -> None:
        self.rules = rules
        self.tools = tools
        self.documents: list[Document] = []

    @property
    def relaxed(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(path for document in self.documents for path in document.relaxed))

    @property
    def checks(self) -> tuple[Check, ...]:
        return tuple(check for document in self.documents for check in document.checks)

    def turn(self, entry: Calls, several: bool) -> str:
        """All calls of a reply."""
        section = self.section(entry, several)
        if several and not entry.several:
            return f"{section} ({GAP} {section}){{0,{MOST_CALLS - 1}}}"
        return section

    def section(self, entry: Calls, several: bool) -> str:
        return " ".join(part for part in (self.rules.text(entry.open), self.rest(entry, several)) if part != '""')

    def rest(self, entry: Calls, several: bool, begun: bool = False) -> str:
        """A section from behind its opening marker on; `begun`: with the bracket of its array."""
        calls = self._calls(entry, several, "" if begun else '"["')
        parts = [GAP, calls, GAP, self.rules.text(entry.close)] if entry.close else [calls]
        return self.rules.rule("section", " ".join(parts))

    def bare(self, entry: Calls, several: bool) -> str:
        """Calls without a marker, where text might stand as well: their beginning is one terminal, up to the name of
        the tool, because a text that goes on would otherwise swallow their first bracket."""
        more, close = self._more(entry, several), f'{GAP} "]"'
        begin = self._one(entry.call, f'{GAP} "[" {GAP}')
        if isinstance(entry.call, Pythonic) or (isinstance(entry.call, JsonCall) and entry.call.array):
            return f"{begin} {more} {close}"
        alone = f"{self._one(entry.call, GAP)} {more if entry.between else ''}"
        return f"({alone} | {begin} {more} {close})" if more and not entry.between else alone

    def _one(self, call: CallSyntax, lead: str = "") -> str:
        return self.rules.rule("call", " | ".join(self._call(call, tool, lead) for tool in self.tools))

    def _more(self, entry: Calls, several: bool) -> str:
        """Further calls of a section, behind what separates them."""
        if not several or not entry.several:
            return ""
        listed = isinstance(entry.call, Pythonic | JsonCall) and not entry.between
        between = '","' if listed else self.rules.text(entry.between) if entry.between else ""
        return f"({GAP} {between} {GAP if between else ''} {self._one(entry.call)}){{0,{MOST_CALLS - 1}}}"

    def _calls(self, entry: Calls, several: bool, bracket: str) -> str:
        one, more = self._one(entry.call), self._more(entry, several)
        if isinstance(entry.call, Pythonic) or (isinstance(entry.call, JsonCall) and entry.call.array):
            return f'{bracket} {GAP} {one} {more} {GAP} "]"'
        if isinstance(entry.call, JsonCall) and more and not entry.between:
            return f'({one} | {bracket} {GAP} {one} {more} {GAP} "]")'
        return f"{one} {more}"

    def _call(self, call: CallSyntax, tool: ToolShape, lead: str) -> str:
        if isinstance(call, JsonCall):
            return self._json_call(call, tool, lead)
        if isinstance(call, NamedJson):
            end = f" {self.rules.text(call.end)}" if call.end else ""
            return f"{self._filled(call.begins[0], tool.name)} {self.arguments(tool)}{end}"
        if isinstance(call, Tagged):
            return self._tagged(call, tool)
        document = self._document(tool)
        if isinstance(call, Pythonic):
            head = self.rules.terminal("HEAD", f"{lead} {quoted(tool.name + '(')}")
            return f'{head} {Python(self.rules, document).body()} ")"'
        assert isinstance(call, Braced)
        begin = self.rules.text(f"{call.prefix}{tool.name}{{")
        return f'{begin} {Braces(self.rules, document, call.quote).body()} "}}"'

    def _json_call(self, call: JsonCall, tool: ToolShape, lead: str) -> str:
        keys = [quoted(quoted(key)) for key in (call.name[0], call.arguments[0])]
        name, colon, comma = quoted(quoted(tool.name)), f'{SPACE} ":" {SPACE}', f'{SPACE} "," {SPACE}'
        head = self.rules.terminal("HEAD", f'{lead} "{{" {SPACE} {keys[0]} {colon} {name} {comma} {keys[1]} {colon}')
        return f'{head} {self.arguments(tool)} {SPACE} "}}"'

    def _tagged(self, call: Tagged, tool: ToolShape) -> str:
        def begin(key: str, text: bool) -> str:
            return self._filled(call.parameter, tool.name, key, "true" if text else "false")

        tags = Tags(self.rules, self._document(tool), begin, call.value_end)
        end = f" {self.rules.text(call.function_end)}" if call.function_end else ""
        return f"{self._filled(call.function, tool.name)} {GAP} {tags.body()}{end}"

    def channel(self, channels: Channels, tool: ToolShape) -> str:
        """A call as a message to the tool."""
        header = self.rules.text(f"{channels.open}commentary {channels.recipient}{tool.name}")
        word = self.rules.text(" <|constrain|>json")
        return f"{header} ({word})? {self.rules.text(channels.message)} {self.arguments(tool)}"

    def arguments(self, tool: ToolShape) -> str:
        options = "" if tool.capture is None else f'[capture="{tool.capture}"]'
        return self.rules.rule("arguments", inline(ANY_OBJECT if tool.schema is None else tool.schema), options)

    def _document(self, tool: ToolShape) -> Document:
        document = Document(tool.schema, tool.told, tool.path)
        self.documents.append(document)
        return document

    def _filled(self, template: str, name: str, key: str = "", string: str = "") -> str:
        """The template of text as the model has to write it."""
        values: Mapping[str, str] = {"{name}": name, "{string}": string, "{key}": key}
        open_ended = {"{index}": "/[0-9]{1,3}/", "{id}": "/[A-Za-z0-9]{9}/", "{key}": "" if key else ANYTHING}
        parts: list[str] = []
        literal = ""
        for part in cut_at_fields(template):
            if open_ended.get(part):
                parts += [*self.rules.pieces(literal), open_ended[part]]
                literal = ""
            else:
                literal += values.get(part, part)
        return " ".join((*parts, *self.rules.pieces(literal)))


def bare_beginning(syntax: ModelFormat, tools: Sequence[ToolShape]) -> str | None:
    """How a reply begins that is a call without a marker, as a regular expression; None where there is no such call."""
    names = "|".join(escaped(tool.name) for tool in tools)
    white = "[ \\t\\r\\n]*"
    for entry in syntax.calls:
        if entry.open:
            continue
        if isinstance(entry.call, Pythonic):
            return f"{white}\\[{white}({names})\\("
        if isinstance(entry.call, JsonCall):
            keys = "|".join(escaped(key) for key in entry.call.name)
            return f'{white}\\[?{white}\\{{{white}"({keys})"{white}:{white}"({names})"'
    return None


def triggers(syntax: ModelFormat) -> dict[str, list[Calls]]:
    """The markers that begin a section, each with the sections that it may begin. A fence may hold anything."""
    found: dict[str, list[Calls]] = {}
    for entry in syntax.calls:
        if entry.open and not entry.open.startswith("```"):
            found.setdefault(entry.open, []).append(entry)
    return found


def trigger(marker: str) -> str:
    """What of a section's beginning cannot be mistaken for text: a mere word needs the bracket that follows it."""
    return f"{marker}[" if marker.isalnum() else marker
