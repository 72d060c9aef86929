"""Cohere's Command.

reply   := thought? (section | "<|START_RESPONSE|>" text "<|END_RESPONSE|>")
thought := "<|START_THINKING|>" text "<|END_THINKING|>"
section := "<|START_ACTION|>" [{"tool_call_id": string, "tool_name": string, "parameters": object}, …]
           "<|END_ACTION|>"
"""

from dragoman.formats.syntax import Calls, JsonCall, ModelFormat, Tags

COHERE = ModelFormat(
    name="cohere",
    thoughts=(Tags("<|START_THINKING|>", "<|END_THINKING|>"),),
    calls=(
        Calls(
            JsonCall(name=("tool_name", "name"), arguments=("parameters", "arguments"), array=True),
            open="<|START_ACTION|>",
            close="<|END_ACTION|>",
            several=True,
        ),
    ),
    silent=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
    signs=(("<|START_ACTION|>",), ("<|START_RESPONSE|>",)),
)
