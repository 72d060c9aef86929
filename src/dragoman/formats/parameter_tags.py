"""Calls with each parameter between tags. A string is written as it is, everything else as JSON.

    reply    := ("<think>" text "</think>")? text section?

    qwen_xml := "<tool_call>" "<function=NAME>" ("<parameter=KEY>" value "</parameter>")* "</function>" "</tool_call>"
                    Qwen3-Coder, Qwen3.5, Nemotron 3, Step 3.5, Seed-OSS
    glm      := "<tool_call>" NAME ("<arg_key>" KEY "</arg_key>" "<arg_value>" value "</arg_value>")* "</tool_call>"
                    GLM 4.5 and later, Ling 3
    minimax  := "<minimax:tool_call>" invoke* "</minimax:tool_call>"                MiniMax M2
      invoke := '<invoke name="NAME">' ('<parameter name="KEY">' value "</parameter>")* "</invoke>"
    dsml     := "<｜DSML｜function_calls>" invoke* "</｜DSML｜function_calls>"          DeepSeek V3.2; V4: tool_calls
      invoke := '<｜DSML｜invoke name="NAME">' parameter* "</｜DSML｜invoke>"
      parameter := '<｜DSML｜parameter name="KEY" string="true|false">' value "</｜DSML｜parameter>"

Qwen's models sometimes omit `<tool_call>` or write a Hermes object inside it. Both are read. `｜` is U+FF5C.
"""

from dragoman.formats.syntax import THINK, CallSection, JsonCall, ModelFormat, Tagged, Tags

_FUNCTION = Tagged(
    function="<function={name}>",
    parameter="<parameter={key}>\n",
    value_end="\n</parameter>",
    function_end="</function>",
)

QWEN_XML = ModelFormat(
    name="qwen_xml",
    thoughts=(THINK, Tags("<seed:think>", "</seed:think>")),
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

GLM = ModelFormat(
    name="glm",
    thoughts=(THINK,),
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

MINIMAX = ModelFormat(
    name="minimax",
    thoughts=(THINK,),
    calls=(
        CallSection(
            Tagged(
                function='<invoke name="{name}">',
                parameter='<parameter name="{key}">',
                value_end="</parameter>",
                function_end="</invoke>",
            ),
            open="<minimax:tool_call>",
            close="</minimax:tool_call>",
            multiple=True,
        ),
    ),
    template_markers=(("<minimax:tool_call>",),),
)

_INVOKE = Tagged(
    function='<｜DSML｜invoke name="{name}">',
    parameter='<｜DSML｜parameter name="{key}" string="{string}">',
    value_end="</｜DSML｜parameter>",
    function_end="</｜DSML｜invoke>",
)

DEEPSEEK_DSML = ModelFormat(
    name="deepseek_dsml",
    thoughts=(THINK,),
    calls=(
        CallSection(_INVOKE, open="<｜DSML｜function_calls>", close="</｜DSML｜function_calls>", multiple=True),
        CallSection(_INVOKE, open="<｜DSML｜tool_calls>", close="</｜DSML｜tool_calls>", multiple=True),
    ),
    template_markers=(("｜DSML｜",),),
)
