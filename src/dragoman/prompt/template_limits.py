"""Limits the values that chat templates produce: text, items of lists, digits of numbers.

Templates come with model files and are not trusted. Time is checked between steps, so no single step may be large:
every operation that can make a longer value is measured first. Only the thread's own processor time counts, so a busy
machine fails no template. Lists may contain each other, so a value can be much
larger than its memory: it is measured before it is printed, compared or hashed (`check_container`). While a template is
probed with examples, its total output is limited (`limit_rendering`).
"""

import math
import re
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, MappingView
from contextlib import contextmanager
from itertools import islice
from types import BuiltinMethodType
from typing import Any

from jinja2 import TemplateError
from jinja2.utils import Namespace

MAX_SOURCE = 256 * 1024
"""Characters of a template. The longest known templates have a quarter of this."""
MAX_TEXT = 64 * 2**20
MAX_ITEMS = 1_000_000
MAX_CONTAINER_ITEMS = 250_000
"""Items of a value that is printed, compared or hashed as a whole, such as the schemas of tools."""
MAX_BITS = 512
MAX_WIDTH = 10_000
MAX_SLOW_TEXT = 100_000
"""Characters for filters that process each character in Python."""

CONTAINERS = (list, tuple, dict, MappingView, Namespace)
PADDING = ("ljust", "rjust", "zfill")
SPLITTING = ("split", "rsplit", "splitlines")
COMPARING = ("index", "count")


class TemplateLimitError(TemplateError):
    """The template exceeds a limit."""


class _Limits(threading.local):
    """The limits of what this thread renders now."""

    seconds = 0.0
    end = math.inf
    processor_end = math.inf
    left: float = math.inf


_limits = _Limits()


@contextmanager
def limit_rendering(seconds: float, size: float = math.inf) -> Iterator[None]:
    """Limit the processor time of everything that this thread renders inside the context, and the sum of characters
    and items that it produces."""
    _limits.seconds, _limits.left = seconds, size
    _limits.end, _limits.processor_end = time.monotonic() + seconds, time.thread_time() + seconds
    try:
        yield
    finally:
        _limits.end = _limits.left = math.inf


def check_time() -> bool:
    # Reading the processor time is a system call. It is never ahead of the clock, which is cheaper and so comes first.
    if time.monotonic() > _limits.end and time.thread_time() > _limits.processor_end:
        raise TemplateLimitError(f"more than {_limits.seconds:g} s")
    return True


def check_container(value: Any) -> Any:
    """Return the value. Raises TemplateLimitError if it is too large to be printed, compared or hashed. Items that
    occur twice count twice."""
    if not isinstance(value, CONTAINERS):
        return value
    items, text, pending = MAX_CONTAINER_ITEMS, MAX_TEXT, [value]
    while pending:
        children = _children(pending.pop())
        items -= len(children)
        text -= sum([len(inner) for inner in children if isinstance(inner, str)])
        if items < 0 or text < 0:
            raise _too_long()
        pending += [inner for inner in children if isinstance(inner, CONTAINERS)]
    return value


def _children(value: Any) -> list[Any]:
    if isinstance(value, Namespace):
        value = value._Namespace__attrs
    return [*value.keys(), *value.values()] if isinstance(value, dict) else list(value)


def join_pieces(pieces: Iterable[str]) -> str:
    size, collected = 0, []
    for piece in pieces:
        check_time()
        size += len(piece)
        if size > MAX_TEXT:
            raise _too_long()
        collected.append(piece)
    _charge(size)
    return "".join(collected)


def check_operation(operator: str, left: Any, right: Any) -> None:
    if operator == "%" and isinstance(left, str):
        check_container(right)
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


def check_call(method: Any, arguments: tuple[Any, ...], options: Mapping[str, Any]) -> tuple[Any, ...]:
    """Check a call of a string method that could produce a much longer value. Return the arguments to pass."""
    text, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
    if isinstance(method, BuiltinMethodType) or method is dict:
        if name in COMPARING:
            check_container(text)
        for value in (*arguments, *options.values()):
            check_container(value)
    if not isinstance(text, str):
        return arguments
    if name == "join" and arguments:
        arguments = (to_list(arguments[0]),)
        check_join(text, arguments[0])
    elif name == "replace":
        check_replace(text, *arguments[:2])
    elif name in PADDING and arguments:
        check_width(arguments[0])
    elif name in SPLITTING:
        separator = arguments[0] if arguments else options.get("sep")
        pieces = text.count(separator) if isinstance(separator, str) and separator else len(text) // 2
        _check_size([], pieces)
    return arguments


def check_replace(text: str, old: Any = None, new: Any = None) -> None:
    if isinstance(old, str) and isinstance(new, str):
        times = text.count(old) if old else len(text) + 1
        _check_size(text, len(text) + times * len(new))


def to_list(values: Iterable[Any]) -> list[Any]:
    found = list(islice(values, MAX_ITEMS + 1))
    _check_size(found, len(found))
    return found


def check_join(separator: str, items: list[Any]) -> None:
    _check_size(separator, sum(map(_size, items)) + len(separator) * len(items))


def check_width(width: Any) -> None:
    if isinstance(width, int) and abs(width) > MAX_WIDTH:
        raise TemplateLimitError(f"a width of more than {MAX_WIDTH}")


def check_format(text: str, values: Iterable[Any]) -> None:
    """Check a format string. A width may be in the string or among the values."""
    arguments = tuple(values)
    check_container(arguments)
    if _WIDE_FIELD.search(text):
        raise TemplateLimitError(f"a width of more than {MAX_WIDTH}")
    if _DYNAMIC_WIDTH.search(text):
        for value in arguments:
            check_width(value)
    fields = text.count("%") + text.count("{")
    _check_size(text, len(text) + fields * max([MAX_WIDTH, *map(_size, arguments)]))


_WIDE_FIELD = re.compile(r"%(?:\([^()%]*\))?[^a-zA-Z%(]*\d{5}|\{[^{}]*\d{5}")
_DYNAMIC_WIDTH = re.compile(r"%(?:\([^()%]*\))?[^a-zA-Z%(]*\*|\{[^{}]*\{")


def _check_number(operator: str, left: int, right: int) -> None:
    bits = {"*": left.bit_length() + right.bit_length(), "**": left.bit_length() * max(right, 1)}.get(operator, 0)
    if bits > MAX_BITS:
        raise TemplateLimitError(f"a number of more than {MAX_BITS} bits")


def _check_size(value: Any, size: int) -> None:
    if size > (MAX_TEXT if isinstance(value, str) else MAX_ITEMS):
        raise _too_long()
    _charge(size)


def _charge(size: int) -> None:
    if size > _limits.left:
        raise TemplateLimitError("more text than allowed for examples")
    _limits.left -= max(size, 0)


def _size(value: Any) -> int:
    return len(value) if isinstance(value, str | bytes | list | tuple) else 0


def _too_long() -> TemplateLimitError:
    return TemplateLimitError("more text than allowed in a prompt")
