"""GLM 4.5 and later, Ling 3.

reply   := thought? text (call text)*
thought := "<think>" text "</think>"
call    := "<tool_call>" NAME ("<arg_key>" KEY "</arg_key>" "<arg_value>" value "</arg_value>")* "</tool_call>"
"""

from dragoman.formats.syntax import Calls, JsonCall, ModelFormat, Tagged, Tags

GLM = ModelFormat(
    name="glm",
    thoughts=(Tags("<think>", "</think>"),),
    calls=(
        Calls(
            Tagged(
                function="{name}\n",
                parameter="<arg_key>{key}</arg_key>\n<arg_value>",
                value_end="</arg_value>",
            ),
            open="<tool_call>",
            close="</tool_call>",
        ),
        Calls(JsonCall(), open="<tool_call>", close="</tool_call>"),
    ),
    signs=(("<arg_key>",),),
)
