"""ERNIE 4.5: calls as in Hermes, the answer between tags.

reply   := thought? ("<response>" text "</response>" | text) call*
thought := "<think>" text "</think>"
call    := "<tool_call>" {"name": string, "arguments": object} "</tool_call>"
"""

from dragoman.formats.syntax import CallSection, JsonCall, ModelFormat, Tags

ERNIE = ModelFormat(
    name="ernie",
    thoughts=(Tags("<think>", "</think>"),),
    answer=Tags("<response>", "</response>"),
    calls=(CallSection(JsonCall(), open="<tool_call>", close="</tool_call>"),),
    template_markers=(("<response>", "<tool_call>"),),
)
