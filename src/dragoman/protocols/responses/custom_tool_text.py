"""The text inside the arguments of a free-text tool, taken out while they arrive.

    arguments := "{" "input" ":" string "}"

Rules
1. However the arguments are cut, the joined text is the same.
2. Arguments that begin otherwise are looked at when they are complete: their `input`, or the only text that they have,
   or else what was written, as it is.
3. A reply may end anywhere: what is there of the string then is the text.
"""

import json
import re

NAME = "input"
_OPENING = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_LONGEST_OPENING = 64
_TOKEN = re.compile(
    r'(?P<plain>[^"\\]+)'
    r"|\\u(?P<unit>[0-9a-fA-F]{4})"
    r"|\\(?P<short>[^u])"
    r'|(?P<end>")'
    r"|(?P<part>\\(?:u[0-9a-fA-F]{0,3})?\Z)"
    r"|(?P<odd>\\)",
    re.DOTALL,
)
_SHORT = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f"}
_LOST = "\ufffd"


def wrap(text: str) -> str:
    return json.dumps({NAME: text}, ensure_ascii=False)


def peeled(arguments: str) -> str:
    peel = Peel()
    return peel.feed(arguments) + peel.end()


class Peel:
    def __init__(self) -> None:
        self._before: list[str] | None = []
        """The arguments as long as the string has not begun."""
        self._may_open = True
        self._rest = ""
        """The beginning of an escape."""
        self._high: int | None = None
        self._closed = False

    def feed(self, arguments: str) -> str:
        """What has become known of the text."""
        if self._before is None:
            return self._read(arguments)
        self._before.append(arguments)
        if not self._may_open:
            return ""
        begun = "".join(self._before)
        opening = _OPENING.match(begun)
        if opening is None or opening.end() > _LONGEST_OPENING:
            self._may_open = len(begun) < _LONGEST_OPENING
            return ""
        self._before = None
        return self._read(begun[opening.end() :])

    def end(self) -> str:
        return "" if self._before is None else _whole("".join(self._before))

    def _read(self, text: str) -> str:
        if self._closed:
            return ""
        out: list[str] = []
        text, self._rest = self._rest + text, ""
        for token in _TOKEN.finditer(text):
            kind, found = token.lastgroup, token[token.lastgroup or 0]
            if kind == "part":
                self._rest = found
                break
            if kind == "end":
                self._closed = True
                break
            if kind == "unit":
                out.append(self._unit(int(found, 16)))
                continue
            out.append(self._lone())
            out.append(_SHORT.get(found, found) if kind == "short" else found)
        return "".join(out)

    def _unit(self, unit: int) -> str:
        """A UTF-16 unit; the first half of a pair waits for the second."""
        if 0xDC00 <= unit < 0xE000:
            high, self._high = self._high, None
            return _LOST if high is None else chr(0x10000 + ((high - 0xD800) << 10) + unit - 0xDC00)
        lost = self._lone()
        if 0xD800 <= unit < 0xDC00:
            self._high = unit
            return lost
        return lost + chr(unit)

    def _lone(self) -> str:
        high, self._high = self._high, None
        return "" if high is None else _LOST


def _whole(arguments: str) -> str:
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    if isinstance(parsed, dict):
        values = [parsed[NAME]] if NAME in parsed else list(parsed.values())
        if len(values) == 1 and isinstance(values[0], str):
            parsed = values[0]
    return parsed.encode("utf-8", "replace").decode() if isinstance(parsed, str) else arguments
