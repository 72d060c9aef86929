"""Replies of the scripted engine that have parts, conditions or errors."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.core.errors import ContextTooLong, DragomanError, QueueFull, RateLimited
from dragoman.core.events import ReasoningDelta, TextDelta, ToolCallDelta, ToolCallStart
from dragoman.core.reply import Choice
from dragoman.core.request import (
    GenerationRequest,
    Image,
    Message,
    Part,
    Reasoning,
    Text,
    Thinking,
    Tool,
    ToolCall,
    ToolChoice,
    ToolResult,
)
from dragoman.engines.scripted import ScriptedEngine, ScriptedOptions
from dragoman.engines.scripted_replies import BY_CODE, BY_STATUS, ScriptedError, conversation_digest, split_tokens
from tests.support.generation import whole

pytestmark = pytest.mark.anyio

TOOLS = (Tool("get_weather"), Tool("get_time"))
WEATHER = {"name": "get_weather", "arguments": {"city": "Köln"}}
TIME = {"name": "get_time", "arguments": '{"zone": '}


def scripted(*replies: dict[str, Any], **options: Any) -> ScriptedEngine:
    return ScriptedEngine("scripted", msgspec.convert({"replies": replies, **options}, ScriptedOptions))


def user(text: str, **fields: Any) -> GenerationRequest:
    return GenerationRequest(messages=(Message("user", (Text(text),)),), **fields)


async def choice(engine: ScriptedEngine, request: GenerationRequest) -> Choice:
    return (await whole(engine, request)).choices[0]


def shapes(parts: Sequence[Part]) -> list[Any]:
    return [
        (part.name, part.arguments) if isinstance(part, ToolCall) else getattr(part, "text", None) for part in parts
    ]


async def test_parts_are_played_as_they_are() -> None:
    text = "<think>no</think> <tool_call>{}"
    engine = scripted({"reasoning": "Hm </think>", "output": text, "calls": [WEATHER, TIME]})
    played = await choice(engine, user("hello", tools=TOOLS))
    assert shapes(played.parts) == [
        "Hm </think>",
        text,
        ("get_weather", '{"city":"Köln"}'),
        ("get_time", '{"zone": '),
    ]
    assert played.reason == "tool_calls"
    assert (played.usage.completion, played.usage.reasoning) == (17, 3)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, ["Hm.", "Text."]),
        ({"tools": TOOLS, "tool_choice": ToolChoice("none")}, ["Hm.", "Text."]),
        (
            {"tools": TOOLS, "tool_choice": ToolChoice(parallel=False)},
            ["Hm.", "Text.", ("get_weather", '{"city":"Köln"}')],
        ),
        ({"thinking": Thinking(effort="none")}, ["Text."]),
        ({"tools": TOOLS, "max_tokens": 2}, ["Hm.", "Text."]),
        ({"stop": ("xt",)}, ["Hm.", "Te"]),
    ],
)
async def test_request_limits_the_parts(fields: dict[str, Any], expected: list[Any]) -> None:
    engine = scripted({"reasoning": "Hm.", "output": "Text.", "calls": [WEATHER, TIME]})
    assert shapes((await choice(engine, user("hello", **fields))).parts) == expected


PARTS = st.lists(
    st.one_of(
        st.builds(Text, st.text(min_size=1, max_size=30)),
        st.builds(Reasoning, st.text(min_size=1, max_size=30)),
        st.builds(ToolCall, st.just("id"), st.just("name"), st.text(max_size=30)),
    ),
    max_size=5,
)


@given(PARTS, st.integers(1, 9), st.none() | st.integers(1, 40))
async def test_tokens_join_to_the_parts(parts: list[Part], size: int, count: int | None) -> None:
    tokens = split_tokens(parts, size, count)
    joined: list[list[Any]] = []
    for event in (event for token in tokens for event in token):
        if isinstance(event, ToolCallStart):
            joined.append([ToolCallDelta, ""])
        elif isinstance(event, ToolCallDelta):
            joined[-1][1] += event.arguments
        elif isinstance(event, TextDelta | ReasoningDelta) and event.text:
            if not joined or joined[-1][0] is not type(event):
                joined.append([type(event), ""])
            joined[-1][1] += event.text
    expected: list[list[Any]] = []
    for part in parts:
        kind = {Text: TextDelta, Reasoning: ReasoningDelta}.get(type(part), ToolCallDelta)
        text = part.arguments if isinstance(part, ToolCall) else getattr(part, "text", "")
        if expected and expected[-1][0] is kind is not ToolCallDelta:
            expected[-1][1] += text
        else:
            expected.append([kind, text])
    length = sum(len(text) for _, text in expected)
    assert [sum(getattr(event, "count", 0) for event in token) for token in tokens] == [1] * len(tokens)
    assert len(tokens) == (-(-length // size) if count is None else count)
    if tokens:
        assert joined == expected


async def test_number_of_tokens_and_finish_reason() -> None:
    engine = scripted({"output": "one two three", "tokens": 3, "finish": "length"})
    played = await choice(engine, user("hello"))
    assert (played.text, played.usage.completion, played.reason) == ("one two three", 3, "length")
    cut = await choice(engine, user("hello", max_tokens=2))
    assert (cut.text, cut.usage.completion, cut.reason) == ("one two ", 2, "length")


async def test_reply_is_played_as_often_as_it_says() -> None:
    engine = scripted({"output": "one", "times": 1}, {"output": "two", "match": "hello", "times": 2})
    played = [(await choice(engine, user(text))).text for text in ("hello", "hello", "other", "hello", "hello")]
    assert played == ["one", "two", "other", "two", "hello"]


CALL = Message("assistant", (Reasoning("Hm."), ToolCall("call_1", "f", '{"a": 1, "b": 2}')))
RESULT = Message("tool", (ToolResult("call_1", (Text("21 °C"),)),))
CONVERSATION = (Message("system", (Text("Be brief."),)), Message("user", (Text("Hi."),)), CALL, RESULT)
SAME_CALL = Message("assistant", (ToolCall("call_2", "f", '{"b":2,"a":1}'),))
SAME_RESULT = Message("tool", (ToolResult("call_2", (Text("21 °C"),)),))
OTHER_CALL = Message("assistant", (ToolCall("call_1", "f", "{}"),))
IMAGE = Message("user", (Text("Hi."), Image(url="https://example.org/a.png")))


def of(*messages: Message) -> str:
    return conversation_digest(GenerationRequest(messages=messages))


async def test_digest_is_that_of_the_conversation() -> None:
    digest = of(*CONVERSATION)
    assert len(digest) == 16
    assert of(CONVERSATION[1], SAME_CALL, SAME_RESULT) == digest
    others = [
        of(CONVERSATION[1], OTHER_CALL, RESULT),
        of(CONVERSATION[1], CALL),
        of(IMAGE, CALL, RESULT),
        of(CALL, RESULT),
        conversation_digest(GenerationRequest(prompts=("Hi.",))),
        conversation_digest(GenerationRequest(prompts=((1, 2),))),
        conversation_digest(GenerationRequest(prompts=((1, 2),), suffix="x")),
    ]
    assert len({digest, *others}) == len(others) + 1


async def test_conversation_selects_a_reply() -> None:
    engine = scripted({"output": "yes", "conversation": of(*CONVERSATION)}, {"output": "no"})
    assert (await choice(engine, GenerationRequest(messages=CONVERSATION))).text == "yes"
    assert (await choice(engine, user("21 °C"))).text == "no"


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        ({"status": 429, "retry_after": 2.5, "message": "slow down"}, RateLimited, ""),
        ({"code": "context_length_exceeded"}, ContextTooLong, ""),
        ({"status": 529, "after": 2}, QueueFull, "one two "),
        ({"status": 429, "after": 99}, RateLimited, "one two three"),
    ],
)
async def test_error_of_a_reply(error: dict[str, Any], kind: type[DragomanError], text: str) -> None:
    engine = scripted({"output": "one two three", "error": error})
    received: list[str] = []

    def listen(events: Sequence[Any]) -> None:
        received.extend(event.text for event in events if isinstance(event, TextDelta))

    with pytest.raises(kind) as caught:
        await engine.deliver(user("hello"), listen)
    assert "".join(received) == text
    assert caught.value.message == error.get("message", "scripted error")
    assert caught.value.retry_after == error.get("retry_after", 1 if kind is QueueFull else None)


async def test_every_error_can_be_scripted() -> None:
    for status in BY_STATUS:
        assert ScriptedError(status=status).build().status == (503 if status == 529 else status)
    for code in BY_CODE:
        assert ScriptedError(code=code).build().code == code
