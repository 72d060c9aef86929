"""Channels with a name only: a marker and a name switch to a channel.

    reply  := text? ("<|channel>" space* NAME text)*            NAME := [A-Za-z0-9_-]+, in any case

`thought`, `analysis`, `thinking` and `reasoning` are reasoning, every other channel is the answer. A marker without a
name is text.
"""

from dragoman.formats.syntax import CallSection, Channels, JsonCall, ModelFormat

CHANNEL = ModelFormat(
    name="channel",
    channels=Channels(open="<|channel>"),
    calls=(CallSection(JsonCall(), open="<tool_call>", close="</tool_call>"),),
    template_markers=(("<|channel>",),),
)
