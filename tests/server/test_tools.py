"""Agents with the official SDK: tools, reasoning, schemas and whole conversations, from a script."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion
from pydantic import BaseModel, Field

from tests.support.requests import recorded
from tests.support.sdk import ModelClient, content, joined, sdk
from tests.support.server_process import Running, server_fixture

PARIS = '<tool_call>\n{"name": "GetWeather", "arguments": {"city": "Paris", "days": 2}}\n</tool_call>'
THOUGHT = "<think>\nThe user wants the weather. I have a tool.\n</think>\n\n"
REPLIES = {
    "^weather$": f"{THOUGHT}I'll look.\n{PARIS}",
    "^malformed$": 'Hm. <tool_call>{"name": GetWeather}</tool_call>',
    "^plan$": '<think>I must answer in JSON.</think>\n{"city": "Paris", "days": 2}',
    "^twice$": f"{THOUGHT}{PARIS}",
    # The agent's script: each line answers the message before it.
    "^How far is it from Paris to Rome in miles": '<think>I need the distance.</think><tool_call>{"name": "distance", '
    '"arguments": {"start": "Paris", "end": "Rome"}}</tool_call>',
    "^1100 km$": '<tool_call>{"name": "miles", "arguments": {"km": 1100}}</tool_call>',
    "^683.5$": "<think>That is it.</think>It is 683.5 miles.",
    "^sunny": "It will be sunny.",
}


class GetWeather(BaseModel):
    """The weather of the next days."""

    city: str
    days: int = Field(ge=1)


class Plan(BaseModel):
    city: str
    days: int


TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "GetWeather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city", "days"],
        },
    },
}
CALLING = {"engine": "tests.support.engines:Calling"}


SCRIPT = [{"match": match, "output": output} for match, output in REPLIES.items()]
AGENT = {"engine": "scripted", "format": "hermes", "chunk": 4, "replies": SCRIPT}
agents = server_fixture({"models": {"agent": AGENT, "calling": CALLING}})


@pytest.fixture(scope="module")
def agent(agents: Running) -> Iterator[ModelClient]:
    with sdk(agents) as client:
        yield ModelClient(client, agents, "agent")


def ask(agent: ModelClient, text: str, /, **fields: Any) -> ChatCompletion:
    return agent.chat(text, **{"tools": [TOOL], "max_tokens": 1000, **fields})


def calls_of(reply: ChatCompletion, choice: int = 0) -> list[tuple[str, Any]]:
    calls = reply.choices[choice].message.tool_calls or []
    return [(call.function.name, json.loads(call.function.arguments)) for call in calls if call.type == "function"]


def reasoning_of(reply: ChatCompletion, choice: int = 0) -> str | None:
    return (reply.choices[choice].message.model_extra or {}).get("reasoning_content")


IN_PARIS = ("GetWeather", {"city": "Paris", "days": 2})
THINKS = "The user wants the weather. I have a tool."


def test_reasoning_text_and_tool_call(agent: ModelClient) -> None:
    reply = ask(agent, "weather")
    assert reasoning_of(reply) == THINKS
    assert content(reply) == "I'll look."
    assert calls_of(reply) == [IN_PARIS]
    assert reply.choices[0].finish_reason == "tool_calls"
    assert reply.usage is not None
    assert reply.usage.completion_tokens_details is not None
    # Forty-two characters in fours, and the opener before them.
    assert reply.usage.completion_tokens_details.reasoning_tokens == 13


def test_engine_that_emits_events(agent: ModelClient) -> None:
    fields = agent.fields("Köln Paris", {"model": "calling", "tools": [TOOL], "max_tokens": 1000})
    reply = agent.client.chat.completions.create(**fields)
    assert (content(reply), reasoning_of(reply)) == ("Let me see.", "I had better ask.")
    assert calls_of(reply) == [("GetWeather", {"city": "Köln"}), ("GetWeather", {"city": "Paris"})]
    assert reply.choices[0].finish_reason == "tool_calls"
    with agent.client.chat.completions.stream(**fields) as stream:
        deltas = [event for event in stream if event.type == "tool_calls.function.arguments.delta"]
        final = stream.get_final_completion()
    assert "".join(delta.arguments_delta for delta in deltas) == '{"city": "Köln"}{"city": "Paris"}'
    assert calls_of(final) == calls_of(reply)
    assert content(final) == content(reply)


def test_sdks_stream_with_pydantic_tools(agent: ModelClient) -> None:
    tool = openai.pydantic_function_tool(GetWeather)
    with agent.client.chat.completions.stream(
        model="agent", messages=[{"role": "user", "content": "weather"}], tools=[tool], max_tokens=1000
    ) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    deltas = [event for event in events if event.type == "tool_calls.function.arguments.delta"]
    assert len(deltas) > 3
    assert "".join(event.arguments_delta for event in deltas) == '{"city": "Paris", "days": 2}'
    (done,) = [event for event in events if event.type == "tool_calls.function.arguments.done"]
    assert (done.name, done.index) == ("GetWeather", 0)
    assert done.parsed_arguments == GetWeather(city="Paris", days=2)
    assert [event.content for event in events if event.type == "content.done"] == ["I'll look."]
    (choice,) = final.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    assert call.function.parsed_arguments == GetWeather(city="Paris", days=2)
    assert (choice.message.model_extra or {})["reasoning_content"] == THINKS


def test_parse_streamed(agent: ModelClient) -> None:
    with agent.client.chat.completions.stream(
        model="agent", messages=[{"role": "user", "content": "plan"}], response_format=Plan
    ) as stream:
        (done,) = [event for event in stream if event.type == "content.done"]
        assert done.parsed == Plan(city="Paris", days=2)
        assert stream.get_final_completion().choices[0].message.parsed == Plan(city="Paris", days=2)


def test_tool_choice_none(agent: ModelClient) -> None:
    reply = ask(agent, "twice", tool_choice="none")
    assert reply.choices[0].message.tool_calls is None
    assert (content(reply), reasoning_of(reply)) == (PARIS, THINKS)
    assert reply.choices[0].finish_reason == "stop"
    assert content(ask(agent, "twice", tools=openai.omit)) == PARIS


def test_tool_choice_auto_required_and_named(agent: ModelClient) -> None:
    for choice in ("auto", "required", {"type": "function", "function": {"name": "GetWeather"}}):
        assert calls_of(ask(agent, "twice", tool_choice=choice)) == [IN_PARIS]
    with pytest.raises(openai.BadRequestError, match="no tool named 'other'"):
        ask(agent, "twice", tool_choice={"type": "function", "function": {"name": "other"}})


def test_second_turn_with_the_sdks_own_message(agent: ModelClient) -> None:
    first = ask(agent, "weather")
    message = first.choices[0].message
    assert message.tool_calls
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny, 25 degrees"}
    second = ask(agent, "", messages=[{"role": "user", "content": "weather"}, message, result])
    assert (content(second), second.choices[0].finish_reason) == ("It will be sunny.", "stop")


def test_reasoning_can_be_disabled(agent: ModelClient) -> None:
    for fields in (
        {"reasoning_effort": "none"},
        {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}},
        {"extra_body": {"thinking_budget": 0}},
    ):
        reply = ask(agent, "weather", **fields)
        assert reasoning_of(reply) is None
        assert (content(reply), calls_of(reply)) == ("I'll look.", [IN_PARIS])
        assert reply.usage is not None
        assert reply.usage.completion_tokens_details is not None
        assert reply.usage.completion_tokens_details.reasoning_tokens == 0


def test_reasoning_budget(agent: ModelClient) -> None:
    reply = ask(agent, "weather", extra_body={"thinking_budget": 3})
    # Three pieces of four characters, the first of which is a line break.
    assert reasoning_of(reply) == "The user wa"
    assert (content(reply), calls_of(reply)) == ("I'll look.", [IN_PARIS])
    assert reasoning_of(ask(agent, "weather", reasoning_effort="high")) == THINKS


def test_malformed_call_is_text_with_a_warning(agent: ModelClient) -> None:
    fields = agent.fields("malformed", {"tools": [TOOL], "max_tokens": 1000})
    raw = agent.client.chat.completions.with_raw_response.create(**fields)
    reply = raw.parse()
    assert raw.status_code == 200
    assert content(reply) == 'Hm. <tool_call>{"name": GetWeather}</tool_call>'
    assert (reply.choices[0].finish_reason, calls_of(reply)) == ("stop", [])
    assert "malformed tool call" in raw.headers["x-dragoman-warning"]
    (record,) = recorded(agent.running, id=reply.id)
    assert record["warnings"] == 1
    assert joined(agent.stream("malformed", tools=[TOOL], max_tokens=1000)) == content(reply)


def distance(start: str, end: str) -> str:
    return {("Paris", "Rome"): "1100 km"}[start, end]


def miles(km: int) -> str:
    return f"{km * 0.62137:.1f}"


def test_agent_loop(agent: ModelClient) -> None:
    functions: dict[str, Any] = {"distance": distance, "miles": miles}
    tools = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in functions]
    messages: list[Any] = [{"role": "user", "content": "How far is it from Paris to Rome in miles?"}]
    for _ in range(5):
        reply = ask(agent, "", messages=messages, tools=tools)
        message = reply.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            assert call.type == "function"
            result = functions[call.function.name](**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    assert content(reply) == "It is 683.5 miles."
    assert reasoning_of(reply) == "That is it."
    assert len(messages) == 6
