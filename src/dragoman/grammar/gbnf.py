"""Reads grammars in GBNF, the syntax of llama.cpp, with the escapes of XGrammar.

    grammar  := (name "::=" options)*                 the reply is that of the rule `root`
    options  := sequence ("|" sequence)*
    sequence := (element repeat?)*
    element  := name | "text" | [class] | [^class] | "." | "(" options ")"
    repeat   := "*" | "+" | "?" | "{n}" | "{n,}" | "{n,m}"

Rules
1. Everything is made of characters: a text is a sequence of them, and a class may be any Unicode character.
2. Line ends have no meaning. A rule begins at a name before `::=`.
3. Control tokens (`<think>`, `<[1]>`) are refused: a grammar cannot require them.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from dragoman.core.errors import InvalidSchema
from dragoman.core.errors import quote as quote_value

MAX_NESTING = 64
ROOT = "root"
Ranges = tuple[tuple[int, int], ...]
"""Sorted ranges of characters that do not overlap or touch."""
ANY: Ranges = ((0, 0xD7FF), (0xE000, 0x10FFFF))
ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "e": "\x1b", "0": "\0"}
_IS_GBNF = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)
_TOKEN = re.compile(
    r'(?P<space>(?:\s|#[^\n]*)+)|(?P<name>[\w-]+)|(?P<define>::=)|(?P<text>"(?:[^"\\]|\\.)*")'
    r"|(?P<chars>\[(?:[^\]\\]|\\.)*\])|(?P<repeat>[*+?]|\{\s*\d{1,9}\s*(?:,\s*(?:\d{1,9})?\s*)?\})"
    r"|(?P<mark>[()|.])|(?P<control>!?<[^>\s]*>)",
    re.DOTALL,
)
_CHARACTER = re.compile(
    r"\\x([0-9A-Fa-f]{2})|\\u([0-9A-Fa-f]{4})|\\U([0-9A-Fa-f]{8})|\\([nrtbfave0\"'?/\\\[\](){}|^$.*+-])|([^\\])",
    re.DOTALL,
)


@dataclass(frozen=True)
class Chars:
    """One character of these."""

    ranges: Ranges


@dataclass(frozen=True)
class RuleRef:
    name: str


@dataclass(frozen=True)
class Concatenation:
    items: tuple["Node", ...]


@dataclass(frozen=True)
class Alternatives:
    options: tuple["Node", ...]


@dataclass(frozen=True)
class Repeated:
    item: "Node"
    least: int
    most: int | None


Node = Chars | RuleRef | Concatenation | Alternatives | Repeated


def is_gbnf(text: str) -> bool:
    return _IS_GBNF.search(text) is not None


def parse(text: str, param: str) -> dict[str, Node]:
    """Return the rules by name. `param` is the request field that errors name."""
    return _Parser(text, param).parse()


def union(first: Ranges, second: Ranges) -> Ranges:
    if not first or not second or first == second:
        return first or second
    merged: list[tuple[int, int]] = []
    for low, high in sorted((*first, *second)):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(merged[-1][1], high))
        else:
            merged.append((low, high))
    return tuple(merged)


def overlap(first: Ranges, second: Ranges) -> bool:
    return any(low <= end and start <= high for low, high in first for start, end in second)


def _complement(ranges: Ranges) -> Ranges:
    found, start = [], 0
    # The surrogates are excluded, because they are not characters.
    for low, high in (*union(ranges, ((0xD800, 0xDFFF),)), (0x110000, 0x110000)):
        if start < low:
            found.append((start, low - 1))
        start = high + 1
    return tuple(found)


class _Parser:
    def __init__(self, text: str, param: str) -> None:
        self._param = param
        self._tokens = list(self._scan(text))
        self._at = 0

    def _scan(self, text: str) -> Iterator[tuple[str, str]]:
        at = 0
        while at < len(text):
            match = _TOKEN.match(text, at)
            if match is None:
                line = text.count("\n", 0, at) + 1
                raise self._error(f"unexpected {quote_value(text[at : at + 20])} in line {line}")
            at = match.end()
            if match.lastgroup == "control":
                raise self._error(f"control tokens such as {quote_value(match[0])} cannot be required")
            if match.lastgroup != "space":
                yield match.lastgroup or "", match[0]
        yield "end", ""
        yield "end", ""

    def _error(self, problem: str) -> InvalidSchema:
        return InvalidSchema(f"{self._param}: invalid GBNF: {problem}", param=self._param)

    def parse(self) -> dict[str, Node]:
        rules: dict[str, Node] = {}
        while self._tokens[self._at][0] != "end":
            (kind, name), (following, found) = self._tokens[self._at : self._at + 2]
            if kind != "name" or following != "define":
                raise self._error(f"expected a rule, found {quote_value(name)} {quote_value(found)}")
            if name in rules:
                raise self._error(f"rule {quote_value(name)} is defined twice")
            self._at += 2
            rules[name] = self._options(0)
        self._check_names(rules)
        return rules

    def _check_names(self, rules: Mapping[str, Node]) -> None:
        if ROOT not in rules:
            raise self._error("there is no rule 'root'")
        for kind, name in self._tokens:
            if kind == "name" and name not in rules:
                raise self._error(f"rule {quote_value(name)} is not defined")

    def _options(self, depth: int) -> Node:
        if depth > MAX_NESTING:
            raise self._error(f"nested deeper than {MAX_NESTING} levels")
        options = [self._sequence(depth)]
        while self._tokens[self._at] == ("mark", "|"):
            self._at += 1
            options.append(self._sequence(depth))
        return options[0] if len(options) == 1 else Alternatives(tuple(options))

    def _sequence(self, depth: int) -> Node:
        items: list[Node] = []
        while True:
            kind, text = self._tokens[self._at]
            is_rule = kind == "name" and self._tokens[self._at + 1][0] == "define"
            if is_rule or kind == "end" or text in ("|", ")"):
                return items[0] if len(items) == 1 else Concatenation(tuple(items))
            self._at += 1
            if kind == "repeat" and items:
                items[-1] = self._repeated(items[-1], text)
            else:
                items.append(self._element(kind, text, depth))

    def _element(self, kind: str, text: str, depth: int) -> Node:
        if kind == "name":
            return RuleRef(text)
        if kind == "text":
            return Concatenation(tuple([Chars(((code, code),)) for code, _ in self._characters(text[1:-1])]))
        if kind == "chars":
            return self._class(text[1:-1])
        if text == ".":
            return Chars(ANY)
        if kind == "define":
            raise self._error("'::=' must follow the name of a rule")
        if text != "(":
            raise self._error(f"unexpected {quote_value(text)}")
        inner = self._options(depth + 1)
        if self._tokens[self._at] != ("mark", ")"):
            raise self._error("a closing parenthesis is missing")
        self._at += 1
        return inner

    def _repeated(self, item: Node, text: str) -> Node:
        if text in "*+?":
            return Repeated(item, int(text == "+"), 1 if text == "?" else None)
        least, comma, most = text[1:-1].partition(",")
        limit = (int(most) if most.strip() else None) if comma else int(least)
        if limit is not None and limit < int(least):
            raise self._error(f"{text} repeats at most less than at least")
        return Repeated(item, int(least), limit)

    def _class(self, text: str) -> Node:
        negated = text.startswith("^")
        characters = list(self._characters(text[negated:]))
        ranges: Ranges = ()
        at = 0
        while at < len(characters):
            low = high = characters[at][0]
            if at + 2 < len(characters) and characters[at + 1] == (ord("-"), False):
                high = characters[at + 2][0]
                at += 2
            if high < low:
                raise self._error(f"the range {chr(low)}-{chr(high)} is empty")
            ranges = union(ranges, ((low, high),))
            at += 1
        allowed = _complement(ranges if negated else _complement(ranges))
        if not allowed:
            raise self._error(f"[{text}] allows no character")
        return Chars(allowed)

    def _characters(self, text: str) -> Iterator[tuple[int, bool]]:
        """Yield the characters, and whether each was escaped."""
        at = 0
        while at < len(text):
            match = _CHARACTER.match(text, at)
            if match is None:
                raise self._error(f"unknown escape {quote_value(text[at : at + 2])}")
            at = match.end()
            code = next((int(digits, 16) for digits in match.groups()[:3] if digits), None)
            if code is None:
                code = ord(match[5] or ESCAPES.get(match[4], match[4]))
            if code > ANY[-1][1] or ANY[0][1] < code < ANY[1][0]:
                raise self._error(f"{match[0]} is not a character")
            yield code, match[5] is None
