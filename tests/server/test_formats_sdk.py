"""Reasoning and tool calls of every format, through the official SDK."""

import json
import re
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from openai.types.chat import ChatCompletionChunk, ChatCompletionMessage

from dragoman.core.request import Part, Reasoning, Text, ToolCall
from dragoman.formats import FORMATS
from tests.formats.cases import RECORDED, TOOLS, Case
from tests.support.openai_sdk import Asking, sdk
from tests.support.server_process import Running, serving

OFFERED = [
    {
        "type": "function",
        "function": {"name": tool.name, "description": tool.description, "parameters": tool.parameters or {}},
    }
    for tool in TOOLS
]
CASES = [
    case
    for case in RECORDED
    # With channels, a script cannot show that its prompt opened one.
    if case.said.reason == "stop" and not (case.said.thinking and FORMATS[case.format].channels)
]


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """One model per format, which plays the case that the user names."""
    models = {
        name: {
            "engine": "scripted",
            "format": name,
            "chunk": 3,
            "replies": [
                {"match": f"^{re.escape(case.name)}$", "output": case.output} for case in CASES if case.format == name
            ],
        }
        for name in FORMATS
    }
    with serving(tmp_path_factory.mktemp("families"), {"models": models}) as running:
        yield running


@pytest.fixture(scope="module")
def ask(families: Running) -> Iterator[Asking]:
    with sdk(families) as client:
        yield Asking(client, families, "hermes")


def expected(case: Case) -> dict[str, Any]:
    def texts(kind: type[Text] | type[Reasoning]) -> str:
        # Texts separated by a call become one content, with a blank line between them.
        between = "\n\n" if kind is Text else ""
        return between.join(part.text for part in case.said.parts if isinstance(part, kind))

    calls = [part for part in case.said.parts if isinstance(part, ToolCall)]
    return {
        "content": texts(Text) or (None if calls else ""),
        "reasoning": texts(Reasoning) or None,
        "calls": [(call.name, json.loads(call.arguments)) for call in calls],
        "finish": "tool_calls" if calls else "stop",
    }


def told(message: ChatCompletionMessage, finish: str | None) -> dict[str, Any]:
    extra = message.model_extra or {}
    assert extra.get("reasoning") == extra.get("reasoning_content")
    functions = [call.function for call in message.tool_calls or () if call.type == "function"]
    return {
        "content": message.content,
        "reasoning": extra.get("reasoning_content"),
        "calls": [(function.name, json.loads(function.arguments)) for function in functions],
        "finish": finish,
    }


class Assembled(msgspec.Struct):
    """A message put together from the deltas of a stream, like a client that knows only the API."""

    content: str = ""
    reasoning: str = ""
    calls: list[dict[str, str]] = []
    finish: str | None = None

    def add(self, chunk: ChatCompletionChunk) -> None:
        for choice in chunk.choices:
            delta = choice.delta
            self.content += delta.content or ""
            extra = delta.model_extra or {}
            assert extra.get("reasoning") == extra.get("reasoning_content")
            self.reasoning += extra.get("reasoning_content") or ""
            for piece in delta.tool_calls or ():
                assert piece.function is not None
                if piece.id is not None:
                    # The first piece of a call has its id, type and name; they are not repeated.
                    assert (piece.index, piece.type) == (len(self.calls), "function")
                    assert re.fullmatch(r"call_[0-9a-f]{24}", piece.id)
                    assert piece.function.name
                    self.calls.append({"id": piece.id, "name": piece.function.name, "arguments": ""})
                else:
                    assert piece.function.name is None
                    assert piece.index == len(self.calls) - 1
                self.calls[piece.index]["arguments"] += piece.function.arguments or ""
            self.finish = choice.finish_reason or self.finish

    @property
    def told(self) -> dict[str, Any]:
        return {
            "content": self.content or (None if self.calls else ""),
            "reasoning": self.reasoning or None,
            "calls": [(call["name"], json.loads(call["arguments"])) for call in self.calls],
            "finish": self.finish,
        }


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.format}: {case.name}")
def test_format_streamed_and_whole(case: Case, ask: Asking) -> None:
    fields: dict[str, Any] = {"model": case.format, "tools": OFFERED, "max_tokens": 5000}
    reply = ask.chat(case.name, **fields)
    (choice,) = reply.choices
    assert told(choice.message, choice.finish_reason) == expected(case)
    assembled = Assembled()
    chunks = ask.stream(case.name, **fields, stream_options={"include_usage": True})
    for chunk in chunks:
        assembled.add(chunk)
    assert assembled.told == expected(case)
    assert chunks[-1].usage == reply.usage
    check_usage(case.output, case.said.parts, reply.usage)


def check_usage(output: str, parts: tuple[Part, ...], usage: Any) -> None:
    assert usage.completion_tokens == -(-len(output) // 3)
    reasoning = usage.completion_tokens_details.reasoning_tokens
    if any(isinstance(part, Reasoning) for part in parts):
        assert 0 < reasoning < usage.completion_tokens
    else:
        assert reasoning == 0


STREAMING = [
    name
    for name in FORMATS
    # A pythonic call is parsed when it is complete.
    if name not in ("plain", "pythonic")
]


@pytest.mark.parametrize("name", STREAMING)
def test_arguments_stream_as_they_are_generated(name: str, ask: Asking) -> None:
    chunks = ask.stream("escapes", model=name, tools=OFFERED, max_tokens=5000)
    pieces = [
        piece.function.arguments
        for chunk in chunks
        for choice in chunk.choices
        for piece in choice.delta.tool_calls or ()
        if piece.function and piece.function.arguments
    ]
    assert len(pieces) > 10
    assert max(map(len, pieces)) < 20


def test_model_list_names_the_format(ask: Asking) -> None:
    listed = {entry.id: (entry.model_extra or {}).get("format") for entry in ask.client.models.list()}
    assert listed == {name: name for name in FORMATS}
