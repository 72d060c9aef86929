"""Tools of MCP servers in messages, through the official SDK."""

from collections.abc import Iterator
from typing import Any

import pytest
from anthropic import Anthropic
from anthropic.types.beta import BetaMessage, BetaRawMessageStreamEvent
from pydantic import TypeAdapter

from tests.server.mcp_fixtures import McpTest, mcp
from tests.support.requests import talking
from tests.support.sdk import anthropic_sdk

__all__ = ["mcp"]
BETA: TypeAdapter[Any] = TypeAdapter(BetaRawMessageStreamEvent)
MESSAGES = "/v1/messages"


@pytest.fixture(scope="module")
def claude(mcp: McpTest) -> Iterator[Anthropic]:
    with anthropic_sdk(mcp.running) as made:
        yield made


TOOLSET: dict[str, Any] = {"type": "mcp_toolset", "mcp_server_name": "calc"}


def say(claude: Anthropic, said: Any, **fields: Any) -> Any:
    messages = [{"role": "user", "content": said}] if isinstance(said, str) else said
    asked = {"model": "m", "max_tokens": 200, "messages": messages, "tools": [TOOLSET], **fields}
    raw = claude.beta.messages.with_raw_response.create(**asked, betas=["mcp-client-2025-11-20"])
    return BetaMessage.model_validate_json(raw.read(), strict=True)


def test_message_calls_a_tool(claude: Anthropic) -> None:
    message = say(claude, "add")
    assert [block.type for block in message.content] == ["thinking", "text", "mcp_tool_use", "mcp_tool_result", "text"]
    _, _, use, result, said = message.content
    assert (use.name, use.server_name, use.input) == ("add", "calc", {"a": 1, "b": 2})
    assert (result.tool_use_id, result.is_error) == (use.id, False)
    assert result.content[0].text == "3"
    assert said.text == "The sum is 3."
    assert message.stop_reason == "end_turn"
    failed = say(claude, "fail").content[1]
    assert failed.is_error is True


def test_message_continues_with_its_own_blocks(claude: Anthropic) -> None:
    first = say(claude, "add")
    blocks = [block.model_dump(exclude_none=True) for block in first.content]
    history = [{"role": "user", "content": "add"}, {"role": "assistant", "content": blocks}]
    message = say(claude, [*history, {"role": "user", "content": "fail"}])
    assert [block.type for block in message.content] == ["mcp_tool_use", "mcp_tool_result", "text"]


def test_streamed_message(claude: Anthropic, mcp: McpTest) -> None:
    asked: dict[str, Any] = {
        "model": "m",
        "max_tokens": 200,
        "messages": [{"role": "user", "content": "add"}],
        "tools": [TOOLSET],
    }
    with talking(mcp.running) as http:
        body = http.post(MESSAGES, json=asked | {"stream": True}).text
    data = [block.partition("data: ")[2] for block in body.split("\n\n") if block and not block.startswith(":")]
    events = [BETA.validate_json(one, strict=True) for one in data if '"ping"' not in one]
    starts = [event for event in events if event.type == "content_block_start"]
    assert [event.index for event in starts] == list(range(len(starts)))
    with claude.beta.messages.stream(**asked) as streamed:
        final: Any = streamed.get_final_message()
    whole = say(claude, "add")
    assert [block.type for block in final.content] == [block.type for block in whole.content]
    use, result = final.content[2:4]
    assert (use.input, result.tool_use_id) == ({"a": 1, "b": 2}, use.id)
    assert final.usage.output_tokens == whole.usage.output_tokens


def test_tool_use_of_the_client_ends_the_message(claude: Anthropic) -> None:
    look = {"name": "look", "input_schema": {"type": "object"}}
    message = say(claude, "add and look", tools=[TOOLSET, look])
    assert [block.type for block in message.content] == ["mcp_tool_use", "tool_use", "mcp_tool_result"]
    assert message.stop_reason == "tool_use"
    blocks = [block.model_dump(exclude_none=True) for block in message.content]
    result = {"type": "tool_result", "tool_use_id": message.content[1].id, "content": "blue"}
    history = [{"role": "user", "content": "add and look"}, {"role": "assistant", "content": blocks}]
    assert (
        say(claude, [*history, {"role": "user", "content": [result]}], tools=[TOOLSET, look]).content[0].text == "blue"
    )


def test_tools_of_a_toolset(claude: Anthropic, mcp: McpTest) -> None:
    def offered(**fields: Any) -> bool:
        return "mcp_tool_use" in [block.type for block in say(claude, "add", **fields).content]

    assert offered(tools=[TOOLSET | {"default_config": {"enabled": False}, "configs": {"add": {"enabled": True}}}])
    assert not offered(tools=[TOOLSET | {"configs": {"add": {"enabled": False}}}])
    pinned = [{"name": "add", "description": "", "input_schema": {"type": "object"}}]
    assert offered(tools=[TOOLSET | {"tools": pinned}])
    assert not offered(tools=[TOOLSET | {"tools": []}])
    server = {"type": "url", "name": "calc", "url": mcp.url, "authorization_token": "abc"}
    assert offered(mcp_servers=[server])
    # The older form has no toolset.
    assert offered(mcp_servers=[server], tools=[])
    assert not offered(mcp_servers=[server | {"tool_configuration": {"allowed_tools": ["fail"]}}], tools=[])
    assert not offered(mcp_servers=[server | {"tool_configuration": {"enabled": False}}], tools=[])
    with talking(mcp.running) as http:
        asked: dict[str, Any] = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "add"}]}
        deferred = http.post(MESSAGES, json=asked | {"tools": [TOOLSET | {"default_config": {"defer_loading": True}}]})
        assert deferred.headers["x-dragoman-ignored"] == "tools[0].default_config.defer_loading"
        for fields, message in (
            ({"tools": [TOOLSET, TOOLSET]}, "tools[1].mcp_server_name"),
            ({"mcp_servers": [{"type": "stdio", "name": "x"}]}, "mcp_servers[0].type"),
            ({"mcp_servers": [server, server]}, "mcp_servers[1].name"),
            ({"mcp_servers": [server | {"url": None}]}, "mcp_servers[0].authorization_token: only with url"),
            ({"mcp_servers": [server | {"url": "http://10.0.0.1/"}]}, "mcp_servers[0]: this server does not connect"),
        ):
            answer = http.post(MESSAGES, json=asked | fields)
            assert answer.status_code == 400
            assert answer.json()["error"]["message"].startswith(message), answer.text
