"""Replies on channels: gpt-oss, and channels with a name only.

    harmony := message*
    message := "<|start|>assistant"? header "<|message|>" text ("<|end|>" | "<|call|>" | "<|return|>")
    header  := recipient? "<|channel|>" NAME recipient? ("<|constrain|>" word)?
    recipient := " to=functions." TOOL

    channel := text? ("<|channel>" space* NAME text)*            NAME := [A-Za-z0-9_-]+, in any case

`thought`, `analysis`, `thinking` and `reasoning` are reasoning. A message with a recipient is a call with the text as
its arguments. The rest is the answer. A marker without a name is text.
"""

from dragoman.formats.syntax import CallSection, Channels, JsonCall, ModelFormat

HARMONY = ModelFormat(
    name="harmony",
    channels=Channels(
        open="<|channel|>",
        message="<|message|>",
        ends=("<|end|>", "<|call|>", "<|return|>"),
        call_end="<|call|>",
        start="<|start|>",
        recipient="to=functions.",
    ),
    frame_markers=("<|constrain|>",),
    template_markers=(("<|channel|>", "<|message|>"),),
)

CHANNEL = ModelFormat(
    name="channel",
    channels=Channels(open="<|channel>", ends=("<channel|>",), answer="final"),
    calls=(CallSection(JsonCall(), open="<tool_call>", close="</tool_call>"),),
    template_markers=(("<|channel>",),),
)
