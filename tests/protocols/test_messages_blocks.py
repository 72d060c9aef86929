"""Decoding of Anthropic content blocks."""

from functools import partial
from typing import Any

import pytest

from dragoman.core.request import Image, Message, Reasoning, Text, ToolResult
from dragoman.protocols.messages.blocks import SIGNATURE
from tests.protocols import wire
from tests.protocols.wire import HI, asked

decode = partial(wire.decode, "messages")
rejected_param = partial(wire.rejected_param, "messages")


def text(content: str) -> dict[str, Any]:
    return {"type": "text", "text": content}


def decode_blocks(role: str, *blocks: dict[str, Any]) -> tuple[Message, ...]:
    return decode(messages=[{"role": role, "content": list(blocks)}]).messages


def test_images() -> None:
    inline = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
    linked = {"type": "image", "source": {"type": "url", "url": "https://example.com/cat.png"}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [inline]}
    request = decode(messages=[{"role": "user", "content": [result, inline, linked]}])
    seen = Image(b"hi", "image/png")
    assert request.messages == (
        Message("tool", (ToolResult("t", (seen,)),)),
        Message("user", (seen, Image(url="https://example.com/cat.png"))),
    )
    paths = ("[0].content[0]", "[1]", "[2]")
    assert asked(request) == [("images", f"messages[0].content{path}") for path in paths]


def test_documents_become_text() -> None:
    (message,) = decode_blocks(
        "user",
        {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "Once."}, "title": "Tale"},
        {"type": "document", "source": {"type": "content", "content": "Twice."}, "context": "told again"},
        {"type": "document", "source": {"type": "content", "content": [text("a"), text("b")]}},
        {"type": "search_result", "source": "https://x", "title": "X", "content": [text("found")]},
    )
    assert [part.text for part in message.parts if isinstance(part, Text)] == [
        "<document>\n<title>Tale</title>\nOnce.\n</document>",
        "<document>\n<context>told again</context>\nTwice.\n</document>",
        "<document>\na\nb\n</document>",
        "<search_result>\n<source>https://x</source>\n<title>X</title>\nfound\n</search_result>",
    ]


@pytest.mark.parametrize(
    ("block", "param"),
    [
        ({"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": ""}}, ".source"),
        ({"type": "document", "source": {"type": "url", "url": "https://x/y.pdf"}}, ".source"),
        ({"type": "document", "source": {"type": "file", "file_id": "f"}}, ".source"),
        ({"type": "image", "source": {"type": "file", "file_id": "f"}}, ".source"),
        ({"type": "container_upload", "file_id": "f"}, ""),
    ],
)
def test_files_are_reported(block: dict[str, Any], param: str) -> None:
    request = decode(messages=[{"role": "user", "content": [block]}])
    assert asked(request) == [("files", f"messages[0].content[0]{param}")]


def test_citations_are_reported() -> None:
    document = {"type": "document", "source": {"type": "text", "data": "x"}, "citations": {"enabled": True}}
    request = decode(messages=[{"role": "user", "content": [document, document | {"citations": {"enabled": False}}]}])
    assert asked(request) == [("citations", "messages[0].content[0].citations")]


def test_server_tool_blocks_become_text() -> None:
    found = {"type": "web_search_result", "title": "X", "url": "https://x", "encrypted_content": "…"}
    (message,) = decode_blocks(
        "assistant",
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "x"}},
        {"type": "web_search_tool_result", "tool_use_id": "s", "content": [found]},
        {"type": "fallback"},
    )
    assert [part.text for part in message.parts if isinstance(part, Text)] == [
        '<server_tool_use>\n<name>web_search</name>\n{"query":"x"}\n</server_tool_use>',
        '<web_search_tool_result>\n[{"type":"web_search_result","title":"X","url":"https://x"}]\n</web_search_tool_result>',
    ]


@pytest.mark.parametrize("signature", [None, "", "c2ln", "EqQBCkYIARgC", SIGNATURE.sign("hm")])
def test_accepted_signatures(signature: str | None) -> None:
    (message,) = decode_blocks("assistant", {"type": "thinking", "thinking": "hm", "signature": signature})
    assert message.parts == (Reasoning("hm", signature or None),)


@pytest.mark.parametrize("signature", [SIGNATURE.sign("other"), "dgm1.", "dgm1.AAAA"])
def test_own_signature_must_match_the_thinking(signature: str) -> None:
    block = {"type": "thinking", "thinking": "hm", "signature": signature}
    turn = {"role": "assistant", "content": [text("x"), block]}
    assert rejected_param(messages=[HI, turn]) == "messages[1].content[1].signature"
