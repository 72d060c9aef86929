"""Reasoning and tool calls through the official SDK, from an engine that emits events."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI

from tests.support.openai_sdk import sdk
from tests.support.server_process import serving

WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
ASKING: dict[str, Any] = {"model": "calling", "messages": [{"role": "user", "content": "Köln Paris"}]}
CITIES = [{"city": "Köln"}, {"city": "Paris"}]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAI]:
    config = {"models": {"calling": {"engine": "tests.support.engines:Calling"}}}
    with serving(tmp_path_factory.mktemp("calling"), config) as running, sdk(running) as made:
        yield made


def test_whole_reply(client: OpenAI) -> None:
    tools: Any = [{"type": "function", "function": WEATHER}]
    choice = client.chat.completions.create(**ASKING, tools=tools).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me see."
    assert choice.message.model_dump()["reasoning_content"] == "I had better ask."
    calls = choice.message.tool_calls or []
    assert [(call.id, call.type) for call in calls] == [("call_0", "function"), ("call_1", "function")]
    assert [json.loads(call.function.arguments) for call in calls if call.type == "function"] == CITIES


def test_stream_helper_ends_with_the_same_reply(client: OpenAI) -> None:
    tools: Any = [{"type": "function", "function": WEATHER}]
    whole = client.chat.completions.create(**ASKING, tools=tools).choices[0]
    with client.chat.completions.stream(**ASKING, tools=tools) as stream:
        deltas = [event for event in stream if event.type == "tool_calls.function.arguments.delta"]
        final = stream.get_final_completion().choices[0]
    assert "".join(delta.arguments_delta for delta in deltas) == '{"city": "Köln"}{"city": "Paris"}'
    assert final.finish_reason == whole.finish_reason
    assert final.message.content == whole.message.content
    told = [(call.id, call.function.name, call.function.arguments) for call in final.message.tool_calls or []]
    calls: list[Any] = list(whole.message.tool_calls or [])
    assert told == [(call.id, call.function.name, call.function.arguments) for call in calls]


def test_legacy_functions(client: OpenAI) -> None:
    functions: Any = [WEATHER]
    reply = client.chat.completions.create(**ASKING, functions=functions).choices[0]
    assert reply.finish_reason == "function_call"
    assert reply.message.tool_calls is None
    assert reply.message.function_call is not None
    assert (reply.message.function_call.name, json.loads(reply.message.function_call.arguments)) == (
        "get_weather",
        CITIES[0],
    )
    chunks = list(client.chat.completions.create(**ASKING, functions=functions, stream=True))
    deltas = [chunk.choices[0].delta.function_call for chunk in chunks]
    told = [delta for delta in deltas if delta is not None]
    assert told[0].name == "get_weather"
    assert json.loads("".join(delta.arguments or "" for delta in told)) == CITIES[0]
    assert chunks[-1].choices[0].finish_reason == "function_call"
