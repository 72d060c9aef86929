"""Kimi K2, and the reasoning tags of earlier models.

reply   := thought? text section?
thought := "<think>" text "</think>" | "◁think▷" text "◁/think▷"
section := "<|tool_calls_section_begin|>" call* "<|tool_calls_section_end|>"
call    := "<|tool_call_begin|>functions." NAME ":" INDEX "<|tool_call_argument_begin|>" object "<|tool_call_end|>"
"""

from dragoman.formats.syntax import CallSection, ModelFormat, NamedJson, Tags

KIMI = ModelFormat(
    name="kimi",
    thoughts=(Tags("<think>", "</think>"), Tags("◁think▷", "◁/think▷")),
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
