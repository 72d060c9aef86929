"""Mistral and Magistral.

reply   := thought? text section*
thought := "[THINK]" text "[/THINK]"
section := "[TOOL_CALLS]" NAME "[ARGS]" object              tokenizer v11 and later, repeated
         | "[TOOL_CALLS]" [{"name": string, "arguments": object}, …]
"""

from dragoman.formats.syntax import CallSection, JsonCall, ModelFormat, NamedJson, Tags

MISTRAL = ModelFormat(
    name="mistral",
    thoughts=(Tags("[THINK]", "[/THINK]"),),
    calls=(
        CallSection(NamedJson(("{name}[ARGS]", "{name}[CALL_ID]{id}[ARGS]", "{name}")), open="[TOOL_CALLS]"),
        CallSection(JsonCall(array=True), open="[TOOL_CALLS]", multiple=True),
    ),
    template_markers=(("[TOOL_CALLS]", "[ARGS]"),),
    call_ids="mistral",
)

MISTRAL_ARRAY = ModelFormat(
    name="mistral_array",
    thoughts=MISTRAL.thoughts,
    calls=MISTRAL.calls[::-1],
    template_markers=(("[TOOL_CALLS]",),),
    call_ids="mistral",
)
"""Models before tokenizer v11: a required call is written as an array."""
