"""Anthropic's official SDK: whole replies, streams, tools, thinking and schemas."""

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import anthropic
import httpx
import pytest
from anthropic import Anthropic, beta_tool
from anthropic.types import (
    Message,
    MessageTokensCount,
    ModelInfo,
    RawMessageStreamEvent,
    TextBlock,
    ThinkingBlock,
    ToolUseBlock,
)
from anthropic.types.beta import BetaMessage, BetaModelCapabilities, BetaModelInfo
from pydantic import BaseModel

from dragoman.protocols.messages.blocks import SIGNATURE
from tests.protocols.anthropic_stream import read
from tests.support.requests import recorded
from tests.support.sdk import anthropic_sdk, validated
from tests.support.server_process import Running, server_fixture

THOUGHT = "The user asks for the weather."
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>'
WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "description": "Tells the weather.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
TOOLS: Any = [WEATHER]
ASKING: dict[str, Any] = {
    "model": "hermes",
    "max_tokens": 100,
    "messages": [{"role": "user", "content": "The weather?"}],
}


running = server_fixture(
    {
        "models": {
            "hermes": {
                "engine": "scripted",
                "format": "hermes",
                "replies": [
                    {"match": "sunny", "output": f"<think>{THOUGHT}</think>It is sunny in Köln."},
                    {"match": "weather", "output": f"<think>{THOUGHT}</think>Let me see.\n{CALL}"},
                    {"match": "person", "output": '{"name": "Ada", "age": 36}'},
                    {"output": "Roses are red, violets are blue."},
                ],
            },
            "org/nested": {"engine": "scripted", "context": 2048},
            **{f"m{at}": {"engine": "scripted"} for at in range(23)},
        },
        "aliases": {"claude-*": "hermes"},
    }
)


@pytest.fixture(scope="module")
def client(running: Running) -> Iterator[Anthropic]:
    with anthropic_sdk(running) as made:
        yield made


def poem(**fields: Any) -> dict[str, Any]:
    return ASKING | {"messages": [{"role": "user", "content": "A poem"}]} | fields


def test_text(client: Anthropic, running: Running) -> None:
    message = client.messages.create(**poem(model="claude-anything"))
    assert [block.model_dump(exclude_none=True) for block in message.content] == [
        {"type": "text", "text": "Roses are red, violets are blue."}
    ]
    assert (message.stop_reason, message.stop_sequence, message.model) == ("end_turn", None, "hermes")
    assert message.id.startswith("msg_")
    assert message._request_id == message.id
    assert (message.usage.input_tokens, message.usage.output_tokens) == (2, 8)
    (record,) = recorded(running, id=message.id)
    assert record["status"] == 200
    with client.messages.stream(**poem()) as stream:
        assert "".join(stream.text_stream) == "Roses are red, violets are blue."
        final = stream.get_final_message()
    assert final.model_dump(exclude={"id"}) == message.model_dump(exclude={"id"})


def test_stops_and_limits(client: Anthropic) -> None:
    stopped = client.messages.create(**poem(stop_sequences=["violets", "never"]))
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "violets")
    assert stopped.content == [TextBlock(type="text", text="Roses are red, ")]
    cut = client.messages.create(**poem(max_tokens=2))
    assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 2)
    nothing = client.messages.create(**poem(max_tokens=0))
    assert (nothing.stop_reason, nothing.content) == ("max_tokens", [])


def test_thinking_text_and_tool_calls(client: Anthropic) -> None:
    thinking: Any = {"type": "enabled", "budget_tokens": 1024}
    message = client.messages.create(**ASKING, tools=TOOLS, thinking=thinking)
    thought, text, call = message.content
    assert thought == ThinkingBlock(type="thinking", thinking=THOUGHT, signature=SIGNATURE.sign(THOUGHT))
    assert isinstance(text, TextBlock)
    assert text.text.strip() == "Let me see."
    assert isinstance(call, ToolUseBlock)
    assert (call.name, call.input, message.stop_reason) == ("get_weather", {"city": "Köln"}, "tool_use")
    assert message.usage.output_tokens_details is not None
    assert message.usage.output_tokens_details.thinking_tokens > 0


def test_stream_helper_returns_same_message(client: Anthropic) -> None:
    whole = client.messages.create(**ASKING, tools=TOOLS)
    with client.messages.stream(**ASKING, tools=TOOLS) as stream:
        events = list(stream)
        final = stream.get_final_message()
    named = [event.type for event in events]
    assert named.count("content_block_stop") == 3
    assert "".join(event.thinking for event in events if event.type == "thinking") == THOUGHT
    assert [event.signature for event in events if event.type == "signature"] == [SIGNATURE.sign(THOUGHT)]
    pieces = [event.partial_json for event in events if event.type == "input_json"]
    assert len(pieces) > 1
    ids: Any = {"id": True, "content": {-1: {"id"}}}
    assert final.model_dump(exclude=ids) == whole.model_dump(exclude=ids)


