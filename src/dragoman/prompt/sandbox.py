"""Runs chat templates in jinja2's immutable sandbox, with the functions of Hugging Face templates and with limits.

Rules
1. The clock is checked in every loop iteration, call and piece of output.
2. Operations that can make a value much longer are measured first (`template_limits`). So are values that are
   printed, compared or hashed: nested lists can be much larger than their memory.
"""

import json
import re
from collections.abc import Callable, Iterable
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


class TemplateRaisedError(TemplateError):
    """The template rejected a conversation with `raise_exception`."""


class CompiledTemplate(msgspec.Struct, frozen=True):
    """`variables` are the names that the template expects. `strings` are its string constants and attribute names."""

    template: Template
    variables: frozenset[str]
    strings: frozenset[str]


class Sandbox(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "*", "**", "%"})
    check_time = staticmethod(template_limits.check_time)
    measure = staticmethod(template_limits.check_container)

    def __init__(self) -> None:
        extensions = ["jinja2.ext.loopcontrols", _Generation]
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions, finalize=self.measure)
        self.concat = template_limits.join_pieces  # type: ignore[method-assign]
        self.filters |= {"tojson": _tojson, "replace": _replace, "join": _join, "indent": _indent, "format": _format}
        self.filters |= {"round": _round, "sum": _sum}
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": strftime_now}
        # These can produce large values, and chat templates do not use them.
        for name in ("batch", "center", "slice", "urlize", "wordwrap"):
            del self.filters[name]
        del self.globals["lipsum"]
        self.filters = {
            name: function if name in STRUCTURAL else _with_checks(function, name)
            for name, function in self.filters.items()
        }
        tests: dict[str, Any] = dict(self.tests)
        self.tests = tests | {name: _with_checks(tests[name], name) for name in COMPARISONS}

    def compile_template(self, source: str, mark_literal: Callable[[str], str]) -> CompiledTemplate:
        """Compile a template. `mark_literal` marks its string literals."""
        if len(source) > template_limits.MAX_SOURCE:
            raise ConfigError(f"the chat template has {len(source)} characters, more than {template_limits.MAX_SOURCE}")
        try:
            # The search changes the tree, so it gets a separate one.
            variables = frozenset(meta.find_undeclared_variables(self.parse(source)))
            tree = self.parse(source)
            strings = {attribute.attr for attribute in tree.find_all(nodes.Getattr)}
            for data in tree.find_all(nodes.TemplateData):
                data.data = mark_literal(data.data)
            for constant in tree.find_all(nodes.Const):
                if isinstance(constant.value, str):
                    strings.add(constant.value)
                    constant.value = mark_literal(constant.value)
            return CompiledTemplate(self.from_string(_LimitInserter().visit(tree)), variables, frozenset(strings))
        except TemplateSyntaxError as error:
            raise ConfigError(f"the chat template does not parse: {error.message} (line {error.lineno})") from error
        except RecursionError as error:
            raise ConfigError("the chat template is nested too deeply") from error
        except (SyntaxError, ValueError, OverflowError, MemoryError) as error:
            raise ConfigError(f"the chat template cannot be compiled: {str(error)[:200]}") from error
        except template_limits.TemplateLimitError as error:
            raise ConfigError(f"the chat template cannot be compiled: limit exceeded: {error}") from error

    def concat_values(self, *values: Any) -> str:
        """The operator `~`."""
        for value in values:
            template_limits.check_container(value)
        return template_limits.join_pieces(map(str, values))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        template_limits.check_operation(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Also block methods that produce large values and that chat templates do not use."""
        is_text_method = isinstance(obj, str) and attr in ("center", "expandtabs", "translate")
        return not (is_text_method or isinstance(obj, int | bytes)) and super().is_safe_attribute(obj, attr, value)

    # Positional-only, because the template may use any keyword argument.
    def call(self, context: Context, method: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.check_time()
        return super().call(context, method, *template_limits.check_call(method, args, kwargs), **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        function = super().wrap_str_format(value)
        if function is None:
            return None

        def formatted(*args: Any, **kwargs: Any) -> str:
            template_limits.check_format(value.__self__, (*args, *kwargs.values()))
            return function(*args, **kwargs)

        return formatted


_SELECTING = ("reject", "rejectattr", "reverse", "select", "selectattr")
STRUCTURAL = frozenset(
    ("attr", "count", "d", "default", "first", "items", "last", "length", "list", "map", "random", *_SELECTING)
)
"""Filters that do not print, compare or hash their input."""
SLOW = frozenset(
    ("e", "escape", "forceescape", "pprint", "striptags", "title", "truncate", "urlencode", "wordcount", "xmlattr")
)
"""Filters that are slow on long texts."""
COMPARISONS = frozenset(
    ("in", "==", "eq", "equalto", "!=", "ne", ">", "gt", "greaterthan", ">=", "ge", "<", "lt", "lessthan", "<=", "le")
)


def _with_checks(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return a filter or test that checks its arguments first."""

    @wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        for value in (*args, *kwargs.values()):
            template_limits.check_container(value)
            if name in SLOW and isinstance(value, str) and len(value) > template_limits.MAX_SLOW_TEXT:
                problem = f"a text of more than {template_limits.MAX_SLOW_TEXT} characters in a slow filter"
                raise template_limits.TemplateLimitError(problem)
        return function(*args, **kwargs)

    return checked


def strftime_now(form: str) -> str:
    template_limits.check_width(len(form))
    return datetime.now().strftime(form)


class _LimitInserter(NodeTransformer):
    """Inserts time checks into loops and macros, and measures the operands of `~`, comparisons and keys."""

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_call("check_time", [])))
        if node.test is not None:
            node.test = nodes.And(_call("check_time", []), node.test)
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Macro:  # noqa: N802
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_call("check_time", [])))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Call:  # noqa: N802
        self.generic_visit(node)
        return _call("concat_values", node.nodes)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Compare:  # noqa: N802
        self.generic_visit(node)
        if isinstance(node.expr, nodes.Const):
            return node
        for operand in node.ops:
            # A comparison with a constant does not traverse the other value.
            if not isinstance(operand.expr, nodes.Const):
                operand.expr = _measure_call(operand.expr)
                node.expr = _measure_call(node.expr)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Getitem:  # noqa: N802
        self.generic_visit(node)
        if not isinstance(node.arg, nodes.Const | nodes.Slice):
            node.arg = _measure_call(node.arg)
        return node

    def visit_Dict(self, node: nodes.Dict) -> nodes.Dict:  # noqa: N802
        self.generic_visit(node)
        for pair in node.items:
            if not isinstance(pair.key, nodes.Const):
                pair.key = _measure_call(pair.key)
        return node


