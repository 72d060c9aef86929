"""Gemma 4, and FunctionGemma with other brackets.

reply   := thought? text call* text
thought := "<|channel>thought" text "<channel|>"
call    := "<|tool_call>call:" NAME "{" (KEY ":" value ("," …)*)? "}" "<tool_call|>"
value   := <|"|>text<|"|> | number | true | false | null | "[" value,* "]" | "{" KEY ":" value,* "}"
FunctionGemma: "<start_function_call>" … "<end_function_call>", strings between two "<escape>"
"""

from dragoman.formats.syntax import Braced, CallSection, Channels, ModelFormat

GEMMA = ModelFormat(
    name="gemma",
    channels=Channels(open="<|channel>", ends=("<channel|>",)),
    calls=(CallSection(Braced(quote='<|"|>'), open="<|tool_call>", close="<tool_call|>"),),
    frame_markers=("<turn|>", "<end_of_turn>"),
    template_markers=(("<|tool_call>", "<tool_call|>"),),
)

FUNCTION_GEMMA = ModelFormat(
    name="function_gemma",
    calls=(CallSection(Braced(quote="<escape>"), open="<start_function_call>", close="<end_function_call>"),),
    frame_markers=("<end_of_turn>",),
    template_markers=(("<start_function_call>",),),
)
