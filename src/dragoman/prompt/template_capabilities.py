"""What a chat template does with a conversation, found out by showing it small ones.

A template is asked nothing twice: `learn` runs once per template. Where a template cannot take even one user message,
it counts as one that takes everything, and says itself what is wrong when it is used. A template that takes too
much time or memory for them is refused.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from dragoman.core.request import ToolCall
from dragoman.prompt.sandbox import Compiled

Entry = Mapping[str, Any]
Show = Callable[[Sequence[Entry], Sequence[Entry] | None, Mapping[str, Any]], str | None]
"""Renders messages with tools and variables; None: the template did not take them."""

THOUGHT_KEYS = ("reasoning_content", "thinking", "reasoning")
LEVELS = ("none", "minimal", "low", "medium", "high")


class Habits(msgspec.Struct, frozen=True):
    """What a template takes and shows. `parts`: it wants content as a list of parts."""

    parts: bool = False
    system: bool = True
    systems: bool = True
    """Several at the beginning."""
    system_with_results: bool = True
    """Some show the system message only beside a question, not while tools are at work."""
    late_system: bool = True
    repeats: bool = True
    """Two messages of the same role in a row."""
    assistant_first: bool = True
    tools: bool = True
    calls: bool = True
    parallel_calls: bool = True
    text_with_calls: bool = True
    text_with_thought: bool = True
    """Text beside calls where there is a thought too."""
    arguments_as_text: bool = False
    null_content: bool = False
    """It shows calls only where there is no content at all, not even an empty one."""
    results: bool = True
    names: bool = True
    reasoning: str | None = "reasoning_content"
    """The key under which it looks for the thoughts of earlier turns, if it does."""
    levels: frozenset[str] = frozenset()
    """The values it takes for `reasoning_effort`."""


def learn(compiled: Compiled, show: Show, call_id: Callable[[ToolCall, int], str]) -> Habits:
    """`call_id` makes an id that the template accepts, of a call and its number."""
    plain = _Examples(show, (call_id(_CALLS[0], 0), call_id(_CALLS[1], 1)))
    parted = msgspec.structs.replace(plain, parts=True)
    if not plain.shows([plain.user()], "quark1"):
        if not parted.shows([parted.user()], "quark1"):
            return Habits(reasoning=_mentioned(compiled), levels=_levels(compiled, plain))
        plain = parted
    example, shown = _calling(plain)
    habits = msgspec.structs.replace(_calls(example, shown), levels=_levels(compiled, plain))
    return _thoughts(compiled, example, _roles(example, habits))


_CALLS = (ToolCall("call00001", "lepton1", '{"muon": "tau1"}'), ToolCall("call00002", "lepton2", '{"muon": "tau2"}'))
_TOOLS = tuple(
    {
        "type": "function",
        "function": {
            "name": call.name,
            "description": "boson",
            "parameters": {"type": "object", "properties": {"muon": {"type": "string", "description": "gluon"}}},
        },
    }
    for call in _CALLS
)


class _Examples(msgspec.Struct, frozen=True):
    """Conversations in words that no template has: users say quark, assistants hadron, systems meson, tools photon."""

    show: Show
    ids: tuple[str, str]
    parts: bool = False
    as_text: bool = False
    """How calls are shown: the arguments as text, the content as null."""
    null: bool = False

    def shows(self, messages: Sequence[Entry], *words: str, tools: Sequence[Entry] | None = None) -> bool:
        shown = self.show(messages, tools, {})
        return shown is not None and all(word in shown.casefold() for word in words)

    def content(self, text: str) -> Any:
        return [{"type": "text", "text": text}] if self.parts else text

    def user(self, number: int = 1) -> dict[str, Any]:
        return {"role": "user", "content": self.content(f"quark{number}")}

    def assistant(self, number: int = 1) -> dict[str, Any]:
        return {"role": "assistant", "content": self.content(f"hadron{number}")}

    def system(self, number: int = 1) -> dict[str, Any]:
        return {"role": "system", "content": self.content(f"meson{number}")}

    def caller(self, *numbers: int, text: str = "") -> dict[str, Any]:
        content = None if self.null and not text else self.content(text)
        return {"role": "assistant", "content": content, "tool_calls": [self._call(number) for number in numbers]}

    def _call(self, number: int) -> dict[str, Any]:
        call = _CALLS[number - 1]
        arguments = call.arguments if self.as_text else msgspec.json.decode(call.arguments)
        return {
            "id": self.ids[number - 1],
            "type": "function",
            "function": {"name": call.name, "arguments": arguments},
        }

    def result(self, number: int = 1) -> dict[str, Any]:
        return {
            "role": "tool",
            "content": self.content(f"photon{number}"),
            "tool_call_id": self.ids[number - 1],
            "name": _CALLS[number - 1].name,
        }


def _calling(example: _Examples) -> tuple[_Examples, str | None]:
    """The way in which it shows a call well, and what it then makes of one with its result."""
    for null, as_text in ((False, False), (False, True), (True, False), (True, True)):
        way = msgspec.structs.replace(example, as_text=as_text, null=null)
        shown = (way.show([way.user(), way.caller(1), way.result()], _TOOLS, {}) or "").casefold()
        spoilt = '\\"muon' if as_text else "{'muon'"
        if "lepton1" in shown and "tau1" in shown and spoilt not in shown:
            return way, shown
    shown_anyway = example.show([example.user(), example.caller(1), example.result()], _TOOLS, {})
    return example, None if shown_anyway is None else shown_anyway.casefold()


def _calls(example: _Examples, shown: str | None) -> Habits:
    tools = any(
        example.shows(lead, "lepton1", "muon", tools=_TOOLS)
        for lead in ([example.user()], [example.system(), example.user()])
    )
    if shown is None:
        results = example.shows([example.user(), example.result()], "photon1")
        return Habits(parts=example.parts, tools=tools, calls=False, results=results)
    calls = "lepton1" in shown and "tau1" in shown
    two = [example.user(), example.caller(1, 2), example.result(1), example.result(2)]
    spoken = [example.user(), example.caller(1, text="hadron1"), example.result()]
    return Habits(
        parts=example.parts,
        tools=tools,
        calls=calls,
        results="photon1" in shown,
        arguments_as_text=example.as_text,
        null_content=example.null,
        parallel_calls=not calls or example.shows(two, "tau1", "tau2", tools=_TOOLS),
        text_with_calls=not calls or example.shows(spoken, "hadron1", "tau1", tools=_TOOLS),
    )


def _roles(example: _Examples, habits: Habits) -> Habits:
    user, assistant, system = example.user, example.assistant, example.system
    has_system = example.shows([system(), user()], "meson1", "quark1")
    lead = [system()] if has_system else []
    working = [system(), user(), example.caller(1), example.result()]
    return msgspec.structs.replace(
        habits,
        system=has_system,
        systems=has_system and example.shows([system(1), system(2), user()], "meson1", "meson2"),
        system_with_results=not (has_system and habits.calls and habits.results)
        or example.shows(working, "meson1", tools=_TOOLS),
        late_system=example.shows([*lead, user(1), assistant(), system(2), user(2)], "meson2", "quark2"),
        repeats=example.shows([user(1), user(2)], "quark1", "quark2")
        and example.shows([user(1), assistant(1), assistant(2), user(2)], "hadron1", "hadron2"),
        assistant_first=example.shows([assistant(), user()], "hadron1", "quark1"),
        names=example.shows([user() | {"name": "axion"}], "axion"),
    )


def _thoughts(compiled: Compiled, example: _Examples, habits: Habits) -> Habits:
    """Many templates show only the thoughts since the last question, so this one ends with a tool's result."""
    caller = example.caller(1)
    working = [example.user(), caller, example.result()]
    asking = [example.user(1), example.assistant(), example.user(2)]
    for key in THOUGHT_KEYS:
        for messages in (working, asking):
            thinking = [entry | {key: "neutrino"} if entry["role"] == "assistant" else entry for entry in messages]
            if example.shows(thinking, "neutrino", tools=_TOOLS if messages is working else None):
                spoken = [
                    {**entry, "content": example.content("hadron1")} if key in entry else entry for entry in thinking
                ]
                both = messages is asking or example.shows(spoken, "neutrino", tools=_TOOLS)
                return msgspec.structs.replace(habits, reasoning=key, text_with_thought=both)
    return msgspec.structs.replace(habits, reasoning=_mentioned(compiled))


def _mentioned(compiled: Compiled) -> str | None:
    return next((key for key in THOUGHT_KEYS if key in compiled.words), None)


def _levels(compiled: Compiled, example: _Examples) -> frozenset[str]:
    if "reasoning_effort" not in compiled.variables:
        return frozenset()
    levels = {
        level for level in LEVELS if example.show([example.user()], None, {"reasoning_effort": level}) is not None
    }
    # These two are not everywhere: a template that prints whatever it is told has not been trained on them.
    return frozenset(levels - ({"none", "minimal"} - compiled.words))
