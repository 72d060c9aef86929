"""What could not be enforced, looked at afterwards.

Rules
1. A pattern is searched for with a limit in time and without holding Python's lock. One that takes longer counts as
   found: the reply is not called wrong for what nobody could find out.
2. So has everything that is looked at in one reply: what is left when the time is over counts as fitting.
3. Nothing is fetched, whatever a schema refers to.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any

import msgspec
import regex
from jsonschema import (
    Draft3Validator,
    Draft4Validator,
    Draft6Validator,
    Draft202012Validator,
    ValidationError,
    validators,
)
from jsonschema.protocols import Validator
from jsonschema.validators import extend, validator_for
from referencing import Registry
from referencing.exceptions import Unresolvable

SEARCH_SECONDS = 0.1
REPLY_SECONDS = 0.5
"""Of the processor's time."""
LONGEST_WORDS = 200

Keyword = Callable[[Any, Any, Any, Any], Iterable[ValidationError] | None]

OLD = extend(Draft4Validator, {"items": Draft6Validator.VALIDATORS["items"]})
"""For drafts that know no booleans as schemas: here they may stand in any."""


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
    look = _Look()
    found = (look.violation(by_name[name], text) for name, text in captured if name in by_name)
    return tuple(dict.fromkeys(words for words in found if words))


class _OutOfTimeError(Exception):
    pass


class _Look:
    """At one reply, as long as there is time."""

    def __init__(self) -> None:
        self.end = time.thread_time() + REPLY_SECONDS

    def left(self) -> float:
        seconds = self.end - time.thread_time()
        if seconds <= 0:
            raise _OutOfTimeError
        return seconds

    def violation(self, check: Check, text: bytes) -> str | None:
        try:
            self.left()
            value = msgspec.json.decode(text) if check.end is None else text.decode().removesuffix(check.end)
            error = next(self._validator(check.schema).iter_errors(value), None)
        except (ValueError, ArithmeticError, RecursionError, Unresolvable, _OutOfTimeError):
            # Cut short, too large or too deep to look at, a reference that only a fetch could follow, or a name that
            # is none.
            return None
        if error is None:
            return None
        where = "".join(f"[{part!r}]" for part in error.absolute_path)
        return f"the reply does not fit {check.path}: {where} {error.message}"[:LONGEST_WORDS].replace(":  ", ": ")

    def _validator(self, schema: Mapping[str, Any]) -> Validator:
        given = validator_for(schema, default=Draft202012Validator)
        draft = OLD if given in (Draft3Validator, Draft4Validator) else given
        keywords: dict[str, Keyword] = {**draft.VALIDATORS, "pattern": self._pattern, "uniqueItems": _unique}
        keywords |= {"patternProperties": self._pattern_properties, "additionalProperties": self._additional}
        if "patternProperties" in str(schema):
            # What is left unevaluated is found by searching for patterns too, in the library's own way.
            keywords.pop("unevaluatedProperties", None)
        watched = {name: self._watched(keyword) for name, keyword in keywords.items()}
        return validators.create(draft.META_SCHEMA, watched, type_checker=draft.TYPE_CHECKER, id_of=draft.ID_OF)(
            schema, registry=Registry()
        )

    def _watched(self, keyword: Keyword) -> Keyword:
        def watched(validator: Any, value: Any, instance: Any, schema: Any) -> Iterable[ValidationError] | None:
            self.left()
            return keyword(validator, value, instance, schema)

        return watched

    def _found(self, pattern: str, text: str) -> bool:
        timeout = min(SEARCH_SECONDS, self.left())
        try:
            return _compiled(pattern).search(text, timeout=timeout, concurrent=True) is not None
        except (TimeoutError, regex.error):
            return True

    def _pattern(self, validator: Any, pattern: str, instance: Any, schema: Any) -> Iterator[ValidationError]:
        if isinstance(instance, str) and not self._found(pattern, instance):
            yield ValidationError(f"{instance[:40]!r} does not match {pattern[:80]!r}")

    def _pattern_properties(
        self, validator: Any, patterns: Any, instance: Any, schema: Any
    ) -> Iterator[ValidationError]:
        if isinstance(instance, dict):
            for pattern, inner in patterns.items():
                for name, value in instance.items():
                    if self._found(pattern, name):
                        yield from validator.descend(value, inner, path=name, schema_path=pattern)

    def _additional(self, validator: Any, inner: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
        if not isinstance(instance, dict):
            return
        known, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
        for name, value in instance.items():
            if name not in known and not any(self._found(pattern, name) for pattern in patterns):
                yield from validator.descend(value, inner, path=name)


def _unique(validator: Any, wanted: bool, instance: Any, schema: Any) -> Iterator[ValidationError]:
    """By their text: the library compares each with each."""
    if wanted and isinstance(instance, list):
        items = (int(item) if isinstance(item, float) and item.is_integer() else item for item in instance)
        if len({msgspec.json.encode(item, order="deterministic") for item in items}) < len(instance):
            yield ValidationError("some items are the same")


@lru_cache(256)
def _compiled(pattern: str) -> "regex.Pattern[str]":
    return regex.compile(pattern)
