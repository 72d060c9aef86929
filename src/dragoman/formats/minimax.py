"""MiniMax M2.

reply     := thought? text section?
thought   := "<think>" text "</think>"                  the prompt often ends with the opener
section   := "<minimax:tool_call>" invoke* "</minimax:tool_call>"
invoke    := '<invoke name="NAME">' parameter* "</invoke>"
parameter := '<parameter name="KEY">' value "</parameter>"
"""

from dragoman.formats.syntax import CallSection, ModelFormat, Tagged, Tags

MINIMAX = ModelFormat(
    name="minimax",
    thoughts=(Tags("<think>", "</think>"),),
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
