"""Builds grammar text in llguidance's dialect of Lark.

Rules
1. A marker that is a control token of the model is written as that token. All other text is written literally.
2. Free text never contains control tokens.
3. Optional whitespace is bounded.
4. The size of the text is limited while it is built.
"""

import json
import re
from collections.abc import Mapping, Sequence

from dragoman.core.errors import InvalidSchema
from dragoman.grammar.schema import WHITESPACE

MAX_TEXT = 1024 * 1024
"""Characters of one grammar."""

_META = re.compile(r"[\\.+*?()|\[\]{}^$#&\-~/]")

ANY_TEXT = "/(?s:.*)/"
SPACE = "SPACE?"
"""Optional whitespace between JSON tokens."""
GAP = "GAP?"
"""Optional whitespace between markers."""

TERMINALS = f"SPACE: /{WHITESPACE}/\nGAP: /[ \\t\\n]{{1,4}}/\nTEXT: {ANY_TEXT}\n"


def quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def escape_regex(text: str) -> str:
    """Escape text for a regular expression between slashes."""
    return _META.sub(lambda found: "\\" + found[0], text).replace("\n", "\\n")


def one_of(options: Sequence[str]) -> str:
    return options[0] if len(options) == 1 else "(" + " | ".join(options) + ")"


class RuleSet:
    """The rules of one grammar. `control` has the token ids of markers that are control tokens. `param` is the request
    field that errors name."""

    def __init__(self, control: Mapping[str, int], param: str) -> None:
        self.control = control
        self.param = param
        self.size = 0
        self.lines: list[str] = []
        self.names: dict[tuple[str, ...], str] = {}
        longest_first = sorted(control, key=len, reverse=True)
        self._split = re.compile("(" + ("|".join(map(re.escape, longest_first)) or "(?!)") + ")")

    def add_rule(self, hint: str, body: str, *options: str, capture: str | None = None) -> str:
        """Return the name of a rule with this body. A hint in capitals makes it a terminal."""
        if capture is not None:
            options = (*options, f'capture="{capture}"')
        name = self.names.setdefault((hint, body, *options), f"{hint}_{len(self.lines)}")
        if name == f"{hint}_{len(self.lines)}":
            self._add_size(len(body))
            self.lines.append(f"{name}[{', '.join(options)}]: {body}" if options else f"{name}: {body}")
        return name

    def _add_size(self, size: int) -> None:
        self.size += size
        if self.size > MAX_TEXT:
            problem = f"{self.param}: the grammar for this has more than {MAX_TEXT} characters; simplify it"
            raise InvalidSchema(problem, param=self.param)

    def literal_terms(self, text: str) -> list[str]:
        """Return the text as terminals and control tokens."""
        return [self._term(part) for part in self._split.split(text) if part]

    def literal(self, text: str) -> str:
        return " ".join(self.literal_terms(text)) or '""'

    def until(self, marker: str, before: str = "TEXT", capture: str | None = None) -> str:
        """Return a rule for free text up to and including the first `marker`. The capture holds the text with
        `until_suffix(marker)`."""
        letters, control, rest = self._split_marker(marker)
        if not control:
            return self.add_rule("until", f"{before} {quote(letters)}", "lazy", capture=capture)
        if letters:
            # The letters may also occur in the text. Only the token after them ends it.
            before = self.add_rule("UNTIL", f"{before} & /(?s:.*){escape_regex(letters)}/")
        until = self.add_rule("until", f"{before} {self._term(control)}", capture=capture)
        return " ".join((until, *self.literal_terms(rest)))

    def until_suffix(self, marker: str) -> str:
        return "".join(self._split_marker(marker)[:2])

    def _split_marker(self, marker: str) -> tuple[str, str, str]:
        """Return the letters before the first control token, that token, and the rest."""
        letters, *found = self._split.split(marker, maxsplit=1)
        return (letters, found[0], found[1]) if found else (letters, "", "")

    def build(self, start: str) -> str:
        self._add_size(len(start))
        return "%llguidance {}\n" + TERMINALS + "\n".join((*self.lines, f"start: {start}")) + "\n"

    def _term(self, part: str) -> str:
        token = self.control.get(part)
        return quote(part) if token is None else f"<[{token}]>"
