"""Where settings were written, for what turns out to be wrong with them only when the files they name are looked at.

A setting of a file is told with the file, its line and its key; one that a flag gave, or that nobody wrote, by its key.
"""

import re
from collections.abc import Iterable, Mapping

import msgspec

_MODEL = re.compile(r"models\.(.+?)(\.source|\.engine|\.(adapters|args)\..*)?")
_LAST = re.compile(r"(\.[^.\[]*|\[[^\[]*|^[^.\[]*)$")


class Mistake(msgspec.Struct, frozen=True):
    """`key` as `models.mine.source`."""

    key: str
    words: str


class Places(msgspec.Struct, frozen=True):
    file: str
    lines: Mapping[str, int]
    by_flag: frozenset[str] = frozenset()
    """Keys whose values in the file do not count."""

    def told(self, mistakes: Iterable[Mistake]) -> list[str]:
        """In the order of the lines; what has none comes first."""
        return [words for _, words in sorted(map(self._told, mistakes), key=lambda told: told[0])]

    def _told(self, mistake: Mistake) -> tuple[int, str]:
        key = self._written(mistake.key)
        known = key
        while known and known not in self.lines and known not in self.by_flag:
            known = _LAST.sub("", known)
        if known and known not in self.by_flag:
            return self.lines[known], f"{self.file}:{self.lines[known]}: {key}: {mistake.words}"
        model = _MODEL.fullmatch(mistake.key)
        return 0, f"model {model[1]}: {mistake.words}" if model else f"{mistake.key}: {mistake.words}"

    def _written(self, key: str) -> str:
        """A source may have been called a path, or have been the whole entry; a list of one may be no list."""
        model, folder = key.removesuffix(".source"), key.removesuffix("[0]")
        forms = [key, *((f"{model}.path", model) if model != key else (folder,))]
        return next((form for form in forms if form in self.lines), key)
