"""How much a template may make: of text, of items in a list, of digits in a number.

A template comes with a model file. Time is watched between its steps, so no single step may be large: whatever makes
a longer value of shorter ones is measured before it is done. Lists may hold each other, so that a structure is much
larger than the memory it takes: it is measured before it is printed, compared or hashed (`check_tree`). While a
template is examined with small examples, its whole output is limited (`limit_output`).
"""

import re
import threading
from collections.abc import Iterable, Iterator, Mapping, MappingView
from contextlib import contextmanager
from itertools import islice
from types import BuiltinMethodType
from typing import Any

from jinja2 import TemplateError
from jinja2.utils import Namespace

MOST_SOURCE = 256 * 1024
"""Characters of a template; the longest known templates have a quarter of that."""
MOST_TEXT = 64 * 2**20
MOST_ITEMS = 1_000_000
MOST_TREE_ITEMS = 250_000
"""Of a value that is printed, compared or hashed as a whole, such as the schemas of tools."""
MOST_BITS = 512
WIDEST = 10_000
MOST_SLOW_TEXT = 100_000
"""Characters, for filters that process each character in Python."""

TREES = (list, tuple, dict, MappingView, Namespace)
PADDING = ("center", "ljust", "rjust", "zfill")
SPLITTING = ("split", "rsplit", "splitlines")
COMPARING = ("index", "count")


class TooMuchError(TemplateError):
    """The template takes or makes more than it may."""


_made = threading.local()


@contextmanager
def limit_output(size: int) -> Iterator[None]:
    """Limit the sum of characters and items that templates make in this thread."""
    _made.left = size
    try:
        yield
    finally:
        del _made.left


def check_tree(value: Any) -> None:
    """Raise TooMuchError if a value is too large to be printed, compared or hashed. A value that it holds twice counts
    twice."""
    if not isinstance(value, TREES):
        return
    items, text, unseen = MOST_TREE_ITEMS, MOST_TEXT, [value]
    while unseen:
        held = _children(unseen.pop())
        items -= len(held)
        text -= sum([len(inner) for inner in held if isinstance(inner, str)])
        if items < 0 or text < 0:
            raise _too_long()
        unseen += [inner for inner in held if isinstance(inner, TREES)]


def _children(value: Any) -> list[Any]:
    if isinstance(value, Namespace):
        value = value._Namespace__attrs
    return [*value.keys(), *value.values()] if isinstance(value, dict) else list(value)


def check_slow_input(value: Any) -> None:
    if isinstance(value, str) and len(value) > MOST_SLOW_TEXT:
        raise TooMuchError(f"a text of more than {MOST_SLOW_TEXT} characters in a slow filter")


def joined(pieces: Iterable[str]) -> str:
    size, kept = 0, []
    for piece in pieces:
        size += len(piece)
        if size > MOST_TEXT:
            raise _too_long()
        kept.append(piece)
    _spend(size)
    return "".join(kept)


def check_operation(operator: str, left: Any, right: Any) -> None:
    if operator == "%" and isinstance(left, str):
        check_tree(right)
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
    if isinstance(method, BuiltinMethodType) or method is dict:
        if name in COMPARING:
            check_tree(text)
        for value in (*arguments, *options.values()):
            check_tree(value)
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
    elif name in SPLITTING:
        separator = arguments[0] if arguments else options.get("sep")
        pieces = text.count(separator) if isinstance(separator, str) and separator else len(text) // 2
        _check_size([], pieces)
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
    check_tree(given)
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
    _spend(size)


def _spend(size: int) -> None:
    left = getattr(_made, "left", None)
    if left is None:
        return
    if size > left:
        raise TooMuchError("more text than an example needs")
    _made.left = left - max(size, 0)


def _size(value: Any) -> int:
    return len(value) if isinstance(value, str | bytes | list | tuple) else 0


def _too_long() -> TooMuchError:
    return TooMuchError("more text than a prompt can have")
