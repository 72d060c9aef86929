"""Where chat templates run: jinja2's immutable sandbox, with what templates of Hugging Face models expect, and bounds.

Rules
1. The clock is looked at in every turn of a loop, in every call and in every piece of output.
2. What could make a value much longer than those it is made of is measured first (`bounds`). So is a value
   that is printed, compared or hashed: lists that hold each other can make it much larger than its memory.
"""

import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime
from functools import wraps
from typing import Any, Literal, NoReturn

import msgspec
from jinja2 import (
    Template,
    TemplateError,
    TemplateSyntaxError,
    filters,
    meta,
    nodes,
    pass_environment,
    pass_eval_context,
)
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from dragoman.core.errors import ConfigError
from dragoman.prompt import template_limits
from dragoman.prompt.content_isolation import FIRST_MARK, LAST_MARK


class RefusedError(TemplateError):
    """The template's own words about a conversation it does not take."""


class Compiled(msgspec.Struct, frozen=True):
    """`variables`: the names it expects to be given. `words`: the strings and attributes it mentions."""

    template: Template
    variables: frozenset[str]
    words: frozenset[str]


class Sandbox(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        extensions = ["jinja2.ext.loopcontrols", _Generation]
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions, finalize=self.measured)
        self.concat = self._joined  # type: ignore[method-assign]
        self.filters |= {"tojson": _tojson, "replace": _replace, "join": _join, "indent": _indent, "format": _format}
        self.filters |= {"center": _center, "round": _round, "sum": _sum}
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": strftime_now}
        # They make much of little, and no chat template asks for them.
        for name in ("wordwrap", "urlize", "batch", "slice"):
            del self.filters[name]
        del self.globals["lipsum"]
        self.filters = {
            name: made if name in STRUCTURAL else _checked(made, name) for name, made in self.filters.items()
        }
        tests: dict[str, Any] = dict(self.tests)
        self.tests = tests | {name: _checked(tests[name], name) for name in COMPARISONS}
        self._clock = threading.local()

    def compiled(self, source: str, own: Callable[[str], str]) -> Compiled:
        """`own` marks the template's literals."""
        if len(source) > template_limits.MOST_SOURCE:
            raise ConfigError(
                f"the chat template has {len(source)} characters, more than {template_limits.MOST_SOURCE}"
            )
        try:
            # The search folds constants together in the tree it is given, so it gets one of its own.
            variables = frozenset(meta.find_undeclared_variables(self.parse(source)))
            tree = self.parse(source)
            words = frozenset(_words(tree))
            for data in tree.find_all(nodes.TemplateData):
                data.data = own(data.data)
            for constant in tree.find_all(nodes.Const):
                if isinstance(constant.value, str):
                    constant.value = own(constant.value)
            return Compiled(self.from_string(_Watched().visit(tree)), variables, words)
        except TemplateSyntaxError as error:
            raise ConfigError(
                f"the chat template does not parse: {error.message} (line {error.lineno} of it)"
            ) from error
        except RecursionError as error:
            raise ConfigError("the chat template is nested too deeply") from error
        except (SyntaxError, ValueError, OverflowError, MemoryError) as error:
            raise ConfigError(f"the chat template cannot be compiled: {str(error)[:200]}") from error
        except template_limits.TooMuchError as error:
            raise ConfigError(f"the chat template cannot be compiled: it takes {error}") from error

    @contextmanager
    def limited(self, seconds: float) -> Iterator[None]:
        """What this thread renders inside has so much time, all of it together."""
        self._clock.seconds = seconds
        self._clock.end = time.monotonic() + seconds
        try:
            yield
        finally:
            del self._clock.end

    def tick(self) -> bool:
        end = getattr(self._clock, "end", None)
        if end is not None and time.monotonic() > end:
            raise template_limits.TooMuchError(f"more than {self._clock.seconds:g} s")
        return True

    def measured(self, value: Any) -> Any:
        """Return the value, or raise TooMuchError if it is too large to be printed, compared or hashed."""
        template_limits.check_tree(value)
        return value

    def together(self, *values: Any) -> str:
        """The operator `~`."""
        for value in values:
            template_limits.check_tree(value)
        return self._joined(map(str, values))

    def _joined(self, pieces: Iterable[str]) -> str:
        return template_limits.joined(piece for piece in pieces if self.tick())

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        template_limits.check_operation(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Numbers and bytes have methods that make much of little, and no chat template asks for them."""
        return not isinstance(obj, int | bytes) and super().is_safe_attribute(obj, attr, value)

    # The arguments are the template's: names of ours must not be in their way.
    def call(self, context: Context, method: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.tick()
        return super().call(context, method, *template_limits.measured(method, args, kwargs), **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        made = wrapped

        def formatted(*args: Any, **kwargs: Any) -> str:
            template_limits.check_format(value.__self__, (*args, *kwargs.values()))
            return made(*args, **kwargs)

        return formatted


STRUCTURAL = frozenset(
    (
        "attr",
        "count",
        "d",
        "default",
        "first",
        "items",
        "last",
        "length",
        "list",
        "map",
        "random",
        "reject",
        "rejectattr",
        "reverse",
        "select",
        "selectattr",
    )
)
"""Filters that do not print, compare or hash their input."""
SLOW = frozenset(
    ("e", "escape", "forceescape", "pprint", "striptags", "title", "truncate", "urlencode", "wordcount", "xmlattr")
)
"""Filters that are slow on long texts."""
COMPARISONS = frozenset(
    ("in", "==", "eq", "equalto", "!=", "ne", ">", "gt", "greaterthan", ">=", "ge", "<", "lt", "lessthan", "<=", "le")
)


def _checked(filtering: Callable[..., Any], name: str) -> Callable[..., Any]:
    """A filter or test that measures its arguments first."""

    @wraps(filtering)
    def checked(*args: Any, **kwargs: Any) -> Any:
        for value in (*args, *kwargs.values()):
            template_limits.check_tree(value)
            if name in SLOW:
                template_limits.check_slow_input(value)
        return filtering(*args, **kwargs)

    return checked


def strftime_now(form: str) -> str:
    template_limits.check_width(len(form))
    return datetime.now().strftime(form)


def _words(tree: nodes.Template) -> Iterator[str]:
    for constant in tree.find_all(nodes.Const):
        if isinstance(constant.value, str):
            yield constant.value
    for attribute in tree.find_all(nodes.Getattr):
        yield attribute.attr


class _Watched(NodeTransformer):
    """Looks at the clock in loops and macros, and lets `~`, comparisons and keys be measured."""

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_call("tick", [])))
        if node.test is not None:
            node.test = nodes.And(_call("tick", []), node.test)
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Macro:  # noqa: N802
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_call("tick", [])))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Call:  # noqa: N802
        self.generic_visit(node)
        return _call("together", node.nodes)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Compare:  # noqa: N802
        self.generic_visit(node)
        if isinstance(node.expr, nodes.Const):
            return node
        for operand in node.ops:
            # Comparing with a constant does not look into the other value.
            if not isinstance(operand.expr, nodes.Const):
                operand.expr = _measured(operand.expr)
                node.expr = _measured(node.expr)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Getitem:  # noqa: N802
        self.generic_visit(node)
        if not isinstance(node.arg, nodes.Const | nodes.Slice):
            node.arg = _measured(node.arg)
        return node

    def visit_Dict(self, node: nodes.Dict) -> nodes.Dict:  # noqa: N802
        self.generic_visit(node)
        for pair in node.items:
            if not isinstance(pair.key, nodes.Const):
                pair.key = _measured(pair.key)
        return node


def _measured(node: nodes.Expr) -> nodes.Expr:
    """A call that measures the node's value. A list of constants is small and needs none."""
    is_plain = isinstance(node, nodes.List | nodes.Tuple) and all(isinstance(item, nodes.Const) for item in node.items)
    return node if is_plain else _call("measured", [node])


def _call(method: str, arguments: list[nodes.Expr]) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(method), arguments, [], None, None)


