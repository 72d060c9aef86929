"""Schemas of a document, each on its own with no more of the document than it refers to.

A tool may have a thousand parameters that are written one by one, and each of them may refer to the same definitions.
So a definition is copied once, whoever refers to it, and only those are written that are reached.
"""

import json
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

from dragoman.grammar.schema import inline
from dragoman.grammar.schema_walk import Parts, anchors, at, rebased, referring, resolve, walk

DEFINING = frozenset({"$defs", "definitions", "$anchor"})
"""What nothing refers to any more, once references mean excerpts."""


class Excerpts:
    def __init__(self, document: Any) -> None:
        self.document = document
        self._numbers: dict[Parts, int] = {}
        self._copies: dict[Parts, tuple[str, tuple[Parts, ...]]] = {}
        self._written: dict[tuple[Parts, ...], str] = {}

    def inline(self, schema: Mapping[str, Any]) -> str:
        """One of the schemas as a piece of a grammar."""
        if not self._is_plain:
            return inline(rebased(schema, "/$defs/all"), self._whole)
        copy, targets = self._copied(schema)
        reached = self._reached(targets)
        if reached not in self._written:
            members = (f"{json.dumps(self._name(parts))}: {self._copy(parts)[0]}" for parts in reached)
            self._written[reached] = f"{{{', '.join(members)}}}"
        return inline(copy, self._written[reached] if reached else "")

    @cached_property
    def _anchors(self) -> dict[str, Parts]:
        return anchors(self.document)

    @cached_property
    def _is_plain(self) -> bool:
        """Whether every reference is to a place; one that is to a name is followed by whoever reads the whole."""
        schemas = [inner for _, inner in walk(self.document) if isinstance(inner, Mapping)]
        return not any("$id" in inner for inner in schemas) and all(
            resolve(self.document, inner["$ref"], self._anchors) is not None for inner in schemas if "$ref" in inner
        )

    @cached_property
    def _whole(self) -> str:
        return json.dumps({"all": rebased(self.document, "/$defs/all")}, ensure_ascii=False)

    def _name(self, parts: Parts) -> str:
        return str(self._numbers.setdefault(parts, len(self._numbers)))

    def _copied(self, schema: Any) -> tuple[Any, tuple[Parts, ...]]:
        """The schema with references to excerpts, and the places of these."""
        targets: dict[Parts, None] = {}

        def refer(reference: str) -> str:
            parts = resolve(self.document, reference, self._anchors)
            assert parts is not None
            targets[parts] = None
            return f"#/$defs/{self._name(parts)}"

        copy = referring(schema, refer, lambda keyword, _: keyword not in DEFINING)
        return copy, tuple(targets)

    def _copy(self, parts: Parts) -> tuple[str, tuple[Parts, ...]]:
        if parts not in self._copies:
            copy, targets = self._copied(at(self.document, parts))
            self._copies[parts] = json.dumps(copy, ensure_ascii=False), targets
        return self._copies[parts]

    def _reached(self, targets: Iterable[Parts]) -> tuple[Parts, ...]:
        found = dict.fromkeys(targets)
        pending = list(found)
        while pending:
            for parts in self._copy(pending.pop())[1]:
                if parts not in found:
                    found[parts] = None
                    pending.append(parts)
        return tuple(found)
