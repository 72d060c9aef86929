"""Every protocol in front of every protocol, with the official SDKs and other servers behind."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from anthropic import Anthropic
from bench.servers import run_server
from openai import APIStatusError, OpenAI
from tools.ports import free_port

from tests.support.sdk import anthropic_sdk, sdk
from tests.support.server_process import Running, Serving, server_fixture

BEHIND = ["chat", "messages", "responses", "auto"]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
COLD = {"temperature": 0}
THOUGHT = "They want the weather."
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>'


REPLIES = [
    {"match": "^sunny", "output": "<think>Good.</think>It is sunny."},
    {"match": "weather", "output": f"<think>{THOUGHT}</think>Let me see.{CALL}"},
    {"output": "Hello, world."},
]
MODELS = {
    "agent": {"engine": "scripted", "format": "hermes", "replies": REPLIES},
    "short": {"engine": "scripted", "context": 20},
}
behind = server_fixture({"models": MODELS, "api_keys": ["behind"]})


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory, behind: Running, serving: Serving) -> Iterator[Running]:
    place = {"engine": "upstream", "url": behind.url, "key_env": "BEHIND_KEY"}
    models = {name: {**place, "protocol": name, "model": "agent"} for name in BEHIND}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BEHIND_KEY", "behind")
        config = {"models": {**models, "all": {**place, "models": "all"}}}
        with serving(tmp_path_factory.mktemp("front"), config) as running:
            yield running


@pytest.fixture(scope="module")
def openai(front: Running) -> Iterator[OpenAI]:
    with sdk(front) as client:
        yield client


@pytest.fixture(scope="module")
def anthropic(front: Running) -> Iterator[Anthropic]:
    with anthropic_sdk(front) as client:
        yield client


@pytest.mark.parametrize("protocol", BEHIND)
def test_chat_with_tools_and_reasoning(openai: OpenAI, protocol: str) -> None:
    tool: Any = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
    with openai.chat.completions.stream(model=protocol, messages=messages, tools=[tool]) as stream:
        first = stream.get_final_completion().choices[0]
    assert first.finish_reason == "tool_calls"
    assert first.message.content == "Let me see."
    assert first.message.tool_calls is not None
    (call,) = first.message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    assert getattr(first.message, "reasoning_content", None) == THOUGHT
    messages += [
        {"role": "assistant", "content": first.message.content, "tool_calls": [call.model_dump(exclude_none=True)]},
        {"role": "tool", "tool_call_id": call.id, "content": "sunny"},
    ]
    second = openai.chat.completions.create(model=protocol, messages=messages, tools=[tool])
    assert second.choices[0].message.content == "It is sunny."
    assert second.usage is not None
    assert second.usage.completion_tokens > 0
    assert second.usage.prompt_tokens > 0


@pytest.mark.parametrize("protocol", BEHIND)
def test_messages_with_tools_and_reasoning(anthropic: Anthropic, protocol: str) -> None:
    tools: list[Any] = [{"name": "weather", "input_schema": SCHEMA}]
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
    with anthropic.messages.stream(model=protocol, max_tokens=200, messages=messages, tools=tools) as stream:
        first = stream.get_final_message()
    assert first.stop_reason == "tool_use"
    content: Any = first.content
    thought, text, call = content
    assert (thought.type, text.type, call.type) == ("thinking", "text", "tool_use")
    assert thought.thinking == THOUGHT
    assert call.input == {"city": "Paris"}
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
    messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    second = anthropic.messages.create(model=protocol, max_tokens=200, messages=messages, tools=tools)
    assert second.content[-1].type == "text"
    assert second.content[-1].text == "It is sunny."
    assert second.usage.output_tokens > 0
    assert anthropic.messages.count_tokens(model=protocol, messages=messages).input_tokens > 0


def test_all_upstream_models_under_a_prefix(front: Running, openai: OpenAI) -> None:
    assert {"all/agent", "all/short"} <= {model.id for model in openai.models.list()}
    reply = openai.chat.completions.create(model="all/agent", messages=[{"role": "user", "content": "hi"}])
    assert (reply.model, reply.choices[0].message.content) == ("all/agent", "Hello, world.")
    with pytest.raises(APIStatusError) as caught:
        openai.chat.completions.create(model="all/nothing", messages=[{"role": "user", "content": "hi"}])
    assert caught.value.status_code == 404
    assert "HTTP Request" not in front.log.read_text()


@pytest.fixture(scope="module")
def real(
    tmp_path_factory: pytest.TempPathFactory, smollm2: Running, smollm2_path: Path, serving: Serving
) -> Iterator[Running]:
    """SmolLM2 behind two servers: another Dragoman, and llama.cpp's own server."""
    port, upstream = free_port(), {"engine": "upstream"}
    command = [sys.executable, "-m", "bench.llamacpp", str(port), str(smollm2_path), "1", "1024", "2"]
    with run_server(command, f"http://127.0.0.1:{port}/health"):
        models = {
            "ours": upstream | {"url": smollm2.url, "model": "smollm2", "protocol": "messages"},
            "theirs": upstream | {"url": f"http://127.0.0.1:{port}", "model": "any", "protocol": "chat"},
        }
        with serving(tmp_path_factory.mktemp("real"), {"models": models}) as running:
            yield running


@pytest.mark.parametrize("model", ["ours", "theirs"])
def test_real_models(real: Running, model: str) -> None:
    messages: Any = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
    with anthropic_sdk(real) as anthropic:
        told = anthropic.messages.create(model=model, max_tokens=20, extra_body=COLD, messages=messages)
        assert told.content[0].type == "text"
        assert "Paris" in told.content[0].text
        # Another test may have sent the same prompt to the same server.
        assert told.usage.input_tokens + (told.usage.cache_read_input_tokens or 0) > 10
        assert 0 < told.usage.output_tokens <= 20
    with sdk(real) as openai:
        response = openai.responses.create(model=model, max_output_tokens=20, temperature=0, input=messages)
        assert response.output_text == told.content[0].text
        shape: Any = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA, "strict": True}}
        shaped = openai.chat.completions.create(
            model=model, max_tokens=40, temperature=0, messages=messages, response_format=shape
        )
        assert isinstance(json.loads(shaped.choices[0].message.content or "")["city"], str)
