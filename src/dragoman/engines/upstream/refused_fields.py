"""What a place does not take, from the words in which it says so.

    400 "Unsupported parameter: 'temperature' …"     OpenAI            422 [{"loc": ["body", "seed"], …}]     FastAPI
    400 "… does not support tools"                   Ollama            500 "tools param requires --jinja"     llama.cpp

A field without which the reply would still be an answer is left out from then on, and whoever asks for it is told so.
Without any other there is no answer: 501.
"""

import re
from collections.abc import Iterable

from dragoman.core.errors import ContextTooLong, DragomanError, InvalidSchema, UnsupportedParameter

FIELDS = {
    **{name: name for name in ("temperature", "top_p", "top_k", "min_p", "seed", "repetition_penalty")},
    **{name: name for name in ("presence_penalty", "frequency_penalty", "logit_bias", "stop_token_ids", "ignore_eos")},
    **dict.fromkeys(("logprobs", "top_logprobs"), "logprobs"),
    **dict.fromkeys(("stop", "stop_sequences"), "stop"),
    **dict.fromkeys(("reasoning_effort", "reasoning", "thinking", "chat_template_kwargs", "include"), "thinking"),
    "thinking_token_budget": "thinking_budget",
    "documents": "documents",
    "cache_control": "cache_control",
    **{name: name for name in ("user", "metadata", "prompt_cache_key", "safety_identifier", "service_tier")},
    "parallel_tool_calls": "parallel",
    "strict": "strict_tools",
    "stream_options": "stream_options",
    "tools": "tools",
    "tool_choice": "tools",
    "image_url": "images",
    "images": "images",
    **dict.fromkeys(("response_format", "structured_outputs", "text", "output_config"), "constraint"),
}
"""Fields of all protocols, and what asks for them."""
ESSENTIAL = frozenset({"tools", "images", "constraint"})
WORDS = re.compile(
    r"not (currently )?support|unsupported|not permitted|unrecognized|unknown (field|parameter|argument|name)"
    r"|extra_forbidden|not allowed|requires --|not enabled|not available",
    re.IGNORECASE,
)
STATUSES = (400, 422, 500, 501)
INNER = {"cache_control": "messages", "strict": "tools", "image_url": "messages", "images": "messages"}
"""Fields that stand in others."""

PLAIN = frozenset({"text", "include", "user"})
"""Fields whose names are words that anybody uses."""


def blamed(error: DragomanError, sent: Iterable[str]) -> str | None:
    """Which of the things that were asked for is refused; None where it is something else."""
    answered = error.answered
    if answered is None or answered.status not in STATUSES or isinstance(error, ContextTooLong | InvalidSchema):
        return None
    if not isinstance(error, UnsupportedParameter) and not WORDS.search(error.message):
        return None
    fields = set(sent)
    present = [field for field in FIELDS if INNER.get(field, field) in fields]
    root = re.split(r"[.\[]", error.param or "")[0]
    if root in present:
        return FIELDS[root]
    found = [field for field in present if field not in PLAIN and re.search(rf"\b{field}\b", error.message)]
    return FIELDS[max(found, key=len)] if found else None
