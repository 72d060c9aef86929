"""OpenAI responses.

    decode   what a request says, in two steps; `fields` has the body, `items` the conversation with its `parts`,
             `tools` what may be called
    encode   the response object and the whole reply; `drafts` are its items, `calls` those of calls, `stream` is the
             response as it is made
    kept     items for and from a store
    peel     the text inside the arguments of a free-text tool
    sealed   `encrypted_content`

What a request refers to has to be looked up, and what a response repeats of its request is not among the values: so
that a question has its own `Telling`, where other protocols tell every reply the same way.
"""

from collections.abc import Callable
from typing import Any

from dragoman.core.reply import Reply
from dragoman.core.request import GenerationRequest
from dragoman.protocols.responses import encode
from dragoman.protocols.responses.decode import Asking as Asking
from dragoman.protocols.responses.decode import Question as Question
from dragoman.protocols.responses.decode import Shown as Shown
from dragoman.protocols.responses.decode import decode as decode
from dragoman.protocols.responses.decode import read as read
from dragoman.protocols.responses.encode import PREFIX as PREFIX
from dragoman.protocols.responses.stored_items import decode_page as decode_page
from dragoman.protocols.responses.stored_items import encode_page as encode_page
from dragoman.protocols.responses.stored_items import kept_items as kept_items
from dragoman.protocols.responses.stream import ResponseEncoder as ResponseEncoder


class Telling:
    """How the answer to one question is told; afterwards `response` is what was told in the end."""

    def __init__(self, shown: Shown, clock: Callable[[], float]) -> None:
        self.response: dict[str, Any] | None = None
        self._shown = shown
        self._clock = clock
        self._created = int(clock())

    def encoder(self, request: GenerationRequest, created: int, /) -> ResponseEncoder:
        return ResponseEncoder(self._drawing(request), self._clock, self._end)

    def encode_reply(self, request: GenerationRequest, created: int, reply: Reply, /) -> dict[str, Any]:
        response = encode.encode_reply(self._drawing(request), int(self._clock()), reply)
        self._end(response)
        return response

    def _drawing(self, request: GenerationRequest) -> encode.Drawing:
        return encode.Drawing(self._shown, request, self._created)

    def _end(self, response: dict[str, Any]) -> None:
        self.response = response


def encode_count(tokens: int) -> dict[str, Any]:
    return {"object": "response.input_tokens", "input_tokens": tokens}


def encode_deleted(response_id: str) -> dict[str, Any]:
    return {"id": response_id, "object": "response", "deleted": True}
