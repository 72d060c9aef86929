"""Bare or fenced JSON: xLAM, and every model whose template nobody knows.

    reply   := thought? (calls | text (fence text)*)
    thought := "<think>" text "</think>", or another pair of tags seen in the wild
    calls   := object | [object, …]                         object := {"name": string, "arguments": object}
    fence   := "```json" calls "```"

It counts as a call only if it names a tool that was offered; anything else stays the text it is.
"""

from dragoman.formats.syntax import Calls, JsonCall, ModelFormat, Tags

_CALL = JsonCall()

JSON = ModelFormat(
    name="json",
    thoughts=(
        Tags("<think>", "</think>"),
        Tags("<thinking>", "</thinking>"),
        Tags("<thought>", "</thought>"),
        Tags("<reasoning>", "</reasoning>"),
    ),
    calls=(
        Calls(_CALL, several=True),
        Calls(_CALL, open="```json", close="```", several=True),
        Calls(_CALL, open="<tool_call>", close="</tool_call>"),
    ),
)
