"""How much a template may make: of text, of items in a list, of digits in a number.

A template comes with a model file. Time is watched between its steps, so no single step may be large: whatever makes
a longer value of shorter ones is measured before it is done. (A structure of lists that hold each other can still
print more than it should; that is why engines with templates run in a process of their own.)
"""

import re
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

from jinja2 import TemplateError

MOST_TEXT = 64 * 2**20
MOST_ITEMS = 1_000_000
MOST_BITS = 512
WIDEST = 10_000

PADDING = ("center", "ljust", "rjust", "zfill")


class TooMuchError(TemplateError):
    """The template takes or makes more than it may."""


def joined(pieces: Iterable[str]) -> str:
    size, kept = 0, []
    for piece in pieces:
        size += len(piece)
        if size > MOST_TEXT:
            raise _too_long()
        kept.append(piece)
    return "".join(kept)


def check_operation(operator: str, left: Any, right: Any) -> None:
    if operator == "%" and isinstance(left, str):
        values = right.values() if isinstance(right, dict) else right
        check_format(left, [values] if isinstance(values, str) or not isinstance(values, Iterable) else values)
    elif isinstance(left, int) and isinstance(right, int):
        _check_number(operator, left, right)
    elif operator == "+":
        _check_size(left, _size(left) + _size(right))
    elif operator == "*":
        sized, times = (right, left) if isinstance(left, int) else (left, right)
        if isinstance(times, int):
            _check_size(sized, _size(sized) * times)


def measured(method: Any, arguments: tuple[Any, ...], options: Mapping[str, Any]) -> tuple[Any, ...]:
    """The arguments for a method, which is perhaps one of a text that could make a much longer one. `options` are those
    that are given by name."""
    text, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
    if not isinstance(text, str):
        return arguments
    if name == "expandtabs":
        check_tabs(text, arguments[0] if arguments else options.get("tabsize", 8))
    elif name == "join" and arguments:
        arguments = (listed(arguments[0]),)
        check_join(text, arguments[0])
    elif name == "replace":
        check_replace(text, *arguments[:2])
    elif name == "translate" and arguments:
        check_translation(text, arguments[0])
    elif name in PADDING and arguments:
        check_width(arguments[0])
    return arguments


def check_tabs(text: str, width: Any) -> None:
    check_width(width)
    if isinstance(width, int):
        _check_size(text, len(text) + text.count("\t") * width)


def check_translation(text: str, table: Any) -> None:
    values = table.values() if isinstance(table, dict) else table
    if isinstance(values, Iterable):
        _check_size(text, len(text) * max(map(_size, values), default=1))


def check_replace(text: str, old: Any = None, new: Any = None) -> None:
    if isinstance(old, str) and isinstance(new, str):
        times = text.count(old) if old else len(text) + 1
        _check_size(text, len(text) + times * len(new))


def listed(values: Iterable[Any]) -> list[Any]:
    found = list(islice(values, MOST_ITEMS + 1))
    _check_size(found, len(found))
    return found


def check_join(separator: str, items: list[Any]) -> None:
    _check_size(separator, sum(map(_size, items)) + len(separator) * len(items))


def check_width(width: Any) -> None:
    if isinstance(width, int) and abs(width) > WIDEST:
        raise TooMuchError(f"a width of more than {WIDEST}")


def check_format(text: str, values: Iterable[Any]) -> None:
    """A width stands in the text itself, or is one of the values."""
    given = tuple(values)
    if _WIDE.search(text):
        raise TooMuchError(f"a width of more than {WIDEST}")
    if _WIDTH_GIVEN.search(text):
        for value in given:
            check_width(value)
    holes = text.count("%") + text.count("{")
    _check_size(text, len(text) + holes * max([WIDEST, *map(_size, given)]))


_WIDE = re.compile(r"%(?:\([^()%]*\))?[^a-zA-Z%(]*\d{5}|\{[^{}]*\d{5}")
_WIDTH_GIVEN = re.compile(r"%(?:\([^()%]*\))?[^a-zA-Z%(]*\*|\{[^{}]*\{")


def _check_number(operator: str, left: int, right: int) -> None:
    bits = {"*": left.bit_length() + right.bit_length(), "**": left.bit_length() * max(right, 1)}.get(operator, 0)
    if bits > MOST_BITS:
        raise TooMuchError("a number that is too large")


def _check_size(value: Any, size: int) -> None:
    if size > (MOST_TEXT if isinstance(value, str) else MOST_ITEMS):
        raise _too_long()


def _size(value: Any) -> int:
    return len(value) if isinstance(value, str | bytes | list | tuple) else 0


def _too_long() -> TooMuchError:
    return TooMuchError("more text than a prompt can have")
