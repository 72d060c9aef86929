"""Calls as JSON between markers. In all but Cohere, `thought := "<think>" text "</think>"`.

call    := {"name": string, "arguments": object}
calls   := [call, …]

hermes  := thought? text ("<tool_call>" call "</tool_call>" text)*
               Qwen2.5, Qwen3, Granite 4, SmolLM and others
ernie   := thought? ("<response>" text "</response>" | text) ("<tool_call>" call "</tool_call>")*
hunyuan := thought? ("<answer>" text "</answer>" | text) ("<tool_calls>" calls "</tool_calls>")?
               Hunyuan A13B, Jamba
granite := ("Here is my thought process:" text "Here is my response:")? text
           (("<|tool_call|>" | "<tool_call>") calls)?                          Granite 3
phi     := thought? text (("functools" | "<|tool_call|>") calls "<|/tool_call|>"?)?     Phi-4-mini
internlm := thought? text
           ("<|action_start|><|plugin|>" {"name": string, "parameters": object} "<|action_end|>")?
cohere  := ("<|START_THINKING|>" text "<|END_THINKING|>")?
           ("<|START_ACTION|>" [{"tool_call_id": string, "tool_name": string, "parameters": object}, …]
           "<|END_ACTION|>" | "<|START_RESPONSE|>" text "<|END_RESPONSE|>")
"""

from dragoman.formats.syntax import THINK, CallSection, JsonCall, ModelFormat, Tags

HERMES = ModelFormat(
    name="hermes",
    thoughts=(THINK,),
    calls=(CallSection(JsonCall(), open="<tool_call>", close="</tool_call>"),),
    template_markers=(("<tool_call>",),),
    families=("smollm",),
)

ERNIE = ModelFormat(
    name="ernie",
    thoughts=(THINK,),
    answer=Tags("<response>", "</response>"),
    calls=HERMES.calls,
    template_markers=(("<response>", "<tool_call>"),),
)

HUNYUAN = ModelFormat(
    name="hunyuan",
    thoughts=(THINK,),
    answer=Tags("<answer>", "</answer>"),
    calls=(CallSection(JsonCall(array=True), open="<tool_calls>", close="</tool_calls>", multiple=True),),
    template_markers=(("<tool_calls>",), ("<answer>", "<think>")),
)

GRANITE = ModelFormat(
    name="granite",
    thoughts=(Tags("Here is my thought process:", "Here is my response:"), THINK),
    calls=(
        CallSection(JsonCall(array=True), open="<|tool_call|>", multiple=True),
        CallSection(JsonCall(array=True), open="<tool_call>", close="</tool_call>", multiple=True),
    ),
    answer=Tags("<response>", "</response>"),
    template_markers=(("<|tool_call|>", "<|start_of_role|>"), ("<|start_of_role|>", "Here is my thought process")),
)

PHI = ModelFormat(
    name="phi",
    thoughts=(THINK,),
    calls=(
        CallSection(JsonCall(array=True), open="functools", multiple=True),
        CallSection(JsonCall(array=True), open="<|tool_call|>", close="<|/tool_call|>", multiple=True),
    ),
    template_markers=(("functools",), ("<|tool_call|>", "<|/tool_call|>"), ("<|tool|>", "<|/tool|>")),
)

INTERNLM = ModelFormat(
    name="internlm",
    thoughts=(THINK,),
    calls=tuple(
        CallSection(JsonCall(arguments=("parameters", "arguments")), open=marker, close="<|action_end|>")
        for marker in ("<|action_start|><|plugin|>", "<|action_start|> <|plugin|>")
    ),
    template_markers=(("<|plugin|>",),),
)

COHERE = ModelFormat(
    name="cohere",
    thoughts=(Tags("<|START_THINKING|>", "<|END_THINKING|>"),),
    calls=(
        CallSection(
            JsonCall(name=("tool_name", "name"), arguments=("parameters", "arguments"), array=True),
            open="<|START_ACTION|>",
            close="<|END_ACTION|>",
            multiple=True,
        ),
    ),
    frame_markers=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
    template_markers=(("<|START_ACTION|>",), ("<|START_RESPONSE|>",)),
)
