"""Client side of completions: encodes requests. Replies are read like those of a chat.

`echo` is not sent: the caller already has the prompt.
"""

from typing import Any

from dragoman.core.request import GenerationRequest
from dragoman.protocols import request_fields
from dragoman.protocols.chat.client import ChatReader
from dragoman.protocols.json_body import without_nulls
from dragoman.protocols.reply_reader import ClientProtocol

SUPPORTED_FIELDS = request_fields.SAMPLING | {
    *("prompts", "suffix", "stop", "stop_token_ids", "ignore_eos", "logprobs", "user"),
}


def encode(request: GenerationRequest, stream: bool) -> dict[str, Any]:
    prompt = request.prompt
    body: dict[str, Any] = {
        **request_fields.completion_fields(request, stream),
        "prompt": prompt if isinstance(prompt, str) else list(prompt or ()),
        "suffix": request.suffix,
        "logprobs": None if request.logprobs is None else request.logprobs.top,
    }
    return without_nulls(body)


PROTOCOL = ClientProtocol("completions", "/completions", SUPPORTED_FIELDS, encode, ChatReader)
