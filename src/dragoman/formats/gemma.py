"""Gemma 4, and FunctionGemma with other brackets.

reply   := thought? text call* text
thought := "<|channel>thought" text "<channel|>"
call    := "<|tool_call>call:" NAME "{" (KEY ":" value ("," …)*)? "}" "<tool_call|>"
value   := <|"|>text<|"|> | number | true | false | null | "[" value,* "]" | "{" KEY ":" value,* "}"
FunctionGemma: "<start_function_call>" … "<end_function_call>", strings between two "<escape>"
"""

from dragoman.formats.syntax import Braced, Calls, Channels, ModelFormat

GEMMA = ModelFormat(
    name="gemma",
    channels=Channels(open="<|channel>", ends=("<channel|>",)),
    calls=(Calls(Braced(quote='<|"|>'), open="<|tool_call>", close="<tool_call|>"),),
    silent=("<turn|>", "<end_of_turn>"),
    signs=(("<|tool_call>", "<tool_call|>"),),
)

FUNCTION_GEMMA = ModelFormat(
    name="function_gemma",
    calls=(Calls(Braced(quote="<escape>"), open="<start_function_call>", close="<end_function_call>"),),
    silent=("<end_of_turn>",),
    signs=(("<start_function_call>",),),
)
