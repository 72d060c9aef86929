"""The tables of wire protocols: those that the server answers in, and those that the client speaks.

A protocol is a few pure functions, an encoder class and a reader class, independent of engines and of other protocols.
Shared parts:

    wire_protocol                                     the base class of the server sides            all
    json_body, errors                                 JSON bodies, errors                           all
    openai                                            sampling fields, content, usage, framing      the OpenAI protocols
    tools, thinking                                   names and schemas; effort and budget          chats
    response_format                                   structured output                             chat, completions
    request_fields, reply_fields, reply_reader, sse   shared fields, readers of replies, frames     the client sides

`responses` has no server entry: its handler resolves stored items between parsing and decoding a request.

To add a protocol, start from `messages`: one folder, and one line in each table here. It also needs
tests; the extension points in `docs/architecture.md` list every place.
"""

from collections.abc import Mapping
from typing import Protocol

from dragoman.core.errors import ConfigError
from dragoman.core.plugins import find_plugin
from dragoman.core.reply import Reply
from dragoman.core.request import GenerationRequest
from dragoman.protocols import completions, errors
from dragoman.protocols.chat import client as chat_client
from dragoman.protocols.chat import server as chat
from dragoman.protocols.messages import client as messages_client
from dragoman.protocols.messages import encoder as messages_encoder
from dragoman.protocols.messages import server as messages
from dragoman.protocols.responses import client as responses_client
from dragoman.protocols.wire_protocol import OPENAI, Encoder, Family, WireProtocol

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


class ChatProtocol(WireProtocol):
    paths = ("/v1/chat/completions",)
    id_prefix = "chatcmpl-"
    decode = staticmethod(chat.decode)
    encode_stream = chat.ChatEncoder
    encode_reply = staticmethod(chat.encode_reply)


class CompletionsProtocol(WireProtocol):
    paths = ("/v1/completions",)
    id_prefix = "cmpl-"
    scope = "completions"
    decode = staticmethod(completions.decode)
    encode_stream = completions.CompletionEncoder
    encode_reply = staticmethod(completions.encode_reply)


class MessagesProtocol(WireProtocol):
    paths = ("/v1/messages",)
    id_prefix = "msg_"
    scope = "messages"
    family = ANTHROPIC
    decode = staticmethod(messages.decode)
    encode_stream = messages_encoder.MessagesEncoder
    encode_reply = staticmethod(messages_encoder.encode_reply)


class ReplyEncoding(Protocol):
    """Encodes a reply as a stream or as a whole, as a `WireProtocol` does."""

    @property
    def stream_type(self) -> str: ...

    def encode_stream(self, request: GenerationRequest, created: int) -> Encoder: ...

    def encode_reply(self, request: GenerationRequest, created: int, reply: Reply) -> object: ...


PROTOCOLS: dict[str, WireProtocol] = {
    "chat": ChatProtocol(),
    "completions": CompletionsProtocol(),
    "messages": MessagesProtocol(),
}


def load_protocol(name: str) -> WireProtocol:
    """Return a protocol of your own, by the name of an entry point or as `module:Class`."""
    found = find_plugin("protocol", name, {})
    if not (isinstance(found, type) and issubclass(found, WireProtocol)):
        raise ConfigError(f"protocol {name!r}: it is not a subclass of WireProtocol")
    try:
        return found()
    except TypeError as error:
        raise ConfigError(f"protocol {name!r}: {found.__name__}() must work without arguments ({error})") from error


CLIENT_PROTOCOLS = {
    protocol.name: protocol for protocol in (chat_client.PROTOCOL, messages_client.PROTOCOL, responses_client.PROTOCOL)
}
"""Protocols for conversations, in the order in which they are tried. Raw prompts have `chat_client.COMPLETIONS`."""
