"""Recorded outputs of every format and their expected parts, from `tests/data/model_outputs.toml`."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from dragoman.core.events import FinishReason
from dragoman.core.request import Part, Reasoning, Text, Tool, ToolCall

CITY = {"city": {"type": "string"}, "days": {"type": "integer"}}
OPTIONAL = {"anyOf": [{"type": "string"}, {"type": "null"}]}
TOOLS = (
    Tool("get_weather", "The weather of the next days.", {"type": "object", "properties": CITY}),
    Tool("now", "The time.", None),
    Tool("run", "A command.", {"type": "object", "properties": {"command": {"type": "string"}}}),
    Tool("note", "A note.", {"type": "object", "properties": {"text": OPTIONAL, "by": OPTIONAL}}),
    Tool("plan", "A plan.", {"type": "object", "properties": {"steps": {"type": "array"}, "extra": {}}}),
)
COMMAND = 'mkdir {a,b && echo "it\'s" \\d 😀é\n}] <b>\t</b>'


class Scenario(msgspec.Struct, frozen=True):
    """The expected reply. `exact`: compare arguments as text, not as values."""

    parts: tuple[Part, ...]
    reason: FinishReason = "stop"
    """The engine's finish reason."""
    thinking: bool = False
    """Whether the prompt ended inside reasoning."""
    warns: bool = False
    exact: bool = False


class Case(msgspec.Struct, frozen=True):
    format: str
    name: str
    output: str
    said: Scenario
    tools: tuple[Tool, ...] = TOOLS


def calling(name: str, **arguments: object) -> ToolCall:
    return ToolCall("", name, msgspec.json.encode(arguments).decode())


SCENARIOS = {
    "thought, text, call": Scenario(
        (Reasoning("The weather is wanted."), Text("I'll look."), calling("get_weather", city="Paris", days=2))
    ),
    "several calls": Scenario(
        (calling("get_weather", city="Paris"), calling("now"), calling("get_weather", city="Rome", days=3))
    ),
    "text before and after": Scenario((Text("Let me see."), calling("now"), Text("That is all."))),
    "no arguments": Scenario((calling("now"),)),
    "escapes": Scenario((calling("run", command=COMMAND),)),
    "nested": Scenario(
        (calling("plan", steps=[{"do": "a", "with": [1, -2.5, True, None]}, {}, []], extra={"a": {"b": {"c": "d"}}}),)
    ),
    "opener in the prompt": Scenario((Reasoning("Two and two."), Text("Four.")), thinking=True),
    "call that ends a thought": Scenario((Reasoning("I need the time."), calling("now"))),
    "look-alikes": Scenario((), exact=True),
    "malformed": Scenario((), warns=True, exact=True),
    "cut short": Scenario((), reason="length", exact=True),
}
"""Scenarios without parts differ between formats; their parts are listed with the output."""

_DATA = tomllib.loads((Path(__file__).parent.parent / "data" / "model_outputs.toml").read_text())


def _part(kind: str, *texts: str) -> Part:
    return ToolCall("", texts[0], texts[1]) if kind == "call" else Text(*texts) if kind == "text" else Reasoning(*texts)


def _recorded(syntax: str, name: str, given: Any) -> Case:
    if isinstance(given, str):
        return Case(syntax, name, given, SCENARIOS[name])
    output, *parts = given
    return Case(syntax, name, output, msgspec.structs.replace(SCENARIOS[name], parts=tuple(_part(*p) for p in parts)))


def _special(syntax: str, name: str, fields: dict[str, Any]) -> Case:
    output, parts, tools = fields.pop("output"), fields.pop("parts"), fields.pop("tools", True)
    said = Scenario(tuple(_part(*part) for part in parts), exact=True, **fields)
    return Case(syntax, name, output, said, TOOLS if tools else ())


def _left_as_text(syntax: str, name: str, output: str, *, warns: bool = True) -> Case:
    return Case(syntax, name, output, Scenario((Text(output),), warns=warns, exact=True))


RECORDED = [
    _recorded(syntax, name, given) for syntax, outputs in _DATA["recorded"].items() for name, given in outputs.items()
]
OUTPUTS: Mapping[str, Mapping[str, str]] = {
    syntax: {case.name: case.output for case in RECORDED if case.format == syntax} for syntax in _DATA["recorded"]
}
SPECIAL = [
    *(_special(syntax, name, fields) for syntax, cases in _DATA["special"].items() for name, fields in cases.items()),
    _left_as_text("pythonic", "nested beyond reason", f"[now(x={'-' * 5000}1)]", warns=False),
    _left_as_text("hermes", "endless name", '<tool_call>{"name": "' + "n" * 2000 + '"}</tool_call>'),
    _left_as_text("kimi", "endless header", "<|tool_calls_section_begin|><|tool_call_begin|>" + "n" * 2000),
    _left_as_text("internlm", "function* beyond reason", "<|action_start|><|plugin|>" + '{"function": ' * 2000),
    Case(
        "hermes",
        "calls in thoughts in calls",
        "<think>" + "<tool_call>x\n<think>\n" * 200,
        Scenario((Reasoning("<tool_call>x\n<think>\n" * 200),), exact=True),
    ),
]
"""Outputs with peculiarities of one family."""
