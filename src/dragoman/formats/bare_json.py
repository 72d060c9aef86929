"""Bare or fenced JSON: xLAM, and every model whose template is unknown.

    reply   := thought? (calls | text (fence text)*)
    thought := "<think>" text "</think>", or another known pair of tags
    calls   := object | [object, …]                         object := {"name": string, "arguments": object}
    fence   := "```json" calls "```"

JSON is a call only if it names an offered tool. Otherwise it is text.
"""

from dragoman.formats.syntax import CallSection, JsonCall, ModelFormat, Tags

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
        CallSection(_CALL, multiple=True),
        CallSection(_CALL, open="```json", close="```", multiple=True),
        CallSection(_CALL, open="<tool_call>", close="</tool_call>"),
    ),
)
