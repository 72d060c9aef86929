"""DeepSeek V3 and R1, V3.1, and the DSML of V3.2 and V4. `｜` is U+FF5C, `▁` is U+2581.

reply   := thought? text section?
thought := "<think>" text "</think>"                 the prompt often ends with the opener
section := "<｜tool▁calls▁begin｜>" call* "<｜tool▁calls▁end｜>"
V3      call := "<｜tool▁call▁begin｜>function<｜tool▁sep｜>" NAME "\n```json\n" object "\n```<｜tool▁call▁end｜>"
V3.1    call := "<｜tool▁call▁begin｜>" NAME "<｜tool▁sep｜>" object "<｜tool▁call▁end｜>"
DSML    section := "<｜DSML｜function_calls>" invoke* "</｜DSML｜function_calls>"       V4: tool_calls
        invoke  := '<｜DSML｜invoke name="NAME">' parameter* "</｜DSML｜invoke>"
        parameter := '<｜DSML｜parameter name="KEY" string="true|false">' value "</｜DSML｜parameter>"
"""

from dragoman.formats.syntax import CallSection, ModelFormat, NamedJson, Tagged, Tags

_THOUGHTS = (Tags("<think>", "</think>"),)
_BEGIN, _END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_FENCED = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n"
_SHORT = "<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>"
_INVOKE = Tagged(
    function='<｜DSML｜invoke name="{name}">',
    parameter='<｜DSML｜parameter name="{key}" string="{string}">',
    value_end="</｜DSML｜parameter>",
    function_end="</｜DSML｜invoke>",
)

DEEPSEEK = ModelFormat(
    name="deepseek",
    thoughts=_THOUGHTS,
    calls=(CallSection(NamedJson((_SHORT, _FENCED), "<｜tool▁call▁end｜>"), open=_BEGIN, close=_END, multiple=True),),
    template_markers=(("<｜tool▁calls▁begin｜>",),),
)

DEEPSEEK_V3 = ModelFormat(
    name="deepseek_v3",
    thoughts=_THOUGHTS,
    calls=(
        CallSection(NamedJson((_FENCED, _SHORT), "\n```<｜tool▁call▁end｜>"), open=_BEGIN, close=_END, multiple=True),
    ),
    template_markers=(("<｜tool▁calls▁begin｜>", "```json"),),
)

DEEPSEEK_DSML = ModelFormat(
    name="deepseek_dsml",
    thoughts=_THOUGHTS,
    calls=(
        CallSection(_INVOKE, open="<｜DSML｜function_calls>", close="</｜DSML｜function_calls>", multiple=True),
        CallSection(_INVOKE, open="<｜DSML｜tool_calls>", close="</｜DSML｜tool_calls>", multiple=True),
    ),
    template_markers=(("｜DSML｜",),),
)