def test_thinking_can_be_disabled_and_replayed(client: Anthropic) -> None:
    disabled = client.messages.create(**ASKING, thinking={"type": "disabled"})
    assert disabled.content[0].type == "text"
    first = client.messages.create(**ASKING, tools=TOOLS)
    call = first.content[-1]
    assert isinstance(call, ToolUseBlock)
    results: Any = [{"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}]
    turns: Any = [
        *ASKING["messages"],
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": results},
    ]
    second = client.messages.create(**ASKING | {"messages": turns}, tools=TOOLS)
    assert second.content[-1] == TextBlock(type="text", text="It is sunny in Köln.")


class Person(BaseModel):
    name: str
    age: int


def test_parsed_output(client: Anthropic) -> None:
    asking = ASKING | {"messages": [{"role": "user", "content": "A person"}]}
    assert client.messages.parse(**asking, output_format=Person).parsed_output == Person(name="Ada", age=36)
    assert client.beta.messages.parse(**asking, output_format=Person).parsed_output == Person(name="Ada", age=36)
    with client.messages.stream(**asking, output_format=Person) as stream:
        assert stream.get_final_message().parsed_output == Person(name="Ada", age=36)


@pytest.mark.parametrize("stream", [False, True])
def test_tool_runner_runs_tools(client: Anthropic, running: Running, stream: bool) -> None:
    """The SDK tries a thread, gets an error, and sends the whole conversation from then on."""
    asked: list[str] = []

    @beta_tool
    def get_weather(city: str) -> str:
        """Tells the weather.

        Args:
            city: the name of the city
        """
        asked.append(city)
        return "sunny"

    runner: Any = client.beta.messages.tool_runner(**ASKING, tools=[get_weather], stream=stream)
    final = runner.until_done()
    assert asked == ["Köln"]
    assert final.content[-1].text == "It is sunny in Köln."
    assert recorded(running, error="thread_unsupported_request", status=400)


def test_models(client: Anthropic) -> None:
    names = [model.id for model in client.models.list(limit=7)]
    assert names == ["hermes", "org/nested", *(f"m{at}" for at in range(23))]
    before = client.models.list(before_id="m2", limit=3)
    assert ([model.id for model in before.data], before.has_more) == (["org/nested", "m0", "m1"], True)
    assert len(client.models.list().data) == 20
    assert [model.id for model in client.beta.models.list(limit=1000)] == names
    client.messages.create(**poem(model="org/nested"))
    model = client.models.retrieve("org/nested")
    assert (model.id, model.display_name, model.max_input_tokens, model.max_tokens) == (
        *("org/nested", "org/nested"),
        *(2048, 2048),
    )
    assert (datetime.now(UTC) - model.created_at).total_seconds() < 300
    assert client.models.retrieve("claude-opus").id == "hermes"


def test_pages_of_models(client: Anthropic) -> None:
    names = [model.id for model in client.models.list(limit=1000)]
    first = client.models.list(limit=10)
    assert (first.first_id, first.last_id, first.has_more) == (names[0], names[9], True)
    second = client.models.list(limit=10, after_id=str(first.last_id))
    assert [model.id for model in second.data] == names[10:20]
    assert [model.id for model in client.models.list(limit=10, before_id=str(second.first_id)).data] == names[:10]
    last = client.models.list(limit=10, after_id=names[-1])
    assert (last.data, last.has_more, last.first_id, last.last_id) == ([], False, None, None)
    backwards = [model.id for model in client.models.list(limit=4, before_id=names[-1])]
    assert sorted(backwards) == sorted(names[:-1])
    for wrong in ({"limit": 0}, {"limit": 1001}, {"after_id": "missing"}, {"before_id": "missing"}):
        with pytest.raises(anthropic.BadRequestError):
            client.models.list(**wrong)


def test_lifecycle_filters_models(client: Anthropic) -> None:
    assert client.models.list(lifecycle=["active", "retired"]).data
    assert client.models.list(lifecycle=["deprecated", "retired"]).data == []


def test_capabilities_of_models(client: Anthropic, running: Running) -> None:
    client.messages.create(**poem())
    found = client.models.retrieve("hermes")
    assert (found.type, found.lifecycle) == ("model", "active")
    assert (found.deprecated_at, found.line, found.retires_at) == (None, None, None)
    capabilities = found.capabilities
    assert capabilities is not None
    assert capabilities.structured_outputs.supported
    assert capabilities.thinking.types.enabled.supported
    assert capabilities.batch.supported
    assert capabilities.image_input.supported
    assert capabilities.context_management.supported
    assert not capabilities.pdf_input.supported
    assert not capabilities.server_tools.web_search.supported
    with httpx.Client(base_url=running.url, trust_env=False, headers={"anthropic-version": "2026-10-21"}) as http:
        for entry in (http.get("/v1/models/hermes").json(), http.get("/v1/models").json()["data"][0]):
            found_beta = BetaModelInfo.model_validate(entry, strict=False)
            assert set(entry) == set(ModelInfo.model_fields)
            assert set(entry["capabilities"]) == set(BetaModelCapabilities.model_fields)
            assert found_beta.capabilities is not None
            assert found_beta.capabilities.compaction is not None
            assert found_beta.capabilities.compaction.summarize.supported


def test_bodies_match_sdk_types(running: Running) -> None:
    with httpx.Client(
        base_url=running.url, trust_env=False, timeout=60, headers={"anthropic-version": "2026-10-21"}
    ) as http:
        asking = ASKING | {"tools": TOOLS}
        whole = http.post("/v1/messages", json=asking).content
        assert len(validated(Message, whole).content) == 3
        assert len(validated(BetaMessage, whole).content) == 3
        validated(MessageTokensCount, http.post("/v1/messages/count_tokens", json=asking).content)
        validated(BetaModelInfo, http.get("/v1/models/hermes").content)
        streamed = http.post("/v1/messages", json=asking | {"stream": True}).content
    payloads = [payload for payload in read(streamed) if payload["type"] != "ping"]
    lines = [line for line in streamed.splitlines() if line.startswith(b"data: ") and b'"ping"' not in line]
    assert len(lines) == len(payloads)
    for line in lines:
        validated(RawMessageStreamEvent, line.removeprefix(b"data: "))
