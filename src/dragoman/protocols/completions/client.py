"""Client side of completions: encodes requests. Replies are read like those of a chat.

`echo` is not sent: the caller already has the prompt.
"""

from typing import Any

from dragoman.core.request import GenerationRequest
from dragoman.protocols.chat import client as chat
from dragoman.protocols.client import request_fields

PATH = "/completions"
SUPPORTED_FIELDS = request_fields.SAMPLING | {
    "prompts",
    "suffix",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "logprobs",
    "user",
}
CompletionsReader = chat.ChatReader


def encode(request: GenerationRequest, stream: bool) -> dict[str, Any]:
    prompt = request.prompt
    body: dict[str, Any] = {
        "model": request.model or None,
        "prompt": prompt if isinstance(prompt, str) else list(prompt or ()),
        "suffix": request.suffix,
        "logprobs": None if request.logprobs is None else request.logprobs.top,
        **chat.generation_fields(request, stream),
    }
    return {name: value for name, value in body.items() if value is not None}
