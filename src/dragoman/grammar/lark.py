"""Pieces of grammar text, in llguidance's dialect of Lark.

Rules
1. A marker that is a control token of the model is that token, never its letters; any other text is its letters.
2. Free text never holds control tokens.
3. White space is bounded wherever it is optional.
4. A grammar that is too long to be compiled is not written to its end.
"""

import json
import re
from collections.abc import Mapping, Sequence

from dragoman.core.errors import InvalidSchema
from dragoman.grammar.schema import WHITE

MOST_TEXT = 1024 * 1024
"""Characters of one grammar."""

_META = re.compile(r"[\\.+*?()|\[\]{}^$#&\-~/]")

ANY = "/(?s:.*)/"
SPACE = "SPACE?"
"""What may stand between the tokens of JSON."""
GAP = "GAP?"
"""What may stand between markers."""

TERMINALS = f"SPACE: /{WHITE}/\nGAP: /[ \\t\\n]{{1,4}}/\nTEXT: {ANY}\n"


def quoted(text: str) -> str:
    """The text as a terminal."""
    return json.dumps(text, ensure_ascii=False)


def escaped(text: str) -> str:
    """The text as a part of a regular expression between slashes."""
    return _META.sub(lambda found: "\\" + found[0], text).replace("\n", "\\n")


def either(options: Sequence[str]) -> str:
    return options[0] if len(options) == 1 else "(" + " | ".join(options) + ")"


class Rules:
    """The rules of one grammar as they are written. `control` are the ids of markers that are control tokens, `param`
    is the field that asked for it. What is `fixed` has one name in every grammar."""

    def __init__(self, control: Mapping[str, int], param: str) -> None:
        self.control = control
        self.param = param
        self.size = 0
        self.fixed: set[str] = set()
        self.lines: list[str] = []
        self.names: dict[tuple[str, str, str], str] = {}
        longest_first = sorted(control, key=len, reverse=True)
        self._split = re.compile("(" + ("|".join(map(re.escape, longest_first)) or "(?!)") + ")")

    def rule(self, hint: str, body: str, options: str = "") -> str:
        return self._define(hint, body, options)

    def terminal(self, hint: str, body: str) -> str:
        return self._define(hint.upper(), body, "")

    def _define(self, hint: str, body: str, options: str) -> str:
        name = self.names.setdefault((hint, body, options), f"{hint}_{len(self.lines)}")
        if name == f"{hint}_{len(self.lines)}":
            self._grow(len(body))
            self.lines.append(f"{name}{options}: {body}")
        return name

    def _grow(self, size: int) -> None:
        self.size += size
        if self.size > MOST_TEXT:
            problem = f"{self.param}: this makes a grammar of more than {MOST_TEXT} characters; ask for less at once"
            raise InvalidSchema(problem, param=self.param)

    def pieces(self, text: str) -> list[str]:
        """The text as terminals and control tokens."""
        return [self._piece(part) for part in self._split.split(text) if part]

    def text(self, text: str) -> str:
        return " ".join(self.pieces(text)) or '""'

    def until(self, marker: str, before: str = "TEXT", capture: str | None = None) -> str:
        """Free text up to the first place where the marker stands, and the marker. What is captured of it is the text
        with `ending(marker)`."""
        letters, control, rest = self._parted(marker)
        held = "" if capture is None else f'capture="{capture}"'
        if not control:
            return self.rule("until", f"{before} {quoted(letters)}", f"[lazy, {held}]" if held else "[lazy]")
        if letters:
            # Letters alone may stand in the text; it is the token behind them that ends it.
            before = self.terminal("UNTIL", f"{before} & /(?s:.*){escaped(letters)}/")
        until = self.rule("until", f"{before} {self._piece(control)}", f"[{held}]" if held else "")
        return " ".join((until, *self.pieces(rest)))

    def ending(self, marker: str) -> str:
        return "".join(self._parted(marker)[:2])

    def _parted(self, marker: str) -> tuple[str, str, str]:
        """The letters before the first control token, that token, and the rest."""
        letters, *found = self._split.split(marker, maxsplit=1)
        return (letters, found[0], found[1]) if found else (letters, "", "")

    def grammar(self, start: str) -> str:
        self._grow(len(start))
        return "%llguidance {}\n" + TERMINALS + "\n".join((*self.lines, f"start: {start}")) + "\n"

    def _piece(self, part: str) -> str:
        token = self.control.get(part)
        return quoted(part) if token is None else f"<[{token}]>"
