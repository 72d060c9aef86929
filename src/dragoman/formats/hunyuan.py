"""Hunyuan A13B and Jamba, which write the calls of a turn as one array; Hunyuan puts its answer between tags.

reply   := thought? ("<answer>" text "</answer>" | text) section?
thought := "<think>" text "</think>"
section := "<tool_calls>" [{"name": string, "arguments": object}, …] "</tool_calls>"
"""

from dragoman.formats.syntax import Calls, JsonCall, ModelFormat, Tags

HUNYUAN = ModelFormat(
    name="hunyuan",
    thoughts=(Tags("<think>", "</think>"),),
    answer=Tags("<answer>", "</answer>"),
    calls=(Calls(JsonCall(array=True), open="<tool_calls>", close="</tool_calls>", several=True),),
    signs=(("<tool_calls>",), ("<answer>", "<think>")),
)
