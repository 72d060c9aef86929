"""InternLM.

reply   := thought? text section?
thought := "<think>" text "</think>"
section := "<|action_start|><|plugin|>" {"name": string, "parameters": object} "<|action_end|>"
"""

from dragoman.formats.syntax import CallSection, JsonCall, ModelFormat, Tags

INTERNLM = ModelFormat(
    name="internlm",
    thoughts=(Tags("<think>", "</think>"),),
    calls=(
        CallSection(
            JsonCall(arguments=("parameters", "arguments")), open="<|action_start|><|plugin|>", close="<|action_end|>"
        ),
        CallSection(
            JsonCall(arguments=("parameters", "arguments")), open="<|action_start|> <|plugin|>", close="<|action_end|>"
        ),
    ),
    template_markers=(("<|plugin|>",),),
)
