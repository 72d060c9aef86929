"""The wire protocols, by name. A new protocol is one module and one line here.

A protocol is a handful of pure functions and a small encoder; none knows another, none knows an engine.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from typing import Protocol as Interface

from dragoman.conversation import GenerationRequest
from dragoman.errors import DragomanError
from dragoman.events import Event
from dragoman.protocols import chat, completions, openai
from dragoman.reply import Reply


class Encoder(Interface):
    """Turns the events of one stream into bytes for the wire."""

    def feed(self, choice: int, events: Sequence[Event]) -> bytes: ...

    def end(self) -> bytes:
        """What follows the last event of a stream that went well."""

    def fail(self, error: DragomanError) -> bytes:
        """What follows the last event of a stream that broke off."""


@dataclass(frozen=True)
class Protocol:
    id_prefix: str
    decode: Callable[[bytes], GenerationRequest]
    encoder: Callable[[GenerationRequest, int], Encoder]
    encode_reply: Callable[[GenerationRequest, int, Reply], dict[str, Any]]
    encode_error: Callable[[DragomanError], dict[str, Any]]


PROTOCOLS = {
    "chat": Protocol("chatcmpl-", chat.decode, chat.ChatEncoder, chat.encode_reply, openai.encode_error),
    "completions": Protocol(
        "cmpl-", completions.decode, completions.CompletionEncoder, completions.encode_reply, openai.encode_error
    ),
}
