"""Finds the alias that a model name matches."""

import fnmatch
from collections.abc import Mapping


class AliasTable:
    """Aliases from the most to the least specific pattern; equally specific ones in the order of the file."""

    def __init__(self, aliases: Mapping[str, str]) -> None:
        self.targets: dict[str, str] = {}
        for pattern, target in sorted(aliases.items(), key=lambda alias: _vagueness(alias[0])):
            self.targets.setdefault(pattern.lower(), target)

    def resolve(self, name: str) -> str | None:
        if name in self.targets:
            return self.targets[name]
        return next((target for pattern, target in self.targets.items() if fnmatch.fnmatchcase(name, pattern)), None)


def _vagueness(pattern: str) -> tuple[int, int, int]:
    """Sort key: patterns with more literal characters come first."""
    stars, single = pattern.count("*"), pattern.count("?")
    return stars + single - len(pattern), stars, -single
