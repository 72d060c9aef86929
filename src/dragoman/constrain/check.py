"""What could not be enforced, looked at afterwards.

Rules
1. A pattern is searched for with a limit in time and without holding Python's lock. One that takes longer counts as
   found: the reply is not called wrong for what nobody could find out.
2. Nothing is fetched, whatever a schema refers to.
"""

from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any

import msgspec
import regex
from jsonschema import Draft202012Validator, ValidationError
from jsonschema.protocols import Validator
from jsonschema.validators import extend, validator_for
from referencing import Registry
from referencing.exceptions import Unresolvable

SEARCH_SECONDS = 0.1
LONGEST_WORDS = 200


class Check(msgspec.Struct, frozen=True):
    """What was captured under a name has to fit a schema of which some was not enforced. `end`: it is not JSON but a
    text, up to this."""

    capture: str
    schema: Mapping[str, Any]
    path: str
    end: str | None = None


def warnings(checks: Iterable[Check], captured: Iterable[tuple[str, bytes]]) -> tuple[str, ...]:
    """What of a reply does not fit."""
    by_name = {check.capture: check for check in checks}
    found = (_violation(by_name[name], text) for name, text in captured if name in by_name)
    return tuple(dict.fromkeys(words for words in found if words))


def _violation(check: Check, text: bytes) -> str | None:
    try:
        value = msgspec.json.decode(text) if check.end is None else text.decode().removesuffix(check.end)
        error = next(_validator(check.schema).iter_errors(value), None)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, Unresolvable):
        # Cut short, too deep to look at, or a reference that only a fetch could follow.
        return None
    if error is None:
        return None
    where = "".join(f"[{part!r}]" for part in error.absolute_path)
    return f"the reply does not fit {check.path}: {where} {error.message}"[:LONGEST_WORDS].replace(":  ", ": ")


def _validator(schema: Mapping[str, Any]) -> Validator:
    given = validator_for(schema, default=Draft202012Validator)
    careful = {"pattern": _pattern, "patternProperties": _pattern_properties, "additionalProperties": _additional}
    # What is left unevaluated is found by searching for patterns too, in the library's own way.
    skipped = {"unevaluatedProperties": _nothing} if "patternProperties" in str(schema) else {}
    return extend(given, {**careful, **skipped})(schema, registry=Registry())


@lru_cache(256)
def _compiled(pattern: str) -> "regex.Pattern[str]":
    return regex.compile(pattern)


def _found(pattern: str, text: str) -> bool:
    try:
        return _compiled(pattern).search(text, timeout=SEARCH_SECONDS, concurrent=True) is not None
    except (TimeoutError, regex.error):
        return True


def _pattern(validator: Any, pattern: str, instance: Any, schema: Any) -> Iterator[ValidationError]:
    if isinstance(instance, str) and not _found(pattern, instance):
        yield ValidationError(f"{instance[:40]!r} does not match {pattern[:80]!r}")


def _pattern_properties(validator: Any, patterns: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
    if isinstance(instance, dict):
        for pattern, inner in patterns.items():
            for name, value in instance.items():
                if _found(pattern, name):
                    yield from validator.descend(value, inner, path=name, schema_path=pattern)


def _additional(validator: Any, inner: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
    if not isinstance(instance, dict):
        return
    known, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
    for name, value in instance.items():
        if name not in known and not any(_found(pattern, name) for pattern in patterns):
            yield from validator.descend(value, inner, path=name)


def _nothing(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
    yield from ()
