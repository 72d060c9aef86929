"""Validates finished replies against schema keywords that were not enforced.

Rules
1. A pattern search has a time limit and releases the GIL. A search that times out counts as a match.
2. The validation of one reply has a time limit. What is not checked by then counts as valid.
3. Remote references are not fetched.
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
"""CPU time."""
MAX_WARNING = 200

Keyword = Callable[[Any, Any, Any, Any], Iterable[ValidationError] | None]

DRAFT4 = extend(Draft4Validator, {"items": Draft6Validator.VALIDATORS["items"]})
"""For drafts without boolean schemas, which are accepted here in all drafts."""


class SchemaCheck(msgspec.Struct, frozen=True):
    """A captured text must match `schema`. `end`: the text is a plain string with this suffix instead of JSON."""

    capture: str
    schema: Mapping[str, Any]
    path: str
    end: str | None = None


def find_violations(checks: Iterable[SchemaCheck], captured: Iterable[tuple[str, bytes]]) -> tuple[str, ...]:
    """Return a warning for each captured text that does not match its schema."""
    by_name = {check.capture: check for check in checks}
    checker = _ReplyChecker()
    found = (checker.find_violation(by_name[name], text) for name, text in captured if name in by_name)
    return tuple(dict.fromkeys(warning for warning in found if warning))


class _OutOfTimeError(Exception):
    pass


class _ReplyChecker:
    """Validates one reply within its time limit."""

    def __init__(self) -> None:
        self.end = time.thread_time() + REPLY_SECONDS

    def time_left(self) -> float:
        seconds = self.end - time.thread_time()
        if seconds <= 0:
            raise _OutOfTimeError
        return seconds

    def find_violation(self, check: SchemaCheck, text: bytes) -> str | None:
        try:
            self.time_left()
            value = msgspec.json.decode(text) if check.end is None else text.decode().removesuffix(check.end)
            error = next(self._validator(check.schema).iter_errors(value), None)
        except (ValueError, ArithmeticError, RecursionError, Unresolvable, _OutOfTimeError):
            # The reply is truncated, too large or too deep, or a reference cannot be resolved.
            return None
        if error is None:
            return None
        where = "".join(f"[{part!r}]" for part in error.absolute_path)
        return f"the reply does not match {check.path}: {where} {error.message}"[:MAX_WARNING].replace(":  ", ": ")

    def _validator(self, schema: Mapping[str, Any]) -> Validator:
        declared = validator_for(schema, default=Draft202012Validator)
        draft = DRAFT4 if declared in (Draft3Validator, Draft4Validator) else declared
        keywords: dict[str, Keyword] = {**draft.VALIDATORS, "pattern": self._pattern, "uniqueItems": _unique_items}
        keywords |= {"patternProperties": self._pattern_properties, "additionalProperties": self._additional_properties}
        if "patternProperties" in str(schema):
            # The library's implementation searches for patterns without a time limit.
            keywords.pop("unevaluatedProperties", None)
        checked = {name: self._with_deadline(keyword) for name, keyword in keywords.items()}
        return validators.create(draft.META_SCHEMA, checked, type_checker=draft.TYPE_CHECKER, id_of=draft.ID_OF)(
            schema, registry=Registry()
        )

    def _with_deadline(self, keyword: Keyword) -> Keyword:
        def checked(validator: Any, value: Any, instance: Any, schema: Any) -> Iterable[ValidationError] | None:
            self.time_left()
            return keyword(validator, value, instance, schema)

        return checked

    def _matches(self, pattern: str, text: str) -> bool:
        timeout = min(SEARCH_SECONDS, self.time_left())
        try:
            return _compiled(pattern).search(text, timeout=timeout, concurrent=True) is not None
        except (TimeoutError, regex.error):
            return True

    def _pattern(self, validator: Any, pattern: str, instance: Any, schema: Any) -> Iterator[ValidationError]:
        if isinstance(instance, str) and not self._matches(pattern, instance):
            yield ValidationError(f"{instance[:40]!r} does not match {pattern[:80]!r}")

    def _pattern_properties(
        self, validator: Any, patterns: Any, instance: Any, schema: Any
    ) -> Iterator[ValidationError]:
        if isinstance(instance, dict):
            for pattern, inner in patterns.items():
                for name, value in instance.items():
                    if self._matches(pattern, name):
                        yield from validator.descend(value, inner, path=name, schema_path=pattern)

    def _additional_properties(
        self, validator: Any, inner: Any, instance: Any, schema: Any
    ) -> Iterator[ValidationError]:
        if not isinstance(instance, dict):
            return
        known, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
        for name, value in instance.items():
            if name not in known and not any(self._matches(pattern, name) for pattern in patterns):
                yield from validator.descend(value, inner, path=name)


def _unique_items(validator: Any, enabled: bool, instance: Any, schema: Any) -> Iterator[ValidationError]:
    """Compare items by their JSON text: the library compares all pairs."""
    if enabled and isinstance(instance, list):
        items = (int(item) if isinstance(item, float) and item.is_integer() else item for item in instance)
        if len({msgspec.json.encode(item, order="deterministic") for item in items}) < len(instance):
            yield ValidationError("array items are not unique")


@lru_cache(256)
def _compiled(pattern: str) -> "regex.Pattern[str]":
    return regex.compile(pattern)
