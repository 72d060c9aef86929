"""The OpenAI Responses protocol.

    decode            requests, in two steps: `fields` has the body, `items` and `parts` the conversation, `tools` the
                      tools
    encode, stream    the response object, as a whole and as events; `item_drafts` and `calls` build its items
    stored_items      items as they are stored
    custom_tool_text  the text in the arguments of a custom tool
    client            the client side

A response repeats fields of its request that are not part of a `GenerationRequest`. Therefore each request has its own
`ResponseEncoding`.
"""

from collections.abc import Callable
from typing import Any

from dragoman.core.reply import Reply
from dragoman.core.request import GenerationRequest
from dragoman.protocols.responses import encode
from dragoman.protocols.responses.decode import ParsedRequest as ParsedRequest
from dragoman.protocols.responses.decode import ResponseContext as ResponseContext
from dragoman.protocols.responses.decode import ResponseRequest as ResponseRequest
from dragoman.protocols.responses.decode import decode as decode
from dragoman.protocols.responses.decode import parse as parse
from dragoman.protocols.responses.encode import PREFIX as PREFIX
from dragoman.protocols.responses.stored_items import decode_page as decode_page
from dragoman.protocols.responses.stored_items import encode_page as encode_page
from dragoman.protocols.responses.stored_items import storable_items as storable_items
from dragoman.protocols.responses.stream import ResponseEncoder as ResponseEncoder


class ResponseEncoding:
    """Encodes the reply to one request. Afterwards `response` is the final response object."""

    def __init__(self, context: ResponseContext, clock: Callable[[], float]) -> None:
        self.response: dict[str, Any] | None = None
        self._context = context
        self._clock = clock
        self._created = int(clock())

    def encoder(self, request: GenerationRequest, created: int, /) -> ResponseEncoder:
        return ResponseEncoder(self._builder(request), self._clock, self._set_response)

    def encode_reply(self, request: GenerationRequest, created: int, reply: Reply, /) -> dict[str, Any]:
        self.response = encode.encode_reply(self._builder(request), int(self._clock()), reply)
        return self.response

    def _builder(self, request: GenerationRequest) -> encode.ResponseBuilder:
        return encode.ResponseBuilder(self._context, request, self._created)

    def _set_response(self, response: dict[str, Any]) -> None:
        self.response = response


def encode_count(tokens: int) -> dict[str, Any]:
    return {"object": "response.input_tokens", "input_tokens": tokens}


def encode_deleted(response_id: str) -> dict[str, Any]:
    return {"id": response_id, "object": "response", "deleted": True}
