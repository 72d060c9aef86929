"""Writes a GBNF grammar in llguidance's dialect of Lark.

GBNF works with characters. llguidance splits a text into lexemes, always the longest possible ones. That changes the
language where a lexeme could take characters that belong to the next one. So there are two ways:

    lexemes      every part without recursion is one lexeme. Fast, if no choice ever needs more than the next character
                 and no lexeme can go on with a character that may also follow it
    characters   every character is a lexeme. Exact for every grammar, but many times slower

Rules
1. Lexemes are used only if the conditions for them are proven; the proof may fail for a grammar that meets them.
2. A grammar without recursion is one lexeme.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from dragoman.grammar.gbnf import (
    ROOT,
    Alternatives,
    Chars,
    Concatenation,
    Node,
    Ranges,
    Repeated,
    RuleRef,
    overlap,
    parse,
    union,
)
from dragoman.grammar.lark import one_of, quote


def gbnf_to_lark(text: str, param: str) -> str:
    rules = parse(text, param)
    try:
        return _LexemeWriter(rules).write()
    except _NeedsCharacters:
        return _CharacterWriter(rules).write()


class _NeedsCharacters(Exception):
    """The conditions for lexemes are not proven."""


@dataclass(frozen=True)
class _Regular:
    """What is known about a part without recursion: the characters with which it may begin, go on after it was
    complete, and go on anywhere."""

    nullable: bool
    first: Ranges
    more: Ranges
    rest: Ranges


EMPTY = _Regular(nullable=True, first=(), more=(), rest=())


def _chain(before: _Regular, after: _Regular) -> _Regular:
    nullable = before.nullable and after.nullable
    first = union(before.first, after.first) if before.nullable else before.first
    rest = union(union(before.rest, after.rest), after.first)
    if overlap(before.more, after.first):
        more = rest
    else:
        more = union(after.more, union(after.first, before.more)) if after.nullable else after.more
    return _Regular(nullable, first, union(more, first) if nullable else more, rest)


def _choose(options: list[_Regular]) -> _Regular:
    nullable = any(option.nullable for option in options)
    first: Ranges = ()
    more: Ranges = ()
    rest: Ranges = ()
    is_clear = True
    for option in options:
        is_clear = is_clear and not overlap(first, option.first)
        first, more, rest = union(first, option.first), union(more, option.more), union(rest, option.rest)
    more = more if is_clear else rest
    return _Regular(nullable, first, union(more, first) if nullable else more, rest)


def _repeat(item: _Regular, least: int, most: int | None) -> _Regular:
    if most == 0:
        return EMPTY
    nullable = item.nullable or least == 0
    rest = item.rest if most == 1 else union(item.rest, item.first)
    if most == 1:
        more = item.more
    elif overlap(item.more, item.first):
        more = rest
    else:
        more = item.more if least == most else union(item.more, item.first)
    return _Regular(nullable, item.first, union(more, item.first) if nullable else more, rest)


def _references(node: Node) -> set[str]:
    if isinstance(node, RuleRef):
        return {node.name}
    if isinstance(node, Repeated):
        return _references(node.item)
    inner = node.items if isinstance(node, Concatenation) else node.options if isinstance(node, Alternatives) else ()
    return set().union(*map(_references, inner))


def _order(rules: Mapping[str, Node]) -> tuple[list[str], set[str]]:
    """Return the rules without recursion, each after those that it refers to, and the others that `root` needs."""
    needed, waiting = {ROOT}, [ROOT]
    references = {name: _references(node) for name, node in rules.items()}
    while waiting:
        new = references[waiting.pop()] - needed
        needed |= new
        waiting += new
    users: dict[str, list[str]] = {name: [] for name in needed}
    missing = {name: len(references[name]) for name in needed}
    for name in needed:
        for used in references[name]:
            users[used].append(name)
    ordered = sorted(name for name in needed if not missing[name])
    for name in ordered:
        for user in users[name]:
            missing[user] -= 1
            if not missing[user]:
                ordered.append(user)
    return ordered, needed - set(ordered)


class _LarkWriter:
    """Writes nodes. Names of rules may contain what names in Lark may not, so rules are numbered."""

    def __init__(self, rules: Mapping[str, Node]) -> None:
        self.rules = rules
        self.numbers = {name: number for number, name in enumerate(rules)}
        self.lines: list[str] = []

    def name_of(self, name: str) -> str:
        return "start" if name == ROOT else f"rule_{self.numbers[name]}"

    def node(self, node: Node) -> str:
        if isinstance(node, Chars):
            return _class(node.ranges)
        return self.name_of(node.name) if isinstance(node, RuleRef) else _compose(node, self.node)

    def text(self) -> str:
        return "\n".join(self.lines) + "\n"


class _CharacterWriter(_LarkWriter):
    def write(self) -> str:
        self.lines = [f"{self.name_of(name)}: {self.node(node)}" for name, node in self.rules.items()]
        return self.text()


class _LexemeWriter(_LarkWriter):
    def __init__(self, rules: Mapping[str, Node]) -> None:
        super().__init__(rules)
        ordered, self.recursive = _order(rules)
        self.known: dict[str, _Regular] = {}
        for name in ordered:
            self.known[name] = self._regular(rules[name])
        self.ordered = ordered
        self.first: dict[str, Ranges] = dict.fromkeys(self.recursive, ())
        self.nullable: dict[str, bool] = dict.fromkeys(self.recursive, False)
        self.follow: dict[str, Ranges] = dict.fromkeys(self.recursive, ())

    def write(self) -> str:
        if not self.recursive:
            self._write_terminals()
            self.lines.append(f"start: {self._terminal_name(ROOT)}")
            return self.text()
        bodies = {name: self._split(self.rules[name]) for name in sorted(self.recursive)}
        self._prove(bodies)
        self._write_terminals()
        for name, body in bodies.items():
            self.lines.append(f"{self.name_of(name)}: {self._recursive(body)}")
        return self.text()

    def _write_terminals(self) -> None:
        for name in self.ordered:
            self.lines.append(f"{self._terminal_name(name)}: {self._terminal(self.rules[name])}")

    def _terminal_name(self, name: str) -> str:
        return f"RULE_{self.numbers[name]}"

    def _is_regular(self, node: Node) -> bool:
        return self.recursive.isdisjoint(_references(node))

    def _regular(self, node: Node) -> _Regular:
        if isinstance(node, Chars):
            return _Regular(nullable=False, first=node.ranges, more=(), rest=())
        if isinstance(node, RuleRef):
            return self.known[node.name]
        if isinstance(node, Alternatives):
            return _choose([self._regular(option) for option in node.options])
        if isinstance(node, Repeated):
            return _repeat(self._regular(node.item), node.least, node.most)
        found = EMPTY
        for item in reversed(node.items):
            found = _chain(self._regular(item), found)
        return found

    def _split(self, node: Node) -> Node:
        """Group the parts without recursion, so that each of them becomes one lexeme."""
        if isinstance(node, Concatenation):
            groups: list[list[Node]] = []
            for item in node.items:
                joins = groups and self._is_regular(item) and self._is_regular(groups[-1][-1])
                if joins:
                    groups[-1].append(item)
                else:
                    groups.append([item])
            return Concatenation(tuple([self._split_one(group) for group in groups]))
        if isinstance(node, Alternatives):
            regular = [option for option in node.options if self._is_regular(option)]
            others = [self._split(option) for option in node.options if not self._is_regular(option)]
            return Alternatives((*([Alternatives(tuple(regular))] if regular else []), *others))
        return Repeated(self._split(node.item), node.least, node.most) if isinstance(node, Repeated) else node

    def _split_one(self, group: list[Node]) -> Node:
        if self._is_regular(group[0]):
            return group[0] if len(group) == 1 else Concatenation(tuple(group))
        return self._split(group[0])

    def _prove(self, bodies: Mapping[str, Node]) -> None:
        before = None
        while before != (before := (dict(self.first), dict(self.nullable))):
            for name, body in bodies.items():
                self.nullable[name], self.first[name] = self._begin(body)
        known = None
        while known != (known := dict(self.follow)):
            for name, body in bodies.items():
                self._check(body, self.follow[name], final=False)
        for name, body in bodies.items():
            self._check(body, self.follow[name], final=True)

    def _begin(self, node: Node) -> tuple[bool, Ranges]:
        """Return whether the node may be empty, and its first characters."""
        if self._is_regular(node):
            found = self._regular(node)
            return found.nullable, found.first
        if isinstance(node, RuleRef):
            return self.nullable[node.name], self.first[node.name]
        if isinstance(node, Repeated):
            nullable, first = self._begin(node.item)
            return nullable or node.least == 0, first
        parts = (
            node.items if isinstance(node, Concatenation) else node.options if isinstance(node, Alternatives) else ()
        )
        is_choice = isinstance(node, Alternatives)
        nullable, first = not is_choice, ()
        for part in parts:
            part_nullable, part_first = self._begin(part)
            if is_choice:
                nullable, first = nullable or part_nullable, union(first, part_first)
            elif nullable:
                nullable, first = part_nullable, union(first, part_first)
        return nullable, first

    def _check(self, node: Node, follow: Ranges, *, final: bool) -> None:
        """Pass on what may follow each rule, and at last check that the next character decides."""
        if self._is_regular(node):
            self._require(not final or not overlap(self._regular(node).more, follow))
        elif isinstance(node, RuleRef):
            self.follow[node.name] = union(self.follow[node.name], follow)
        elif isinstance(node, Repeated):
            nullable, first = self._begin(node.item)
            self._require(not final or not (nullable or overlap(first, follow)))
            self._check(node.item, union(follow, first) if node.most != 1 else follow, final=final)
        elif isinstance(node, Alternatives):
            taken = follow if self._begin(node)[0] else ()
            for option in node.options:
                first = self._begin(option)[1]
                self._require(not final or not overlap(taken, first))
                taken = union(taken, first)
                self._check(option, follow, final=final)
        elif isinstance(node, Concatenation):
            for item in reversed(node.items):
                self._check(item, follow, final=final)
                nullable, first = self._begin(item)
                follow = union(follow, first) if nullable else first

    def _require(self, condition: bool) -> None:
        if not condition:
            raise _NeedsCharacters

    def _recursive(self, node: Node) -> str:
        if self._is_regular(node):
            name = f"LEXEME_{len(self.lines)}"
            found = self._regular(node)
            if not found.first:
                return '""'
            self.lines.append(f"{name}: {self._terminal(node)}")
            return name
        return self.node(node) if isinstance(node, RuleRef | Chars) else _compose(node, self._recursive)

    def _terminal(self, node: Node) -> str:
        if isinstance(node, RuleRef):
            return self._terminal_name(node.name)
        if isinstance(node, Concatenation) and node.items and all(map(_is_letter, node.items)):
            return quote("".join([chr(item.ranges[0][0]) for item in node.items if isinstance(item, Chars)]))
        return self.node(node) if isinstance(node, Chars) else _compose(node, self._terminal)


def _compose(node: Concatenation | Alternatives | Repeated, write: Callable[[Node], str]) -> str:
    if isinstance(node, Concatenation):
        return f"({' '.join(map(write, node.items))})" if node.items else '""'
    if isinstance(node, Alternatives):
        return one_of([write(option) for option in node.options])
    most = "" if node.most is None else node.most
    return f"({write(node.item)}){{{node.least},{most}}}" if node.most != 0 else '""'


def _is_letter(node: Node) -> bool:
    return isinstance(node, Chars) and len(node.ranges) == 1 and node.ranges[0][0] == node.ranges[0][1]


def _class(ranges: Ranges) -> str:
    parts = [f"\\u{{{low:x}}}" + (f"-\\u{{{high:x}}}" if high > low else "") for low, high in ranges]
    return f"/[{''.join(parts)}]/"
