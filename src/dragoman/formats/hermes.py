"""Hermes-style tool calls, as printed by Qwen2.5, Qwen3, Granite 4, ERNIE 4.5, SmolLM and others.

reply   := thought? text (call text)*
thought := "<think>" text "</think>"
call    := "<tool_call>" object "</tool_call>"        object := {"name": string, "arguments": object}
"""

from dragoman.formats.syntax import CallSection, JsonCall, ModelFormat, Tags

HERMES = ModelFormat(
    name="hermes",
    thoughts=(Tags("<think>", "</think>"),),
    calls=(CallSection(JsonCall(), open="<tool_call>", close="</tool_call>"),),
    template_markers=(("<tool_call>",),),
    families=("smollm",),
)
