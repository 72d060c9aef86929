"""The wire protocols, by name. A new protocol is one module and one line here.

A protocol is a handful of pure functions and a small encoder. None knows an engine, and none another's messages. What
several have in common is beside them:

    wire      JSON on its way in                        used by all
    openai    sampling fields, usage, errors, framing   chat, completions, responses; `messages` takes ranges
    tools     the tools of a chat                       `messages` and `responses` take its rules: names, how many
    thinking  how much to think                         chat, responses
    shape     the shape of a reply                      chat, completions
    pages     lists that are told in pages              responses, models
    rates     how the limits of a key stand             every family

`responses` is not in the table: between reading a request and decoding it somebody looks up what it refers to.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from typing import Protocol as Interface

from dragoman.core.errors import DragomanError
from dragoman.core.events import Event
from dragoman.core.rate_limits import Rate
from dragoman.core.reply import Reply
from dragoman.core.request import GenerationRequest
from dragoman.protocols import messages, openai, rate_headers
from dragoman.protocols.chat import server as chat
from dragoman.protocols.completions import server as completions


class Encoder(Interface):
    """Turns the events of one stream into bytes for the wire."""

    def feed(self, choice: int, events: Sequence[Event]) -> bytes: ...

    def end(self) -> bytes:
        """What follows the last event of a stream that went well."""

    def fail(self, error: DragomanError) -> bytes:
        """What follows the last event of a stream that broke off."""


@dataclass(frozen=True)
class Family:
    """What the protocols of one origin share: how they tell of errors and of limits, and the request's id beside
    `x-request-id`."""

    encode_error: Callable[[DragomanError, str], dict[str, Any]]
    status: Callable[[DragomanError], int]
    rate_headers: Callable[[Sequence[Rate]], list[tuple[bytes, bytes]]]
    id_header: bytes | None = None


OPENAI = Family(
    lambda error, request_id: openai.encode_error(error), lambda error: error.status, rate_headers.openai_headers
)
ANTHROPIC = Family(messages.encode_error, messages.status, rate_headers.anthropic_headers, b"request-id")


def family(path: str, headers: Mapping[bytes, bytes]) -> Family:
    """Whose words are understood where no route says so."""
    is_messages = path == "/v1/messages" or path.startswith("/v1/messages/")
    return ANTHROPIC if is_messages or b"anthropic-version" in headers else OPENAI


class Telling(Interface):
    """How a reply is told. A protocol does it the same way for every request, or makes one for each."""

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
