"""Probes what a chat template supports by rendering small example conversations.

The probe runs once per template. A template that cannot render a single user message is assumed to support everything;
it reports its error when it is used. A template that exceeds the time or memory limits is rejected.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
from msgspec.structs import replace

from dragoman.core.request import Message, Reasoning, Role, Text, Tool, ToolCall, ToolResult
from dragoman.prompt.sandbox import CompiledTemplate
from dragoman.prompt.template_messages import Capabilities, text_message, to_template_messages, to_template_tool

JsonDict = Mapping[str, Any]
RenderExample = Callable[[Sequence[JsonDict], Sequence[JsonDict] | None, Mapping[str, Any]], str | None]
"""Renders messages with tools and variables. None if the template rejects them."""

THOUGHT_KEYS = ("reasoning_content", "thinking", "reasoning")
EFFORT_LEVELS = ("none", "minimal", "low", "medium", "high")

# Words that no template contains: quark (user), hadron (assistant), meson (system), photon (tool).
_CALLS = (ToolCall("call00001", "lepton1", '{"muon": "tau1"}'), ToolCall("call00002", "lepton2", '{"muon": "tau2"}'))
_SCHEMA = {"type": "object", "properties": {"muon": {"type": "string", "description": "gluon"}}}
_TOOLS = [to_template_tool(Tool(call.name, "boson", _SCHEMA), str) for call in _CALLS]


def _example(role: Role, word: str, number: int = 1) -> Message:
    return text_message(role, f"{word}{number}")


_user = partial(_example, "user", "quark")
_assistant = partial(_example, "assistant", "hadron")
_system = partial(_example, "system", "meson")


class _Probe(msgspec.Struct, frozen=True):
    """Renders example conversations in the form that `style` describes."""

    render: RenderExample
    calls: tuple[ToolCall, ...]
    style: Capabilities = Capabilities()

    def rendered(self, messages: Sequence[Message], tools: bool = False, **variables: str) -> str | None:
        shown = self.render(list(to_template_messages(messages, self.style, str)), _TOOLS if tools else None, variables)
        return None if shown is None else shown.casefold()

    def shows(self, words: str, *messages: Message, tools: bool = False) -> bool:
        shown = self.rendered(messages, tools)
        return shown is not None and all(word in shown for word in words.split())

    def caller(self, *numbers: int) -> Message:
        return Message("assistant", tuple(self.calls[number - 1] for number in numbers))

    def result(self, number: int = 1) -> Message:
        call = self.calls[number - 1]
        return Message("tool", (ToolResult(call.id, (Text(f"photon{number}"),)),), call.name)


def probe_template(
    compiled: CompiledTemplate, render: RenderExample, call_id: Callable[[ToolCall, int], str]
) -> Capabilities:
    """`call_id` returns an id that the template accepts, given a call and its index."""
    probe = _Probe(render, tuple(replace(call, id=call_id(call, index)) for index, call in enumerate(_CALLS)))
    if not probe.shows("quark1", _user()):
        probe = replace(probe, style=Capabilities(content_parts=True))
    effort_levels = _probe_effort_levels(compiled, probe)
    if not probe.shows("quark1", _user()):
        return Capabilities(reasoning_key=_mentioned_reasoning_key(compiled), effort_levels=effort_levels)
    probe, rendered = _find_call_style(probe)
    capabilities = replace(_probe_calls(probe, rendered), effort_levels=effort_levels)
    return _probe_reasoning(compiled, probe, _probe_roles(probe, capabilities))


def _find_call_style(probe: _Probe) -> tuple[_Probe, str | None]:
    """Return the probe in the style in which the template shows calls correctly, and the rendered example."""
    example = (_user(), probe.caller(1), probe.result())
    for null, as_text in ((False, False), (False, True), (True, False), (True, True)):
        styled = replace(probe, style=replace(probe.style, arguments_as_text=as_text, null_content=null))
        rendered = styled.rendered(example, tools=True) or ""
        wrongly_rendered = '\\"muon' if as_text else "{'muon'"
        if "lepton1" in rendered and "tau1" in rendered and wrongly_rendered not in rendered:
            return styled, rendered
    return probe, probe.rendered(example, tools=True)


def _probe_calls(probe: _Probe, rendered: str | None) -> Capabilities:
    tools = probe.shows("lepton1 muon", _user(), tools=True) or probe.shows(
        "lepton1 muon", _system(), _user(), tools=True
    )
    if rendered is None:
        results = probe.shows("photon1", _user(), probe.result())
        return replace(probe.style, tools=tools, calls=False, results=results)
    calls = "lepton1" in rendered and "tau1" in rendered
    parallel = (_user(), probe.caller(1, 2), probe.result(1), probe.result(2))
    with_text = (_user(), _add_parts(probe.caller(1), Text("hadron1")), probe.result())
    return replace(
        probe.style,
        tools=tools,
        calls=calls,
        results="photon1" in rendered,
        parallel_calls=not calls or probe.shows("tau1 tau2", *parallel, tools=True),
        text_with_calls=not calls or probe.shows("hadron1 tau1", *with_text, tools=True),
    )


def _probe_roles(probe: _Probe, capabilities: Capabilities) -> Capabilities:
    shows = probe.shows
    has_system = shows("meson1 quark1", _system(), _user())
    lead = [_system()] if has_system else []
    working = (_system(), _user(), probe.caller(1), probe.result())
    return replace(
        capabilities,
        system=has_system,
        multiple_systems=has_system and shows("meson1 meson2", _system(1), _system(2), _user()),
        system_with_results=not (has_system and capabilities.calls and capabilities.results)
        or shows("meson1", *working, tools=True),
        late_system=shows("meson2 quark2", *lead, _user(1), _assistant(), _system(2), _user(2)),
        repeated_roles=shows("quark1 quark2", _user(1), _user(2))
        and shows("hadron1 hadron2", _user(1), _assistant(1), _assistant(2), _user(2)),
        assistant_first=shows("hadron1 quark1", _assistant(), _user()),
        names=shows("axion", replace(_user(), name="axion")),
    )


def _probe_reasoning(compiled: CompiledTemplate, probe: _Probe, capabilities: Capabilities) -> Capabilities:
    """Many templates show only the reasoning since the last question, so the first example ends with a tool result."""
    thinking_caller = _add_parts(probe.caller(1), Reasoning("neutrino"))
    for key in THOUGHT_KEYS:
        keyed = replace(probe, style=replace(probe.style, reasoning_key=key))
        if keyed.shows("neutrino", _user(), thinking_caller, probe.result(), tools=True):
            with_text = (_user(), _add_parts(thinking_caller, Text("hadron1")), probe.result())
            has_both = keyed.shows("neutrino", *with_text, tools=True)
            return replace(capabilities, reasoning_key=key, text_with_thought=has_both)
        if keyed.shows("neutrino", _user(1), _add_parts(_assistant(), Reasoning("neutrino")), _user(2)):
            return replace(capabilities, reasoning_key=key)
    return replace(capabilities, reasoning_key=_mentioned_reasoning_key(compiled))


def _add_parts(message: Message, *parts: Text | Reasoning) -> Message:
    return replace(message, parts=(*parts, *message.parts))


def _mentioned_reasoning_key(compiled: CompiledTemplate) -> str | None:
    return next((key for key in THOUGHT_KEYS if key in compiled.strings), None)


def _probe_effort_levels(compiled: CompiledTemplate, probe: _Probe) -> frozenset[str]:
    if "reasoning_effort" not in compiled.variables:
        return frozenset()
    accepted = {level for level in EFFORT_LEVELS if probe.rendered([_user()], reasoning_effort=level) is not None}
    # A template that prints any value was not necessarily trained on these two levels.
    return frozenset(accepted - ({"none", "minimal"} - compiled.strings))
