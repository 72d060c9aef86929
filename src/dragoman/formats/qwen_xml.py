"""Calls as tags, one per parameter: Qwen3-Coder, Qwen3.5, Nemotron 3, Step 3.5, Seed-OSS.

    reply     := thought? text (call text)*
    thought   := "<think>" text "</think>"
    call      := "<tool_call>" function "</tool_call>"
    function  := "<function=NAME>" parameter* "</function>"
    parameter := "<parameter=KEY>" value "</parameter>"

A string is written as it is, everything else as JSON. These models sometimes omit `<tool_call>` or write a Hermes
object inside it. Both are read.
"""

from dragoman.formats.syntax import CallSection, JsonCall, ModelFormat, Tagged, Tags

_FUNCTION = Tagged(
    function="<function={name}>",
    parameter="<parameter={key}>\n",
    value_end="\n</parameter>",
    function_end="</function>",
)

QWEN_XML = ModelFormat(
    name="qwen_xml",
    thoughts=(Tags("<think>", "</think>"), Tags("<seed:think>", "</seed:think>")),
    calls=(
        CallSection(_FUNCTION, open="<tool_call>", close="</tool_call>"),
        CallSection(JsonCall(), open="<tool_call>", close="</tool_call>"),
        CallSection(_FUNCTION, open="<seed:tool_call>", close="</seed:tool_call>"),
        CallSection(
            Tagged("{name}>", _FUNCTION.parameter, _FUNCTION.value_end, _FUNCTION.function_end),
            open="<function=",
            close="</tool_call>",
        ),
    ),
    template_markers=(("<function=", "<parameter="),),
)
