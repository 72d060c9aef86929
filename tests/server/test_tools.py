"""Agents with the official SDK: tools, reasoning, schemas and whole conversations, from a script."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion
from pydantic import BaseModel, Field

from tests.support.openai_sdk import Asking, content, joined, sdk
from tests.support.requests import recorded
from tests.support.server_process import Running, serving

PARIS = '<tool_call>\n{"name": "GetWeather", "arguments": {"city": "Paris", "days": 2}}\n</tool_call>'
ROME = '<tool_call>\n{"name": "GetWeather", "arguments": {"city": "Rome", "days": 1}}\n</tool_call>'
THOUGHT = "<think>\nThe user wants the weather. I have a tool.\n</think>\n\n"
REPLIES = {
    "^weather$": f"{THOUGHT}I'll look.\n{PARIS}",
    "^both$": f"{PARIS}\n{ROME}",
    "^nothing$": "Nothing to look up.",
    "^malformed$": 'Hm. <tool_call>{"name": GetWeather}</tool_call>',
    "^plan$": '<think>I must answer in JSON.</think>\n{"city": "Paris", "days": 2}',
    "^stop$": f"<think>STOP here</think>One. STOP. Two.{PARIS}",
    "^call and stop$": f"One.{PARIS}",
    "^twice$": f"{THOUGHT}{PARIS}",
    # The agent's script: each line answers the message before it.
    "^How far is it from Paris to Rome in miles": '<think>I need the distance.</think><tool_call>{"name": "distance", '
    '"arguments": {"start": "Paris", "end": "Rome"}}</tool_call>',
    "^1100 km$": '<tool_call>{"name": "miles", "arguments": {"km": 1100}}</tool_call>',
    "^683.5$": "<think>That is it.</think>It is 683.5 miles.",
    "^no such city": "There is no such city.",
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


@pytest.fixture(scope="module")
def agents(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    replies = [{"match": match, "output": output} for match, output in REPLIES.items()]
    model = {"engine": "scripted", "format": "hermes", "chunk": 4, "replies": replies}
    with serving(tmp_path_factory.mktemp("agents"), {"models": {"agent": model}}) as running:
        yield running


@pytest.fixture(scope="module")
def agent(agents: Running) -> Iterator[Asking]:
    with sdk(agents) as client:
        yield Asking(client, agents, "agent")


def ask(agent: Asking, text: str, /, **fields: Any) -> ChatCompletion:
    return agent.chat(text, **{"tools": [TOOL], "max_tokens": 1000, **fields})


def calls_of(reply: ChatCompletion, choice: int = 0) -> list[tuple[str, Any]]:
    calls = reply.choices[choice].message.tool_calls or []
    return [(call.function.name, json.loads(call.function.arguments)) for call in calls if call.type == "function"]


def reasoning_of(reply: ChatCompletion, choice: int = 0) -> str | None:
    return (reply.choices[choice].message.model_extra or {}).get("reasoning_content")


IN_PARIS = ("GetWeather", {"city": "Paris", "days": 2})
IN_ROME = ("GetWeather", {"city": "Rome", "days": 1})
THINKS = "The user wants the weather. I have a tool."


def test_reasoning_text_and_tool_call(agent: Asking) -> None:
    reply = ask(agent, "weather")
    assert reasoning_of(reply) == THINKS
    assert content(reply) == "I'll look."
    assert calls_of(reply) == [IN_PARIS]
    assert reply.choices[0].finish_reason == "tool_calls"
    assert reply.usage is not None
    assert reply.usage.completion_tokens_details is not None
    # Forty-two characters in fours, and the opener before them.
    assert reply.usage.completion_tokens_details.reasoning_tokens == 13


def test_reply_without_tool_call(agent: Asking) -> None:
    reply = ask(agent, "nothing")
    assert (content(reply), reply.choices[0].message.tool_calls) == ("Nothing to look up.", None)
    assert reply.choices[0].finish_reason == "stop"


def test_sdks_stream_with_pydantic_tools(agent: Asking) -> None:
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


def test_sdks_stream_with_two_calls(agent: Asking) -> None:
    tool = openai.pydantic_function_tool(GetWeather)
    with agent.client.chat.completions.stream(
        model="agent", messages=[{"role": "user", "content": "both"}], tools=[tool]
    ) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
    assert [(event.index, event.parsed_arguments) for event in done] == [
        (0, GetWeather(city="Paris", days=2)),
        (1, GetWeather(city="Rome", days=1)),
    ]


def test_parse_with_a_pydantic_model(agent: Asking) -> None:
    completion = agent.client.chat.completions.parse(
        model="agent", messages=[{"role": "user", "content": "plan"}], response_format=Plan
    )
    message = completion.choices[0].message
    assert message.parsed == Plan(city="Paris", days=2)
    assert (message.model_extra or {})["reasoning_content"] == "I must answer in JSON."


def test_parse_with_tools_and_a_model_together(agent: Asking) -> None:
    completion = agent.client.chat.completions.parse(
        model="agent",
        messages=[{"role": "user", "content": "twice"}],
        tools=[openai.pydantic_function_tool(GetWeather)],
        response_format=Plan,
    )
    message = completion.choices[0].message
    assert message.parsed is None
    assert message.tool_calls is not None
    assert message.tool_calls[0].function.parsed_arguments == GetWeather(city="Paris", days=2)


def test_parse_streamed(agent: Asking) -> None:
    with agent.client.chat.completions.stream(
        model="agent", messages=[{"role": "user", "content": "plan"}], response_format=Plan
    ) as stream:
        (done,) = [event for event in stream if event.type == "content.done"]
        assert done.parsed == Plan(city="Paris", days=2)
        assert stream.get_final_completion().choices[0].message.parsed == Plan(city="Paris", days=2)


def test_legacy_functions(agent: Asking) -> None:
    functions = {"tools": openai.omit, "functions": [TOOL["function"]], "function_call": "auto"}
    reply = ask(agent, "both", **functions)
    (choice,) = reply.choices
    assert choice.finish_reason == "function_call"
    assert choice.message.tool_calls is None
    assert choice.message.function_call is not None
    assert choice.message.function_call.name == "GetWeather"
    assert json.loads(choice.message.function_call.arguments) == IN_PARIS[1]
    chunks = agent.stream("both", **functions, max_tokens=1000)
    pieces = [entry.delta.function_call for chunk in chunks for entry in chunk.choices if entry.delta.function_call]
    assert [piece.name for piece in pieces if piece.name] == ["GetWeather"]
    assert json.loads("".join(piece.arguments or "" for piece in pieces)) == IN_PARIS[1]
    assert chunks[-1].choices[0].finish_reason == "function_call"


def test_legacy_function_result(agent: Asking) -> None:
    messages = [
        {"role": "user", "content": "weather"},
        {"role": "assistant", "content": None, "function_call": {"name": "GetWeather", "arguments": "{}"}},
        {"role": "function", "name": "GetWeather", "content": "sunny"},
    ]
    assert content(ask(agent, "", messages=messages)) == "It will be sunny."


def test_one_call_at_a_time(agent: Asking) -> None:
    assert calls_of(ask(agent, "both")) == [IN_PARIS, IN_ROME]
    reply = ask(agent, "both", parallel_tool_calls=False)
    assert calls_of(reply) == [IN_PARIS]
    assert reply.choices[0].finish_reason == "tool_calls"
    chunks = agent.stream("both", tools=[TOOL], parallel_tool_calls=False, max_tokens=1000)
    indexes = {call.index for chunk in chunks for entry in chunk.choices for call in entry.delta.tool_calls or ()}
    assert indexes == {0}
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_tool_choice_none(agent: Asking) -> None:
    reply = ask(agent, "twice", tool_choice="none")
    assert reply.choices[0].message.tool_calls is None
    assert (content(reply), reasoning_of(reply)) == (PARIS, THINKS)
    assert reply.choices[0].finish_reason == "stop"
    assert content(ask(agent, "twice", tools=openai.omit)) == PARIS


def test_tool_choice_auto_required_and_named(agent: Asking) -> None:
    for choice in ("auto", "required", {"type": "function", "function": {"name": "GetWeather"}}):
        assert calls_of(ask(agent, "twice", tool_choice=choice)) == [IN_PARIS]
    with pytest.raises(openai.BadRequestError, match="no tool named 'other'"):
        ask(agent, "twice", tool_choice={"type": "function", "function": {"name": "other"}})


RESULTS = [
    {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    {
        "role": "tool",
        "tool_call_id": "call_1",
        "content": [{"type": "text", "text": "sun"}, {"type": "text", "text": "ny"}],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "sunny", "is_error": False, "name": "GetWeather"},
    {"role": "tool", "tool_call_id": "another", "content": "sunny"},
]


@pytest.mark.parametrize("result", RESULTS)
def test_results_of_every_shape(agent: Asking, result: dict[str, Any]) -> None:
    messages = [{"role": "user", "content": "weather"}, called("weather"), result]
    assert content(ask(agent, "", messages=messages)) == "It will be sunny."


def test_results_that_are_errors(agent: Asking) -> None:
    failure = {"role": "tool", "tool_call_id": "call_1", "content": "no such city: Atlantis", "is_error": True}
    reply = ask(agent, "", messages=[{"role": "user", "content": "weather"}, called("weather"), failure])
    assert content(reply) == "There is no such city."


def called(thought: str, arguments: Any = '{"city": "Paris", "days": 2}') -> dict[str, Any]:
    """An assistant message with a tool call, for the history."""
    call = {"id": "call_1", "type": "function", "function": {"name": "GetWeather", "arguments": arguments}}
    return {"role": "assistant", "content": None, "reasoning_content": thought, "tool_calls": [call]}


def test_second_turn_with_the_sdks_own_message(agent: Asking) -> None:
    first = ask(agent, "weather")
    message = first.choices[0].message
    assert message.tool_calls
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny, 25 degrees"}
    second = ask(agent, "", messages=[{"role": "user", "content": "weather"}, message, result])
    assert (content(second), second.choices[0].finish_reason) == ("It will be sunny.", "stop")


def test_several_choices_with_calls(agent: Asking) -> None:
    reply = ask(agent, "both", n=2)
    assert [calls_of(reply, at) for at in range(2)] == [[IN_PARIS, IN_ROME]] * 2
    ids = [call.id for choice in reply.choices for call in choice.message.tool_calls or ()]
    assert len(set(ids)) == 4
    chunks = agent.stream("both", tools=[TOOL], n=2, max_tokens=1000)
    for at in range(2):
        entries = [entry for chunk in chunks for entry in chunk.choices if entry.index == at]
        pieces = [call for entry in entries for call in entry.delta.tool_calls or ()]
        for index, expected in enumerate((IN_PARIS, IN_ROME)):
            texts = [piece.function.arguments or "" for piece in pieces if piece.index == index and piece.function]
            assert json.loads("".join(texts)) == expected[1]
        assert entries[-1].finish_reason == "tool_calls"


def test_stop_string_ends_the_text_and_nothing_else(agent: Asking) -> None:
    reply = ask(agent, "stop", stop="STOP")
    assert (reasoning_of(reply), content(reply)) == ("STOP here", "One. ")
    assert (reply.choices[0].finish_reason, calls_of(reply)) == ("stop", [])
    assert joined(agent.stream("stop", tools=[TOOL], stop="STOP", max_tokens=1000)) == "One. "
    assert calls_of(ask(agent, "call and stop", stop=["Paris", "</tool_call>"])) == [IN_PARIS]


def test_reasoning_can_be_disabled(agent: Asking) -> None:
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


def test_reasoning_budget(agent: Asking) -> None:
    reply = ask(agent, "weather", extra_body={"thinking_budget": 3})
    # Three pieces of four characters, the first of which is a line break.
    assert reasoning_of(reply) == "The user wa"
    assert (content(reply), calls_of(reply)) == ("I'll look.", [IN_PARIS])
    assert reasoning_of(ask(agent, "weather", reasoning_effort="high")) == THINKS


def test_malformed_call_is_text_with_a_warning(agent: Asking) -> None:
    fields = agent._fields("malformed", {"tools": [TOOL], "max_tokens": 1000})
    raw = agent.client.chat.completions.with_raw_response.create(**fields)
    reply = raw.parse()
    assert raw.status_code == 200
    assert content(reply) == 'Hm. <tool_call>{"name": GetWeather}</tool_call>'
    assert (reply.choices[0].finish_reason, calls_of(reply)) == ("stop", [])
    assert "malformed tool call" in raw.headers["x-dragoman-warning"]
    (record,) = recorded(agent.running, id=reply.id)
    assert record["warnings"] == 1
    assert joined(agent.stream("malformed", tools=[TOOL], max_tokens=1000)) == content(reply)


def test_valid_reply_has_no_warnings(agent: Asking) -> None:
    raw = agent.client.chat.completions.with_raw_response.create(**agent._fields("weather", {"tools": [TOOL]}))
    assert "x-dragoman-warning" not in raw.headers


def test_truncated_arguments_finish_with_length(agent: Asking) -> None:
    reply = ask(agent, "both", max_tokens=16)
    assert reply.choices[0].finish_reason == "length"
    calls = [call.function for call in reply.choices[0].message.tool_calls or () if call.type == "function"]
    assert [call.name for call in calls] == ["GetWeather"]
    assert '{"city": "Paris", "days": 2}'.startswith(calls[0].arguments)
    with pytest.raises(json.JSONDecodeError):
        json.loads(calls[0].arguments)


def distance(start: str, end: str) -> str:
    return {("Paris", "Rome"): "1100 km"}[start, end]


def miles(km: int) -> str:
    return f"{km * 0.62137:.1f}"


def test_agent_loop(agent: Asking) -> None:
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
