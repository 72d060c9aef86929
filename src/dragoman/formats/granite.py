"""Granite 3: thoughts in prose, calls as an array. (Granite 4 writes as Hermes does.)

reply   := ("Here is my thought process:" text "Here is my response:")? text section?
section := ("<|tool_call|>" | "<tool_call>") [{"name": string, "arguments": object}, …]
"""

from dragoman.formats.syntax import Calls, JsonCall, ModelFormat, Tags

GRANITE = ModelFormat(
    name="granite",
    thoughts=(Tags("Here is my thought process:", "Here is my response:"), Tags("<think>", "</think>")),
    calls=(
        Calls(JsonCall(array=True), open="<|tool_call|>", several=True),
        Calls(JsonCall(array=True), open="<tool_call>", close="</tool_call>", several=True),
    ),
    answer=Tags("<response>", "</response>"),
    signs=(("<|tool_call|>", "<|start_of_role|>"), ("<|start_of_role|>", "Here is my thought process")),
)
