"""gpt-oss: every message is on a channel.

    reply   := message*
    message := "<|start|>assistant"? header "<|message|>" text ("<|end|>" | "<|call|>" | "<|return|>")
    header  := recipient? "<|channel|>" NAME recipient? ("<|constrain|>" word)?
    recipient := " to=functions." TOOL

`analysis` is reasoning. A message with a recipient is a call with the text as its arguments. The rest is the answer.
"""

from dragoman.formats.syntax import Channels, ModelFormat

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
