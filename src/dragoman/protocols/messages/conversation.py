"""Decodes the system prompt and the messages of a request.

Rules
1. `system` comes first; messages with the system role stay where they are.
2. The blocks of `system` become paragraphs. A billing header in its first line is removed: it changes with every
   session, so a prompt that starts with it would never be found in a cache.
3. Tool results become messages of their own, before the rest of their message. Those of MCP servers split it.
4. The reply continues a last message of the assistant that ends with text or thinking. An empty one is left out.
"""

from typing import Literal

import msgspec

from dragoman.core.features import Feature
from dragoman.core.request import Asked, Message, Reasoning, Summary, Text, ToolResult
from dragoman.protocols.messages import blocks, context, mcp

BILLING = "x-anthropic-billing-header:"


class AnthropicMessage(msgspec.Struct, frozen=True):
    role: Literal["user", "assistant", "system"]
    content: blocks.Content


def decode_conversation(
    system: blocks.Content | None, messages: list[AnthropicMessage], asked: list[Asked]
) -> tuple[tuple[Message, ...], bool]:
    """Return the messages, and whether the reply continues the last one."""
    decoded = [] if system is None else _system(system, "system", asked)
    start, first_block = context.find_compaction([message.content for message in messages]) or (0, 0)
    for at, message in enumerate(messages[start:], start):
        path = f"messages[{at}].content"
        if message.role == "system":
            decoded += _system(message.content, path, asked)
            continue
        first = first_block if at == start else 0
        parts = blocks.decode(message.content, path, asked, blocks.ALLOWED[message.role], first)
        separate = [Message("user", (part,)) for part in parts if isinstance(part, Summary)]
        if message.role == "assistant":
            rest = [part for part in parts if not isinstance(part, Summary)]
            decoded += separate
            decoded += mcp.split_rounds(rest) if rest or not separate else ()
            continue
        separate += [Message("tool", (part,)) for part in parts if isinstance(part, ToolResult)]
        others = tuple(part for part in parts if not isinstance(part, ToolResult | Summary))
        decoded += separate
        if others or not separate:
            decoded.append(Message(message.role, others))
    if not messages or not messages[-1].role == "assistant" == decoded[-1].role:
        return tuple(decoded), False
    last = decoded[-1]
    if len(decoded) > 1 and all(part == Text("") for part in last.parts):
        return tuple(decoded[:-1]), False
    ending = next((part for part in reversed(last.parts) if part != Text("")), None)
    continues_last = isinstance(ending, Text | Reasoning) and ending.text != "" and not last.tool_calls
    if continues_last:
        asked.append(Asked(Feature.PREFILL, f"messages[{len(messages) - 1}]"))
    return tuple(decoded), continues_last


def _system(content: blocks.Content, path: str, asked: list[Asked]) -> list[Message]:
    parts = blocks.decode(content, path, asked, blocks.ALLOWED["system"])
    texts = [part.text for part in parts if isinstance(part, Text)]
    if texts and texts[0].startswith(BILLING):
        texts[0] = texts[0].partition("\n")[2]
    text = "\n\n".join(text for text in texts if text)
    return [Message("system", (Text(text),))] if text else []
