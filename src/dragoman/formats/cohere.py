"""Cohere's Command.

reply   := thought? (section | "<|START_RESPONSE|>" text "<|END_RESPONSE|>")
thought := "<|START_THINKING|>" text "<|END_THINKING|>"
section := "<|START_ACTION|>" [{"tool_call_id": string, "tool_name": string, "parameters": object}, …]
           "<|END_ACTION|>"
"""

from dragoman.formats.syntax import CallSection, JsonCall, ModelFormat, Tags

COHERE = ModelFormat(
    name="cohere",
    thoughts=(Tags("<|START_THINKING|>", "<|END_THINKING|>"),),
    calls=(
        CallSection(
            JsonCall(name=("tool_name", "name"), arguments=("parameters", "arguments"), array=True),
            open="<|START_ACTION|>",
            close="<|END_ACTION|>",
            multiple=True,
        ),
    ),
    frame_markers=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
    template_markers=(("<|START_ACTION|>",), ("<|START_RESPONSE|>",)),
)
