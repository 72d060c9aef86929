"""Writes single schemas of a document with only the definitions they refer to.

A tool may have a thousand parameters that refer to the same definitions. Each definition is copied once, and a schema
is written with only the definitions it can reach.
"""

import json
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

from dragoman.grammar.schema import json_directive
from dragoman.grammar.schema_walk import (
    PathParts,
    find_anchors,
    lookup,
    rebase_refs,
    resolve_ref,
    rewrite_refs,
    walk_schemas,
)

DEFINITION_KEYWORDS = frozenset({"$defs", "definitions", "$anchor"})
"""Keywords that are dropped because references point to the copied definitions instead."""


class Subschemas:
    def __init__(self, document: Any) -> None:
        self.document = document
        self._numbers: dict[PathParts, int] = {}
        self._copies: dict[PathParts, tuple[str, tuple[PathParts, ...]]] = {}
        self._definition_texts: dict[tuple[PathParts, ...], str] = {}

    def json_directive(self, schema: Mapping[str, Any]) -> str:
        """Return one of the schemas as a `%json` directive."""
        if not self._has_only_local_refs:
            return json_directive(rebase_refs(schema, "/$defs/all"), self._whole_document)
        copy, targets = self._rewrite(schema)
        reachable = self._find_reachable(targets)
        if reachable not in self._definition_texts:
            members = (f"{json.dumps(self._name(parts))}: {self._definition(parts)[0]}" for parts in reachable)
            self._definition_texts[reachable] = f"{{{', '.join(members)}}}"
        return json_directive(copy, self._definition_texts[reachable] if reachable else "")

    @cached_property
    def _anchors(self) -> dict[str, PathParts]:
        return find_anchors(self.document)

    @cached_property
    def _has_only_local_refs(self) -> bool:
        """Whether every reference can be resolved here. References by `$id` need the whole document."""
        schemas = [inner for _, inner in walk_schemas(self.document) if isinstance(inner, Mapping)]
        return not any("$id" in inner for inner in schemas) and all(
            resolve_ref(self.document, inner["$ref"], self._anchors) is not None for inner in schemas if "$ref" in inner
        )

    @cached_property
    def _whole_document(self) -> str:
        return json.dumps({"all": rebase_refs(self.document, "/$defs/all")}, ensure_ascii=False)

    def _name(self, parts: PathParts) -> str:
        return str(self._numbers.setdefault(parts, len(self._numbers)))

    def _rewrite(self, schema: Any) -> tuple[Any, tuple[PathParts, ...]]:
        """Return the schema with references to copied definitions, and the paths of those definitions."""
        targets: dict[PathParts, None] = {}

        def refer(reference: str) -> str:
            parts = resolve_ref(self.document, reference, self._anchors)
            assert parts is not None
            targets[parts] = None
            return f"#/$defs/{self._name(parts)}"

        copy = rewrite_refs(schema, refer, lambda keyword, _: keyword not in DEFINITION_KEYWORDS)
        return copy, tuple(targets)

    def _definition(self, parts: PathParts) -> tuple[str, tuple[PathParts, ...]]:
        if parts not in self._copies:
            copy, targets = self._rewrite(lookup(self.document, parts))
            self._copies[parts] = json.dumps(copy, ensure_ascii=False), targets
        return self._copies[parts]

    def _find_reachable(self, targets: Iterable[PathParts]) -> tuple[PathParts, ...]:
        found = dict.fromkeys(targets)
        pending = list(found)
        while pending:
            for parts in self._definition(pending.pop())[1]:
                if parts not in found:
                    found[parts] = None
                    pending.append(parts)
        return tuple(found)
