"""InternLM.

reply   := thought? text section?
thought := "<think>" text "</think>"
section := "<|action_start|><|plugin|>" {"name": string, "parameters": object} "<|action_end|>"
"""

from dragoman.formats.syntax import Calls, JsonCall, ModelFormat, Tags

INTERNLM = ModelFormat(
    name="internlm",
    thoughts=(Tags("<think>", "</think>"),),
    calls=(
        Calls(
            JsonCall(arguments=("parameters", "arguments")),
            open="<|action_start|><|plugin|>",
            close="<|action_end|>",
        ),
        Calls(
            JsonCall(arguments=("parameters", "arguments")),
            open="<|action_start|> <|plugin|>",
            close="<|action_end|>",
        ),
    ),
    signs=(("<|plugin|>",),),
)
