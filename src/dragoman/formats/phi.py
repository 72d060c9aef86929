"""Phi-4-mini.

reply   := thought? text section?
thought := "<think>" text "</think>"
section := ("functools" | "<|tool_call|>") [{"name": string, "arguments": object}, …] "<|/tool_call|>"?
"""

from dragoman.formats.syntax import Calls, JsonCall, ModelFormat, Tags

PHI = ModelFormat(
    name="phi",
    thoughts=(Tags("<think>", "</think>"),),
    calls=(
        Calls(JsonCall(array=True), open="functools", several=True),
        Calls(JsonCall(array=True), open="<|tool_call|>", close="<|/tool_call|>", several=True),
    ),
    signs=(("functools",), ("<|tool_call|>", "<|/tool_call|>"), ("<|tool|>", "<|/tool|>")),
)
