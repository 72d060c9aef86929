"""GLM 4.5 and later, Ling 3.

reply   := thought? text (call text)*
thought := "<think>" text "</think>"
call    := "<tool_call>" NAME ("<arg_key>" KEY "</arg_key>" "<arg_value>" value "</arg_value>")* "</tool_call>"
"""

from dragoman.formats.syntax import CallSection, JsonCall, ModelFormat, Tagged, Tags

GLM = ModelFormat(
    name="glm",
    thoughts=(Tags("<think>", "</think>"),),
    calls=(
        CallSection(
            Tagged(function="{name}\n", parameter="<arg_key>{key}</arg_key>\n<arg_value>", value_end="</arg_value>"),
            open="<tool_call>",
            close="</tool_call>",
        ),
        CallSection(JsonCall(), open="<tool_call>", close="</tool_call>"),
    ),
    template_markers=(("<arg_key>",),),
)
