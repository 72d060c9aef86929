"""Calls as a name in a text template, then the arguments as JSON. `｜` is U+FF5C, `▁` is U+2581.

deepseek := thought? text ("<｜tool▁calls▁begin｜>" call* "<｜tool▁calls▁end｜>")?
  V3     call := "<｜tool▁call▁begin｜>function<｜tool▁sep｜>" NAME "\\n```json\\n" object "\\n```<｜tool▁call▁end｜>"
  V3.1   call := "<｜tool▁call▁begin｜>" NAME "<｜tool▁sep｜>" object "<｜tool▁call▁end｜>"
kimi    := thought? text ("<|tool_calls_section_begin|>" call* "<|tool_calls_section_end|>")?
  call  := "<|tool_call_begin|>functions." NAME ":" INDEX "<|tool_call_argument_begin|>" object "<|tool_call_end|>"
mistral := ("[THINK]" text "[/THINK]")? text section*
  section := "[TOOL_CALLS]" NAME "[ARGS]" object              tokenizer v11 and later, repeated
           | "[TOOL_CALLS]" [{"name": string, "arguments": object}, …]
thought := "<think>" text "</think>"           the prompt often ends with the opener; older Kimi: "◁think▷"
"""

from dragoman.formats.syntax import THINK, CallSection, JsonCall, ModelFormat, NamedJson, Tags

_BEGIN, _END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_FENCED = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n"
_SHORT = "<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>"

DEEPSEEK = ModelFormat(
    name="deepseek",
    thoughts=(THINK,),
    calls=(CallSection(NamedJson((_SHORT, _FENCED), "<｜tool▁call▁end｜>"), open=_BEGIN, close=_END, multiple=True),),
    template_markers=(("<｜tool▁calls▁begin｜>",),),
)

DEEPSEEK_V3 = ModelFormat(
    name="deepseek_v3",
    thoughts=(THINK,),
    calls=(
        CallSection(NamedJson((_FENCED, _SHORT), "\n```<｜tool▁call▁end｜>"), open=_BEGIN, close=_END, multiple=True),
    ),
    template_markers=(("<｜tool▁calls▁begin｜>", "```json"),),
)

KIMI = ModelFormat(
    name="kimi",
    thoughts=(THINK, Tags("◁think▷", "◁/think▷")),
    calls=(
        CallSection(
            NamedJson(
                (
                    "<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>",
                    "<|tool_call_begin|>{name}:{index}<|tool_call_argument_begin|>",
                    "<|tool_call_begin|>{name}<|tool_call_argument_begin|>",
                ),
                "<|tool_call_end|>",
            ),
            open="<|tool_calls_section_begin|>",
            close="<|tool_calls_section_end|>",
            multiple=True,
        ),
    ),
    template_markers=(("<|tool_calls_section_begin|>",), ("◁think▷",)),
    call_ids="kimi",
)

MISTRAL = ModelFormat(
    name="mistral",
    thoughts=(Tags("[THINK]", "[/THINK]"),),
    calls=(
        CallSection(NamedJson(("{name}[ARGS]", "{name}[CALL_ID]{id}[ARGS]", "{name}")), open="[TOOL_CALLS]"),
        CallSection(JsonCall(array=True), open="[TOOL_CALLS]", multiple=True),
    ),
    template_markers=(("[TOOL_CALLS]", "[ARGS]"),),
    call_ids="mistral",
)

MISTRAL_ARRAY = ModelFormat(
    name="mistral_array",
    thoughts=MISTRAL.thoughts,
    calls=MISTRAL.calls[::-1],
    template_markers=(("[TOOL_CALLS]",),),
    call_ids="mistral",
)
"""Models before tokenizer v11: a required call is written as an array."""
