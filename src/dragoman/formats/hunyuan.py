"""Hunyuan A13B and Jamba: the calls of a turn as one array, Hunyuan's answer between tags.

reply   := thought? ("<answer>" text "</answer>" | text) section?
thought := "<think>" text "</think>"
section := "<tool_calls>" [{"name": string, "arguments": object}, …] "</tool_calls>"
"""

from dragoman.formats.syntax import CallSection, JsonCall, ModelFormat, Tags

HUNYUAN = ModelFormat(
    name="hunyuan",
    thoughts=(Tags("<think>", "</think>"),),
    answer=Tags("<answer>", "</answer>"),
    calls=(CallSection(JsonCall(array=True), open="<tool_calls>", close="</tool_calls>", multiple=True),),
    template_markers=(("<tool_calls>",), ("<answer>", "<think>")),
)
