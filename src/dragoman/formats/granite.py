"""Granite 3: reasoning after a phrase, calls as an array. (Granite 4 uses the Hermes format.)

reply   := ("Here is my thought process:" text "Here is my response:")? text section?
section := ("<|tool_call|>" | "<tool_call>") [{"name": string, "arguments": object}, …]
"""

from dragoman.formats.syntax import CallSection, JsonCall, ModelFormat, Tags

GRANITE = ModelFormat(
    name="granite",
    thoughts=(Tags("Here is my thought process:", "Here is my response:"), Tags("<think>", "</think>")),
    calls=(
        CallSection(JsonCall(array=True), open="<|tool_call|>", multiple=True),
        CallSection(JsonCall(array=True), open="<tool_call>", close="</tool_call>", multiple=True),
    ),
    answer=Tags("<response>", "</response>"),
    template_markers=(("<|tool_call|>", "<|start_of_role|>"), ("<|start_of_role|>", "Here is my thought process")),
)
