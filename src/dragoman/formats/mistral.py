"""Mistral and Magistral.

reply   := thought? text section*
thought := "[THINK]" text "[/THINK]"
section := "[TOOL_CALLS]" NAME "[ARGS]" object              tokenizer v11 and later, repeated
         | "[TOOL_CALLS]" [{"name": string, "arguments": object}, …]
"""

from dragoman.formats.syntax import Calls, JsonCall, ModelFormat, NamedJson, Tags

MISTRAL = ModelFormat(
    name="mistral",
    thoughts=(Tags("[THINK]", "[/THINK]"),),
    calls=(
        Calls(NamedJson(("{name}[ARGS]", "{name}[CALL_ID]{id}[ARGS]", "{name}")), open="[TOOL_CALLS]"),
        Calls(JsonCall(array=True), open="[TOOL_CALLS]", several=True),
    ),
    signs=(("[TOOL_CALLS]", "[ARGS]"),),
    call_ids="mistral",
)

MISTRAL_ARRAY = ModelFormat(
    name="mistral_array",
    thoughts=MISTRAL.thoughts,
    calls=MISTRAL.calls[::-1],
    signs=(("[TOOL_CALLS]",),),
    call_ids="mistral",
)
"""The same tongue; what is written when a call is forced is the array of the models before v11."""
