"""The tables of wire protocols: those that the server answers in, and those that the client speaks.

A protocol is a few pure functions, an encoder class and a reader class, independent of engines and of other protocols.
Shared parts:

    json_body, errors                                 JSON bodies, errors                           all
    openai                                            sampling fields, content, usage, framing      the OpenAI protocols
    tools, thinking                                   names and schemas; effort and budget          chats
    response_format                                   structured output                             chat, completions
    request_fields, reply_fields, reply_reader, sse   shared fields, readers of replies, frames     the client sides

`responses` has no server entry: its handler resolves stored items between parsing and decoding a request.

To add a protocol, start from `messages`: one folder, and one line in each table here. It also needs a route, a scope
and tests; the extension points in `docs/architecture.md` list every place.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from dragoman.core.errors import DragomanError
from dragoman.core.events import Event
from dragoman.core.reply import RateLimitState, Reply
from dragoman.core.request import GenerationRequest
from dragoman.protocols import completions, errors, openai
from dragoman.protocols.chat import client as chat_client
from dragoman.protocols.chat import server as chat
from dragoman.protocols.messages import client as messages_client
from dragoman.protocols.messages import server as messages
from dragoman.protocols.responses import client as responses_client
from dragoman.protocols.responses.encoder import ResponseEncoding


class Encoder(Protocol):
    """Encodes the events of one stream as bytes."""

    def feed(self, choice: int, events: Sequence[Event]) -> bytes:
        """Encode events of the choice with this index. `Started` and `Finished` are among them, once per choice.

        Events of several choices are interleaved. The result may be empty.
        """

    def end(self) -> bytes:
        """Encode the end of a complete stream. Called once, after the `Finished` of all choices."""

    def fail(self, error: DragomanError) -> bytes:
        """Encode the error of a failed stream. Called once, instead of `end`."""


@dataclass(frozen=True)
class Family:
    """What the protocols of one vendor share: errors, rate limit headers, and a second header for the request id."""

    encode_error: Callable[[DragomanError, str], dict[str, Any]]
    status: Callable[[DragomanError], int]
    rate_header: str
    format_reset: Callable[[float], str]
    id_header: bytes | None = None

    def rate_headers(self, rates: Sequence[RateLimitState]) -> list[tuple[bytes, bytes]]:
        headers = []
        for rate in rates:
            values = {"limit": rate.limit, "remaining": rate.remaining, "reset": self.format_reset(rate.reset)}
            for name, value in values.items():
                headers.append((self.rate_header.format(name=name, what=rate.what).encode(), str(value).encode()))
        return headers


OPENAI = Family(
    lambda error, request_id: errors.encode_openai_error(error),
    lambda error: error.status,
    "x-ratelimit-{name}-{what}",
    openai.format_reset,
)
ANTHROPIC = Family(
    errors.encode_anthropic_error,
    errors.anthropic_status,
    "anthropic-ratelimit-{what}-{name}",
    messages.format_reset,
    b"request-id",
)


def family(path: str, headers: Mapping[bytes, bytes]) -> Family:
    """Guess the family of a request that matches no route."""
    is_messages = path == "/v1/messages" or path.startswith("/v1/messages/")
    return ANTHROPIC if is_messages or b"anthropic-version" in headers else OPENAI


@dataclass(frozen=True)
class ServerProtocol:
    """The server side of a protocol.

    `decode` parses and validates a body. It lists every requested feature in `GenerationRequest.asked`: a feature that
    is missing there is not checked against the engine. `encoder` and `encode_reply` get the request and the time of
    creation, in seconds.
    """

    id_prefix: str
    decode: Callable[[bytes], GenerationRequest]
    encoder: Callable[[GenerationRequest, int], Encoder]
    encode_reply: Callable[[GenerationRequest, int, Reply], dict[str, Any]]
    family: Family = OPENAI


ReplyEncoding = ServerProtocol | ResponseEncoding
"""Encodes a reply as a stream or as a whole."""
PROTOCOLS = {
    "chat": ServerProtocol("chatcmpl-", chat.decode, chat.ChatEncoder, chat.encode_reply),
    "completions": ServerProtocol("cmpl-", completions.decode, completions.CompletionEncoder, completions.encode_reply),
    "messages": ServerProtocol("msg_", messages.decode, messages.MessagesEncoder, messages.encode_reply, ANTHROPIC),
}


CLIENT_PROTOCOLS = {
    protocol.name: protocol for protocol in (chat_client.PROTOCOL, messages_client.PROTOCOL, responses_client.PROTOCOL)
}
"""Protocols for conversations, in the order in which they are tried. Raw prompts have `chat_client.COMPLETIONS`."""
