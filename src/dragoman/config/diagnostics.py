"""Errors and warnings about a configuration, with the line and key, or the flag, that they belong to."""

import math
import re
from collections.abc import Container, Iterable, Mapping
from typing import Literal

import msgspec

Level = Literal["error", "unservable", "warning"]
_LAST_PART = re.compile(r"(\.[^.\[]*|\[[^\[]*|^[^.\[]*)$")


class Diagnostic(msgspec.Struct, frozen=True):
    """A problem with one setting. `key` is written as `models.mine.source`.

    error       the server does not start
    unservable  requests for one model fail; the server starts, but a reload that would cause this is refused
    warning     valid, but probably unintended
    """

    key: str
    message: str
    level: Level = "error"
    line: int | None = None
    """The line in the file, if it is not that of the key."""


class Locations(msgspec.Struct, frozen=True):
    """Where the settings come from: the lines of the keys in a file, and the flags by the key that they set."""

    file: str = ""
    lines: Mapping[str, int] = {}
    flags: Mapping[str, str] = {}

    def format(self, diagnostics: Iterable[Diagnostic]) -> list[str]:
        """Return one line of text for each, in the order of the file; those without a line come last."""
        located = sorted(map(self._locate, diagnostics), key=lambda found: found.line or math.inf)
        prefixes = (f"{self.file}:{found.line}: " if found.line else "" for found in located)
        return [f"{prefix}{found.key}: {found.message}" for prefix, found in zip(prefixes, located, strict=True)]

    def _locate(self, diagnostic: Diagnostic) -> Diagnostic:
        flag = find_known_key(diagnostic.key, self.flags)
        if flag:
            return msgspec.structs.replace(diagnostic, key=self.flags[flag])
        key = self._written_key(diagnostic.key)
        line = diagnostic.line or self.lines.get(find_known_key(key, self.lines))
        return msgspec.structs.replace(diagnostic, key=key, line=line)

    def _written_key(self, key: str) -> str:
        """Return the key as it is in the file: `source` may be `path` or the whole entry, and a list one string."""
        model, directory = key.removesuffix(".source"), key.removesuffix("[0]")
        forms = [key, *((f"{model}.path", model) if model != key else (directory,))]
        return next((form for form in forms if form in self.lines), key)


def find_known_key(key: str, known: Container[str]) -> str:
    """Return the key, or its nearest known parent, or an empty string."""
    while key and key not in known:
        key = _LAST_PART.sub("", key)
    return key