class _Generation(Extension):
    """`{% generation %}` marks the assistant's text for training; here it is only its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    template_limits.check_tree(message)
    raise RefusedError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as the templates of Hugging Face expect it: nothing is escaped for HTML."""
    template_limits.check_width(100 * (indent or 0))
    text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    return _ASCII_ESCAPED.sub(lambda found: json.dumps(found[0])[1:-1], text) if ensure_ascii else text


# Marks stay: they stand for texts that are put back after rendering.
_ASCII_ESCAPED = re.compile(f"[^\x00-\x7f{chr(FIRST_MARK)}-{chr(LAST_MARK)}]+")


def _replace(value: Any, old: str, new: str, count: int = -1) -> str:
    text = str(value)
    template_limits.check_replace(text, old, new)
    return text.replace(str(old), str(new), count)


@pass_eval_context
def _join(context: nodes.EvalContext, value: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
    found = value if attribute is None else map(filters.make_attrgetter(context.environment, attribute), value)
    items = template_limits.listed(found)
    template_limits.check_join(str(d), items)
    return filters.sync_do_join(context, items, d)


def _indent(value: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    space = width if isinstance(width, str) else " " * min(width, template_limits.WIDEST + 1)
    template_limits.check_width(len(space))
    template_limits.check_replace(value, "\n", space + "\n")
    return filters.do_indent(value, width, first, blank)


def _format(value: str, *args: Any, **kwargs: Any) -> str:
    template_limits.check_format(value, (*args, *kwargs.values()))
    return filters.do_format(value, *args, **kwargs)


def _center(value: str, width: int = 80) -> str:
    template_limits.check_width(width)
    return filters.do_center(value, width)


def _round(value: float, precision: int = 0, method: Literal["common", "ceil", "floor"] = "common") -> float:
    # Ten is raised to that power.
    template_limits.check_width(100 * precision)
    return filters.do_round(value, precision, method)


@pass_environment
def _sum(environment: Sandbox, value: Iterable[Any], attribute: str | int | None = None, start: float = 0) -> Any:
    if not isinstance(start, int | float):
        raise template_limits.TooMuchError("a sum of what is no number")
    return filters.sync_do_sum(environment, value, attribute, start)
