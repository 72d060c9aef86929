"""Llama 3.x: a bare JSON object as the whole reply, after an optional tag.

    reply := text | "<|python_tag|>"? call (";" call)*
    call  := {"name": string, "parameters": object}

Without the tag, JSON is a call only if it names an offered tool.
"""

from dragoman.formats.syntax import CallSection, JsonCall, ModelFormat

_CALL = JsonCall(arguments=("parameters", "arguments"))

LLAMA3 = ModelFormat(
    name="llama3",
    calls=(
        CallSection(_CALL, multiple=True, separator=";"),
        CallSection(_CALL, open="<|python_tag|>", multiple=True, separator=";"),
    ),
    frame_markers=("<|eom_id|>", "<|eot_id|>"),
    template_markers=(("<|python_tag|>",), ("<|start_header_id|>", "parameters")),
)
