"""Calls written as Python: Llama 4, Olmo 3, LFM2.

    reply   := thought? (text | section)*
    thought := "<think>" text "</think>"
    section := "[" call ("," call)* "]"                 bare, or between the tags of the family
    call    := NAME "(" (KEY "=" literal ("," …)*)? ")"

Without a tag the list counts as calls only at the beginning of the reply and if its names are tools that were offered.
"""

from dragoman.formats.syntax import Calls, ModelFormat, Pythonic, Tags

PYTHONIC = ModelFormat(
    name="pythonic",
    thoughts=(Tags("<think>", "</think>"),),
    calls=(
        Calls(Pythonic(), several=True),
        Calls(Pythonic(), open="<|python_start|>", close="<|python_end|>", several=True),
        Calls(Pythonic(), open="<|tool_call_start|>", close="<|tool_call_end|>", several=True),
        Calls(Pythonic(), open="<function_calls>", close="</function_calls>", several=True),
    ),
    signs=(("<|python_start|>",), ("<|tool_call_start|>",), ("<function_calls>",), ("<|header_start|>",)),
)
