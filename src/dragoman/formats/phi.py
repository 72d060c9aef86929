"""Phi-4-mini.

reply   := thought? text section?
thought := "<think>" text "</think>"
section := ("functools" | "<|tool_call|>") [{"name": string, "arguments": object}, …] "<|/tool_call|>"?
"""

from dragoman.formats.syntax import CallSection, JsonCall, ModelFormat, Tags

PHI = ModelFormat(
    name="phi",
    thoughts=(Tags("<think>", "</think>"),),
    calls=(
        CallSection(JsonCall(array=True), open="functools", multiple=True),
        CallSection(JsonCall(array=True), open="<|tool_call|>", close="<|/tool_call|>", multiple=True),
    ),
    template_markers=(("functools",), ("<|tool_call|>", "<|/tool_call|>"), ("<|tool|>", "<|/tool|>")),
)
