"""Extracts the text in the arguments of a custom tool while they arrive.

    arguments := "{" "input" ":" string "}"

Rules
1. The joined text does not depend on how the arguments are split.
2. Arguments that start differently are parsed when complete. The text is their `input`, or their only string, or the
   arguments unchanged.
3. If the reply is cut off, the text is the part of the string that arrived.
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
_REPLACEMENT = "\ufffd"


def wrap(text: str) -> str:
    return json.dumps({NAME: text}, ensure_ascii=False)


def extract_text(arguments: str) -> str:
    extractor = TextExtractor()
    return extractor.feed(arguments) + extractor.end()


class TextExtractor:
    def __init__(self) -> None:
        self._prefix: list[str] | None = []
        """The arguments before the string; None once it has started."""
        self._may_start = True
        self._escape = ""
        """An incomplete escape sequence."""
        self._high_surrogate: int | None = None
        self._closed = False

    def feed(self, arguments: str) -> str:
        """Return the next piece of the text."""
        if self._prefix is None:
            return self._read(arguments)
        self._prefix.append(arguments)
        if not self._may_start:
            return ""
        start = "".join(self._prefix)
        opening = _OPENING.match(start)
        if opening is None or opening.end() > _LONGEST_OPENING:
            self._may_start = len(start) < _LONGEST_OPENING
            return ""
        self._prefix = None
        return self._read(start[opening.end() :])

    def end(self) -> str:
        return "" if self._prefix is None else _parse_complete("".join(self._prefix))

    def _read(self, text: str) -> str:
        if self._closed:
            return ""
        out: list[str] = []
        text, self._escape = self._escape + text, ""
        for token in _TOKEN.finditer(text):
            kind, found = token.lastgroup, token[token.lastgroup or 0]
            if kind == "part":
                self._escape = found
                break
            if kind == "end":
                self._closed = True
                break
            if kind == "unit":
                out.append(self._unit(int(found, 16)))
                continue
            out.append(self._flush_surrogate())
            out.append(_SHORT.get(found, found) if kind == "short" else found)
        return "".join(out)

    def _unit(self, unit: int) -> str:
        """Decode a UTF-16 unit. A high surrogate waits for the low one."""
        if 0xDC00 <= unit < 0xE000:
            high, self._high_surrogate = self._high_surrogate, None
            return _REPLACEMENT if high is None else chr(0x10000 + ((high - 0xD800) << 10) + unit - 0xDC00)
        replaced = self._flush_surrogate()
        if 0xD800 <= unit < 0xDC00:
            self._high_surrogate = unit
            return replaced
        return replaced + chr(unit)

    def _flush_surrogate(self) -> str:
        high, self._high_surrogate = self._high_surrogate, None
        return "" if high is None else _REPLACEMENT


def _parse_complete(arguments: str) -> str:
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    if isinstance(parsed, dict):
        values = [parsed[NAME]] if NAME in parsed else list(parsed.values())
        if len(values) == 1 and isinstance(values[0], str):
            parsed = values[0]
    return parsed.encode("utf-8", "replace").decode() if isinstance(parsed, str) else arguments
