"""Calls written as Python: Llama 4, Olmo 3, LFM2.

    reply   := thought? (text | section)*
    thought := "<think>" text "</think>"
    section := "[" call ("," call)* "]"                 bare, or between the tags of the family
    call    := NAME "(" (KEY "=" literal ("," …)*)? ")"

Without a tag, a list is read as calls only at the beginning of the reply and only if its names are offered tools.
"""

from dragoman.formats.syntax import THINK, CallSection, ModelFormat, Pythonic

PYTHONIC = ModelFormat(
    name="pythonic",
    thoughts=(THINK,),
    calls=(
        CallSection(Pythonic(), multiple=True),
        CallSection(Pythonic(), open="<|python_start|>", close="<|python_end|>", multiple=True),
        CallSection(Pythonic(), open="<|tool_call_start|>", close="<|tool_call_end|>", multiple=True),
        CallSection(Pythonic(), open="<function_calls>", close="</function_calls>", multiple=True),
    ),
    template_markers=(("<|python_start|>",), ("<|tool_call_start|>",), ("<function_calls>",), ("<|header_start|>",)),
)
