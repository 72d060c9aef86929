"""Probes what a chat template supports by rendering small example conversations.

The probe runs once per template. A template that cannot render a single user message is assumed to support everything;
it reports its error when it is used. A template that exceeds the time or memory limits is rejected.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from dragoman.core.request import ToolCall
from dragoman.prompt.sandbox import CompiledTemplate

JsonDict = Mapping[str, Any]
RenderExample = Callable[[Sequence[JsonDict], Sequence[JsonDict] | None, Mapping[str, Any]], str | None]
"""Renders messages with tools and variables. None if the template rejects them."""

THOUGHT_KEYS = ("reasoning_content", "thinking", "reasoning")
EFFORT_LEVELS = ("none", "minimal", "low", "medium", "high")


class Capabilities(msgspec.Struct, frozen=True):
    """What a template accepts and shows. `content_parts`: it requires content as a list of parts."""

    content_parts: bool = False
    system: bool = True
    multiple_systems: bool = True
    """Several system messages at the beginning."""
    system_with_results: bool = True
    """Some templates show the system message only before a question, not after tool results."""
    late_system: bool = True
    repeated_roles: bool = True
    """Consecutive messages of the same role."""
    assistant_first: bool = True
    tools: bool = True
    calls: bool = True
    parallel_calls: bool = True
    text_with_calls: bool = True
    text_with_thought: bool = True
    """Text next to calls if there is also reasoning."""
    arguments_as_text: bool = False
    null_content: bool = False
    """It shows calls only if the content is null, not an empty string."""
    results: bool = True
    names: bool = True
    reasoning_key: str | None = "reasoning_content"
    """The message key from which it reads the reasoning of earlier turns, if any."""
    effort_levels: frozenset[str] = frozenset()
    """The values it accepts for `reasoning_effort`."""


def probe_template(
    compiled: CompiledTemplate, show: RenderExample, call_id: Callable[[ToolCall, int], str]
) -> Capabilities:
    """`call_id` returns an id that the template accepts, given a call and its index."""
    plain = _Examples(show, (call_id(_CALLS[0], 0), call_id(_CALLS[1], 1)))
    with_parts = msgspec.structs.replace(plain, content_parts=True)
    if not plain.shows([plain.user()], "quark1"):
        if not with_parts.shows([with_parts.user()], "quark1"):
            return Capabilities(
                reasoning_key=_mentioned_reasoning_key(compiled), effort_levels=_probe_effort_levels(compiled, plain)
            )
        plain = with_parts
    example, rendered = _find_call_style(plain)
    capabilities = msgspec.structs.replace(
        _probe_calls(example, rendered), effort_levels=_probe_effort_levels(compiled, plain)
    )
    return _probe_reasoning(compiled, example, _probe_roles(example, capabilities))


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
    """Example conversations with words that no template contains: quark (user), hadron (assistant), meson (system),
    photon (tool)."""

    show: RenderExample
    ids: tuple[str, str]
    content_parts: bool = False
    as_text: bool = False
    """Pass call arguments as text."""
    null: bool = False

    def shows(self, messages: Sequence[JsonDict], *words: str, tools: Sequence[JsonDict] | None = None) -> bool:
        rendered = self.show(messages, tools, {})
        return rendered is not None and all(word in rendered.casefold() for word in words)

    def content(self, text: str) -> Any:
        return [{"type": "text", "text": text}] if self.content_parts else text

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
        return {"id": self.ids[number - 1], "type": "function", "function": {"name": call.name, "arguments": arguments}}

    def result(self, number: int = 1) -> dict[str, Any]:
        return {
            "role": "tool",
            "content": self.content(f"photon{number}"),
            "tool_call_id": self.ids[number - 1],
            "name": _CALLS[number - 1].name,
        }


def _find_call_style(example: _Examples) -> tuple[_Examples, str | None]:
    """Return the examples in the style in which the template shows calls correctly, and the rendered example."""
    for null, as_text in ((False, False), (False, True), (True, False), (True, True)):
        style = msgspec.structs.replace(example, as_text=as_text, null=null)
        rendered = (style.show([style.user(), style.caller(1), style.result()], _TOOLS, {}) or "").casefold()
        wrongly_rendered = '\\"muon' if as_text else "{'muon'"
        if "lepton1" in rendered and "tau1" in rendered and wrongly_rendered not in rendered:
            return style, rendered
    fallback = example.show([example.user(), example.caller(1), example.result()], _TOOLS, {})
    return example, None if fallback is None else fallback.casefold()


def _probe_calls(example: _Examples, rendered: str | None) -> Capabilities:
    tools = any(
        example.shows(lead, "lepton1", "muon", tools=_TOOLS)
        for lead in ([example.user()], [example.system(), example.user()])
    )
    if rendered is None:
        results = example.shows([example.user(), example.result()], "photon1")
        return Capabilities(content_parts=example.content_parts, tools=tools, calls=False, results=results)
    calls = "lepton1" in rendered and "tau1" in rendered
    parallel = [example.user(), example.caller(1, 2), example.result(1), example.result(2)]
    with_text = [example.user(), example.caller(1, text="hadron1"), example.result()]
    return Capabilities(
        content_parts=example.content_parts,
        tools=tools,
        calls=calls,
        results="photon1" in rendered,
        arguments_as_text=example.as_text,
        null_content=example.null,
        parallel_calls=not calls or example.shows(parallel, "tau1", "tau2", tools=_TOOLS),
        text_with_calls=not calls or example.shows(with_text, "hadron1", "tau1", tools=_TOOLS),
    )


def _probe_roles(example: _Examples, capabilities: Capabilities) -> Capabilities:
    user, assistant, system = example.user, example.assistant, example.system
    has_system = example.shows([system(), user()], "meson1", "quark1")
    lead = [system()] if has_system else []
    working = [system(), user(), example.caller(1), example.result()]
    return msgspec.structs.replace(
        capabilities,
        system=has_system,
        multiple_systems=has_system and example.shows([system(1), system(2), user()], "meson1", "meson2"),
        system_with_results=not (has_system and capabilities.calls and capabilities.results)
        or example.shows(working, "meson1", tools=_TOOLS),
        late_system=example.shows([*lead, user(1), assistant(), system(2), user(2)], "meson2", "quark2"),
        repeated_roles=example.shows([user(1), user(2)], "quark1", "quark2")
        and example.shows([user(1), assistant(1), assistant(2), user(2)], "hadron1", "hadron2"),
        assistant_first=example.shows([assistant(), user()], "hadron1", "quark1"),
        names=example.shows([user() | {"name": "axion"}], "axion"),
    )


def _probe_reasoning(compiled: CompiledTemplate, example: _Examples, capabilities: Capabilities) -> Capabilities:
    """Many templates show only the reasoning since the last question, so the first example ends with a tool result."""
    caller = example.caller(1)
    working = [example.user(), caller, example.result()]
    asking = [example.user(1), example.assistant(), example.user(2)]
    for key in THOUGHT_KEYS:
        for messages in (working, asking):
            thinking = [entry | {key: "neutrino"} if entry["role"] == "assistant" else entry for entry in messages]
            if example.shows(thinking, "neutrino", tools=_TOOLS if messages is working else None):
                with_text = [
                    {**entry, "content": example.content("hadron1")} if key in entry else entry for entry in thinking
                ]
                has_both = messages is asking or example.shows(with_text, "neutrino", tools=_TOOLS)
                return msgspec.structs.replace(capabilities, reasoning_key=key, text_with_thought=has_both)
    return msgspec.structs.replace(capabilities, reasoning_key=_mentioned_reasoning_key(compiled))


def _mentioned_reasoning_key(compiled: CompiledTemplate) -> str | None:
    return next((key for key in THOUGHT_KEYS if key in compiled.strings), None)


def _probe_effort_levels(compiled: CompiledTemplate, example: _Examples) -> frozenset[str]:
    if "reasoning_effort" not in compiled.variables:
        return frozenset()
    effort_levels = {
        level
        for level in EFFORT_LEVELS
        if example.show([example.user()], None, {"reasoning_effort": level}) is not None
    }
    # A template that prints any value was not necessarily trained on these two levels.
    return frozenset(effort_levels - ({"none", "minimal"} - compiled.strings))
