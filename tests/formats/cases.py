"""Recorded outputs of every format and their expected parts.

Every format has an output for each of `SCENARIOS` (`outputs_*`). Peculiarities of one family are in `special_cases`.
"""

from collections.abc import Mapping

import msgspec

from dragoman.core.events import FinishReason
from dragoman.core.request import Part, Reasoning, Text, Tool, ToolCall
from tests.formats import outputs_json, outputs_named, outputs_tagged

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


def call(name: str, arguments: str) -> ToolCall:
    return ToolCall("", name, arguments)


def calling(name: str, **arguments: object) -> ToolCall:
    return call(name, msgspec.json.encode(arguments).decode())


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

OUTPUTS: Mapping[str, Mapping[str, str | tuple[str, tuple[Part, ...]]]] = (
    outputs_json.OUTPUTS | outputs_named.OUTPUTS | outputs_tagged.OUTPUTS
)


def _case(syntax: str, name: str, given: str | tuple[str, tuple[Part, ...]]) -> Case:
    said = SCENARIOS[name]
    if isinstance(given, str):
        return Case(syntax, name, given, said)
    output, parts = given
    return Case(syntax, name, output, msgspec.structs.replace(said, parts=parts))


RECORDED = [_case(syntax, name, given) for syntax, outputs in OUTPUTS.items() for name, given in outputs.items()]
