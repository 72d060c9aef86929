"""The messages of a conversation, from the wire to values.

Rules
1. `system` comes first; messages of the role system stay where they are.
2. The blocks of `system` are paragraphs. Its first line is left out where it is a billing header: it differs from
   session to session, and no prompt that began with it would be found in a cache again.
3. Results of tools are messages of their own, before whatever else was said with them.
"""

from typing import Literal

import msgspec

from dragoman.core.request import Asked, Message, Text, ToolResult
from dragoman.protocols.messages import blocks

BILLING = "x-anthropic-billing-header:"


class MessageField(msgspec.Struct, frozen=True):
    role: Literal["user", "assistant", "system"]
    content: blocks.Content


def decode(system: blocks.Content | None, messages: list[MessageField], asked: list[Asked]) -> tuple[Message, ...]:
    decoded = [] if system is None else _system(system, "system", asked)
    for at, message in enumerate(messages):
        path = f"messages[{at}].content"
        if message.role == "system":
            decoded += _system(message.content, path, asked)
        else:
            decoded += _turn(message.role, message.content, path, asked)
    if messages and messages[-1].role == "assistant":
        # A reply that goes on where this message ends.
        asked.append(Asked("prefill", f"messages[{len(messages) - 1}]"))
    return tuple(decoded)


def _system(content: blocks.Content, path: str, asked: list[Asked]) -> list[Message]:
    parts = blocks.decode(content, path, asked, blocks.ALLOWED["system"])
    texts = [part.text for part in parts if isinstance(part, Text)]
    if texts and texts[0].startswith(BILLING):
        texts[0] = texts[0].partition("\n")[2]
    text = "\n\n".join(text for text in texts if text)
    return [Message("system", (Text(text),))] if text else []


def _turn(role: Literal["user", "assistant"], content: blocks.Content, path: str, asked: list[Asked]) -> list[Message]:
    parts = blocks.decode(content, path, asked, blocks.ALLOWED[role])
    results = [Message("tool", (part,)) for part in parts if isinstance(part, ToolResult)]
    others = tuple(part for part in parts if not isinstance(part, ToolResult))
    return [*results, Message(role, others)] if others or not results else results
