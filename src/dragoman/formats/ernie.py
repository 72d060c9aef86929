"""ERNIE 4.5: calls as Hermes writes them, the answer between tags.

reply   := thought? ("<response>" text "</response>" | text) call*
thought := "<think>" text "</think>"
call    := "<tool_call>" {"name": string, "arguments": object} "</tool_call>"
"""

from dragoman.formats.syntax import Calls, JsonCall, ModelFormat, Tags

ERNIE = ModelFormat(
    name="ernie",
    thoughts=(Tags("<think>", "</think>"),),
    answer=Tags("<response>", "</response>"),
    calls=(Calls(JsonCall(), open="<tool_call>", close="</tool_call>"),),
    signs=(("<response>", "<tool_call>"),),
)