def _measure_call(node: nodes.Expr) -> nodes.Expr:
    """Wrap the node in a call that measures its value. A list of constants is small and stays as it is."""
    is_plain = isinstance(node, nodes.List | nodes.Tuple) and all(isinstance(item, nodes.Const) for item in node.items)
    return node if is_plain else _call("measure", [node])


def _call(method: str, arguments: list[nodes.Expr]) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(method), arguments, [], None, None)


class _Generation(Extension):
    """`{% generation %}` marks the assistant's text for training. Here it is replaced by its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    template_limits.check_container(message)
    raise TemplateRaisedError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as Hugging Face templates expect it, without HTML escaping."""
    template_limits.check_width(100 * (indent or 0))
    text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    return _ASCII_ESCAPED.sub(lambda found: json.dumps(found[0])[1:-1], text) if ensure_ascii else text


# Marks are not escaped, because they are replaced after rendering.
_ASCII_ESCAPED = re.compile(f"[^\x00-\x7f{chr(FIRST_MARK)}-{chr(LAST_MARK)}]+")


def _replace(value: Any, old: str, new: str, count: int = -1) -> str:
    text = str(value)
    template_limits.check_replace(text, old, new)
    return text.replace(str(old), str(new), count)


@pass_eval_context
def _join(context: nodes.EvalContext, value: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
    found = value if attribute is None else map(filters.make_attrgetter(context.environment, attribute), value)
    items = template_limits.to_list(found)
    template_limits.check_join(str(d), items)
    return filters.sync_do_join(context, items, d)


def _indent(value: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    space = width if isinstance(width, str) else " " * min(width, template_limits.MAX_WIDTH + 1)
    template_limits.check_width(len(space))
    template_limits.check_replace(value, "\n", space + "\n")
    return filters.do_indent(value, width, first, blank)


def _format(value: str, *args: Any, **kwargs: Any) -> str:
    template_limits.check_format(value, (*args, *kwargs.values()))
    return filters.do_format(value, *args, **kwargs)


def _round(value: float, precision: int = 0, method: Literal["common", "ceil", "floor"] = "common") -> float:
    # The filter computes 10 ** precision.
    template_limits.check_width(100 * precision)
    return filters.do_round(value, precision, method)


@pass_environment
def _sum(environment: Sandbox, value: Iterable[Any], attribute: str | int | None = None, start: float = 0) -> Any:
    if not isinstance(start, int | float):
        raise template_limits.TemplateLimitError("a sum with a start that is not a number")
    return filters.sync_do_sum(environment, value, attribute, start)
