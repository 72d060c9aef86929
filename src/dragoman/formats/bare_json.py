"""Calls as JSON without a marker: xLAM, every model whose template is unknown, Llama 3.

    json    := thought? (calls | text (fence text)*)
    calls   := object | [object, …]                         object := {"name": string, "arguments": object}
    fence   := "```json" calls "```"
    thought := "<think>" text "</think>", or another known pair of tags

    llama3  := text | "<|python_tag|>"? call (";" call)*    call := {"name": string, "parameters": object}

Without a marker, JSON is a call only if it names an offered tool. Otherwise it is text.
"""

from dragoman.formats.syntax import THINK, CallSection, JsonCall, ModelFormat, Tags

JSON = ModelFormat(
    name="json",
    thoughts=(
        THINK,
        Tags("<thinking>", "</thinking>"),
        Tags("<thought>", "</thought>"),
        Tags("<reasoning>", "</reasoning>"),
    ),
    calls=(
        CallSection(JsonCall(), multiple=True),
        CallSection(JsonCall(), open="```json", close="```", multiple=True),
        CallSection(JsonCall(), open="<tool_call>", close="</tool_call>"),
    ),
)

_LLAMA_CALL = JsonCall(arguments=("parameters", "arguments"))

LLAMA3 = ModelFormat(
    name="llama3",
    calls=(
        CallSection(_LLAMA_CALL, multiple=True, separator=";"),
        CallSection(_LLAMA_CALL, open="<|python_tag|>", multiple=True, separator=";"),
    ),
    frame_markers=("<|eom_id|>", "<|eot_id|>"),
    template_markers=(("<|python_tag|>",), ("<|start_header_id|>", "parameters")),
)
