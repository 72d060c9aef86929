"""Which reply of a script a request gets."""

import msgspec
import pytest

from dragoman.core.request import GenerationRequest, Message, Role, Text, ToolResult
from dragoman.engines.scripted import ScriptedEngine, ScriptedOptions
from dragoman.engines.scripted_replies import ScriptedReply
from tests.support.generation import whole

pytestmark = pytest.mark.anyio

REPLIES = (
    ScriptedReply(match="^What", seen=r"code is (\w+-)?7351", output="7351"),
    ScriptedReply(match="^What", output="unknown"),
    ScriptedReply(match="^sunny", output="It is sunny."),
    ScriptedReply(match="weather", output="I look."),
)
ENGINE = ScriptedEngine("scripted", ScriptedOptions(replies=REPLIES))


def message(line: str) -> Message:
    role, text = line.split(": ")
    known: Role = msgspec.convert(role, Role)
    return Message(known, (ToolResult("call_1", (Text(text),)),) if role == "tool" else (Text(text),))


@pytest.mark.parametrize(
    ("lines", "reply"),
    [
        (["user: the weather?"], "I look."),
        (["user: the weather?", "assistant: I look.", "tool: sunny"], "It is sunny."),
        (["user: the weather?", "assistant: I look.", "tool: sunny", "user: Reminder"], "It is sunny."),
        (["user: the weather?", "assistant: I look.", "tool: sunny", "tool: windy"], "It is sunny."),
        (["user: the weather?", "assistant: I look.", "user: Reminder"], "Reminder"),
        (["user: Hello", "system: the weather?"], "Hello"),
        (["user: the code is 7351", "assistant: Noted", "user: What is it?"], "7351"),
        (["system: the code is A-7351", "user: What is it?"], "7351"),
        (["user: x", "assistant: x", "tool: code is 7351", "assistant: x", "user: What?"], "7351"),
        (["user: the code is 4711", "assistant: Noted", "user: What is it?"], "unknown"),
    ],
)
async def test_conditions_of_a_reply(lines: list[str], reply: str) -> None:
    request = GenerationRequest(messages=tuple(map(message, lines)))
    assert (await whole(ENGINE, request)).text == reply


@pytest.mark.parametrize("prompt", ["the weather?", "Hello"])
async def test_a_prompt_is_matched_too(prompt: str) -> None:
    reply = (await whole(ENGINE, GenerationRequest(prompts=(prompt,)))).text
    assert reply == ("I look." if "weather" in prompt else prompt)


@pytest.mark.parametrize("name", ["match", "seen"])
def test_a_condition_must_be_a_regular_expression(name: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=rf"{name} is not a regular expression: '\('"):
        msgspec.convert({"replies": [{"output": "x", name: "("}]}, ScriptedOptions)
