"""Llama 3.x: a bare JSON object as the whole reply, after an optional tag.

    reply := text | "<|python_tag|>"? call (";" call)*
    call  := {"name": string, "parameters": object}

Without the tag it counts as a call only if it names a tool that was offered.
"""

from dragoman.formats.syntax import Calls, JsonCall, ModelFormat

_CALL = JsonCall(arguments=("parameters", "arguments"))

LLAMA3 = ModelFormat(
    name="llama3",
    calls=(
        Calls(_CALL, several=True, between=";"),
        Calls(_CALL, open="<|python_tag|>", several=True, between=";"),
    ),
    silent=("<|eom_id|>", "<|eot_id|>"),
    signs=(("<|python_tag|>",), ("<|start_header_id|>", "parameters")),
)
