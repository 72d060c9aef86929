"""The table of wire protocols. A new protocol is one folder and one line in `PROTOCOLS`.

A protocol is a few pure functions and an encoder class, independent of engines and of other protocols. Shared parts:

    json_body             JSON parsing                              all
    openai                sampling fields, usage, errors, framing   chat, completions, responses, messages (ranges)
    chat.tools            names and number of tools                 chat, messages, responses
    chat.response_format  structured output                         chat, completions
    thinking              reasoning effort and budget               chat, responses

`responses` is not in the table: its handler resolves stored items between parsing and decoding a request.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from typing import Protocol as Interface

from dragoman.core.errors import DragomanError
from dragoman.core.events import Event
from dragoman.core.rate_limits import RateLimitState
from dragoman.core.reply import Reply
from dragoman.core.request import GenerationRequest
from dragoman.protocols import messages, openai
from dragoman.protocols.chat import server as chat
from dragoman.protocols.completions import server as completions


class Encoder(Interface):
    """Encodes the events of one stream as bytes."""

    def feed(self, choice: int, events: Sequence[Event]) -> bytes: ...

    def end(self) -> bytes:
        """Encode the end of a complete stream."""

    def fail(self, error: DragomanError) -> bytes:
        """Encode the error of a failed stream."""


@dataclass(frozen=True)
class Family:
    """What the protocols of one vendor share: errors, rate limit headers, and a second header for the request id."""

    encode_error: Callable[[DragomanError, str], dict[str, Any]]
    status: Callable[[DragomanError], int]
    rate_headers: Callable[[Sequence[RateLimitState]], list[tuple[bytes, bytes]]]
    id_header: bytes | None = None


OPENAI = Family(lambda error, request_id: openai.encode_error(error), lambda error: error.status, openai.rate_headers)
ANTHROPIC = Family(messages.encode_error, messages.status, messages.rate_headers, b"request-id")


def family(path: str, headers: Mapping[bytes, bytes]) -> Family:
    """Guess the family of a request that matches no route."""
    is_messages = path == "/v1/messages" or path.startswith("/v1/messages/")
    return ANTHROPIC if is_messages or b"anthropic-version" in headers else OPENAI


class ReplyEncoding(Interface):
    """Encodes a reply as a stream or as a whole: a `Protocol`, or an object made for one request."""

    @property
    def encoder(self) -> Callable[[GenerationRequest, int], Encoder]: ...

    @property
    def encode_reply(self) -> Callable[[GenerationRequest, int, Reply], dict[str, Any]]: ...


@dataclass(frozen=True)
class Protocol:
    id_prefix: str
    decode: Callable[[bytes], GenerationRequest]
    encoder: Callable[[GenerationRequest, int], Encoder]
    encode_reply: Callable[[GenerationRequest, int, Reply], dict[str, Any]]
    family: Family = OPENAI


PROTOCOLS = {
    "chat": Protocol("chatcmpl-", chat.decode, chat.ChatEncoder, chat.encode_reply),
    "completions": Protocol("cmpl-", completions.decode, completions.CompletionEncoder, completions.encode_reply),
    "messages": Protocol("msg_", messages.decode, messages.MessagesEncoder, messages.encode_reply, ANTHROPIC),
}
