"""Channels by name alone: a marker with a name switches, and what follows belongs to that channel.

    reply  := text? ("<|channel>" space* NAME text)*            NAME := [A-Za-z0-9_-]+, in any case

`thought`, `analysis`, `thinking` and `reasoning` are thought, every other channel is the answer. A marker without a
name is text.
"""

from dragoman.formats.syntax import Calls, Channels, JsonCall, ModelFormat

CHANNEL = ModelFormat(
    name="channel",
    channels=Channels(open="<|channel>"),
    calls=(Calls(JsonCall(), open="<tool_call>", close="</tool_call>"),),
    signs=(("<|channel>",),),
)
