"""Both clients against the Dragoman server, with all three protocols."""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from dragoman import AsyncClient, Client
from dragoman.client.tool_loop import Outcome
from dragoman.core.engine import RenderedPrompt
from dragoman.core.errors import (
    ContextTooLong,
    DragomanError,
    ModelNotFound,
    NotSupported,
    OutputMismatch,
    StepLimitReached,
    StreamCutOff,
    Unauthorized,
)
from dragoman.core.events import Event, Finished, ReasoningDelta, TextDelta, ToolCallStart
from dragoman.core.request import Message, Reasoning, Text, Tool, ToolCall, ToolResult
from tests.support.server_process import Running, serving

PROTOCOLS = ["chat", "messages", "responses"]


def hermes(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    paris, rome = hermes("weather", city="Paris"), hermes("weather", city="Rome")
    replies = [
        {"match": "^(sunny|rain)", "output": "Sunny, then rain."},
        {"match": "^error", "output": "I am sorry."},
        {"match": "weather", "output": f"<think>I had better ask.</think>Let me see.{paris}{rome}"},
        {"match": "unknown", "output": hermes("nothing")},
        {"match": "wrong", "output": hermes("weather", town="Paris")},
        {"match": "for ever", "output": hermes("again")},
        {"match": "on and on", "output": hermes("again")},
        {"match": "Hamlet", "output": '{"author": "Shakespeare", "year": 1600}'},
        {"match": "badly", "output": "no JSON at all"},
        {"output": "Hello, world."},
    ]
    config = {
        "models": {
            "agent": {"engine": "scripted", "format": "hermes", "replies": replies},
            "short": {"engine": "scripted", "context": 20},
            "failing": {"engine": "scripted", "fail_after": 2, "replies": [{"output": "one two three four"}]},
            "slow": {"engine": "scripted", "tokens_per_second": 20, "replies": [{"output": "tick " * 400}]},
        },
        "api_keys": ["secret"],
    }
    with serving(tmp_path_factory.mktemp("client"), config) as running:
        yield running


@pytest.fixture(scope="module", params=[*PROTOCOLS, "auto"])
def client(request: pytest.FixtureRequest, server: Running) -> Iterator[Client]:
    with Client(server.url, model="agent", api_key="secret", protocol=request.param) as client:
        yield client


def weather(city: str) -> str:
    """The weather of a city."""
    return "sunny" if city == "Paris" else "rain"


def again() -> str:
    """Once more."""
    return "on and on"


TOOLS: list[Callable[..., Any]] = [weather, again]
ASKED = (
    Reasoning("I had better ask."),
    Text("Let me see."),
    ToolCall("", "weather", '{"city": "Paris"}'),
    ToolCall("", "weather", '{"city": "Rome"}'),
)


def bare(parts: Any) -> tuple[Any, ...]:
    """Remove ids and signatures, which differ between protocols."""
    return tuple(
        Reasoning(part.text)
        if isinstance(part, Reasoning)
        else ToolCall("", part.name, json.dumps(json.loads(part.arguments)))
        if isinstance(part, ToolCall)
        else part
        for part in parts
    )


def test_complete(client: Client) -> None:
    reply = client.complete("hello", max_tokens=50)
    assert (reply.text, reply.reason) == ("Hello, world.", "stop")
    assert (reply.usage.prompt, reply.usage.completion) == (2, 4)
    assert reply.message == Message("assistant", (Text("Hello, world."),))
    cut = client.complete([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}], max_tokens=2)
    assert (cut.text, cut.reason) == ("Hello, w", "length")
    assert client.protocol in PROTOCOLS


def test_stream(client: Client) -> None:
    with client.stream("hello", stop="world") as events:
        received = list(events)
    assert "".join(event.text for event in received if isinstance(event, TextDelta)) == "Hello, "
    assert isinstance(received[-1], Finished)
    assert received[-1].usage is not None
    assert events.reply().text == "Hello, "


def test_reasoning_and_calls(client: Client) -> None:
    tool = Tool("weather", "The weather.", {"type": "object", "properties": {"city": {"type": "string"}}})
    whole = client.complete("weather?", tools=[tool], tool_choice="auto")
    with client.stream("weather?", tools=[weather]) as events:
        received = list(events)
    for reply in (whole, events.reply()):
        assert bare(reply.choices[0].parts) == ASKED
        assert reply.reason == "tool_calls"
        first, second = reply.tool_calls
        assert first.id != second.id
    assert sum(isinstance(event, ToolCallStart) for event in received) == 2


def test_run_calls_functions(client: Client) -> None:
    received: list[Event | ToolResult] = []
    outcome = client.run("weather?", tools=TOOLS, on_event=received.append)
    assert (outcome.text, outcome.steps) == ("Sunny, then rain.", 2)
    roles = [message.role for message in outcome.messages]
    assert roles == ["user", "assistant", "tool", "tool", "assistant"]
    assert [message.text for message in outcome.messages[2:4]] == ["sunny", "rain"]
    assert [event.content[0] for event in received if isinstance(event, ToolResult)] == [Text("sunny"), Text("rain")]
    assert any(isinstance(event, ReasoningDelta) for event in received)
    assert client.run("weather?", tools=TOOLS).messages[-1] == outcome.messages[-1]
    assert outcome.usage.completion > outcome.reply.usage.completion


@pytest.mark.parametrize(("prompt", "message"), [("unknown", "unknown tool 'nothing'"), ("wrong", "ValidationError")])
def test_tool_errors_are_sent_to_the_model(client: Client, prompt: str, message: str) -> None:
    outcome = client.run(prompt, tools=TOOLS)
    assert outcome.text == "I am sorry."
    assert message in outcome.messages[2].text


def test_step_limit(client: Client) -> None:
    with pytest.raises(StepLimitReached) as caught:
        client.run("for ever", tools=TOOLS, steps=3)
    assert [message.role for message in caught.value.messages[1:]] == ["assistant", "tool"] * 3


class Play(msgspec.Struct):
    author: str
    year: int


def test_output_schema(client: Client) -> None:
    assert client.complete("Hamlet?", output_schema=Play).output == Play("Shakespeare", 1600)
    schema = {"type": "object", "properties": {"author": {"type": "string"}}}
    assert client.complete("Hamlet?", output_schema=schema).output["year"] == 1600
    with client.stream("Hamlet?", output_schema=Play) as events:
        assert isinstance(list(events)[-1], Finished)
    assert events.reply().output == Play("Shakespeare", 1600)
    with pytest.raises(OutputMismatch) as caught:
        client.complete("badly", output_schema=Play)
    assert caught.value.arrived == (Text("no JSON at all"),)


def test_errors(client: Client) -> None:
    with pytest.raises(ContextTooLong) as caught:
        client.complete("x" * 400, model="short")
    assert (caught.value.tokens, caught.value.limit) in ((100, 20), (100, 19))
    with pytest.raises(ModelNotFound):
        client.complete("hello", model="unknown")
    with pytest.raises(DragomanError, match="the script fails after 2 tokens") as failed:
        for _ in client.stream("hello", model="failing"):
            pass
    assert failed.value.arrived == (Text("one two "),)
    assert not isinstance(failed.value, StreamCutOff)


def test_models_embeddings_and_counts(client: Client) -> None:
    assert {model.name: model.context for model in client.models()}["short"] == 20
    embeddings = client.embed(["red roses", "red violets", "tax law"])
    assert [len(vector) for vector in embeddings.vectors] == [384] * 3
    first, second, third = embeddings.vectors
    assert sum(map(float.__mul__, first, second)) > sum(map(float.__mul__, first, third))
    assert embeddings.usage.prompt > 0
    assert len(client.embed("red roses", dimensions=8).vectors[0]) == 8
    assert client.count_tokens("x" * 40) == 10


def test_rendered_prompt(smollm2: Running) -> None:
    async def render() -> RenderedPrompt:
        async with AsyncClient(smollm2.url) as client:
            return await client.render("Hello.", tools=TOOLS)

    with Client(smollm2.url) as client:
        prompt = client.render("Hello.", tools=TOOLS)
        assert "Hello." in prompt.text
        assert '"weather"' in prompt.text
        assert len(prompt.tokens) == client.count_tokens("Hello.", tools=TOOLS)
    assert prompt.format == "hermes"
    assert asyncio.run(render()) == prompt


def test_prompt_that_cannot_be_shown(client: Client) -> None:
    with pytest.raises(NotSupported, match="cannot show its prompts"):
        client.render("Hello.")


def test_api_key(server: Running) -> None:
    for protocol in PROTOCOLS:
        with Client(server.url, protocol=protocol, api_key="wrong") as client, pytest.raises(Unauthorized):  # type: ignore[arg-type]
            client.complete("hello")


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_async_client(server: Running, protocol: Any) -> None:
    async def ask() -> tuple[Outcome, str, int]:
        async with AsyncClient(server.url, model="agent", api_key="secret", protocol=protocol) as client:
            received: list[object] = []
            outcome = await client.run("weather?", tools=TOOLS, on_event=received.append)
            assert any(isinstance(event, ToolResult) for event in received)
            assert (await client.complete("Hamlet?", output_schema=Play)).output == Play("Shakespeare", 1600)
            assert (await client.embed("red roses")).vectors
            assert await client.models()
            text = ""
            async with client.stream("hello") as events:
                async for event in events:
                    text += event.text if isinstance(event, TextDelta) else ""
            return outcome, text, await client.count_tokens("x" * 40)

    outcome, text, count = asyncio.run(ask())
    assert (outcome.text, text, count) == ("Sunny, then rain.", "Hello, world.", 10)


def test_calls_run_concurrently(server: Running) -> None:
    together = threading.Barrier(2, timeout=60)

    def meet(city: str) -> str:
        together.wait()
        return "sunny"

    meet.__name__ = "weather"
    gathered = asyncio.Barrier(2)

    async def meet_async(city: str) -> str:
        await gathered.wait()
        return "sunny"

    meet_async.__name__ = "weather"

    async def ask() -> str:
        async with AsyncClient(server.url, model="agent", api_key="secret") as client:
            assert (await client.run("weather?", tools=[meet])).text == "Sunny, then rain."
            return (await client.run("weather?", tools=[meet_async])).text

    with Client(server.url, model="agent", api_key="secret") as client:
        assert client.run("weather?", tools=[meet]).text == "Sunny, then rain."
    assert asyncio.run(asyncio.wait_for(ask(), 60)) == "Sunny, then rain."


def test_closing_a_stream_frees_the_model(server: Running) -> None:
    with Client(server.url, model="slow", api_key="secret") as client:
        with client.stream("hello") as events:
            next(events)
        deadline = time.monotonic() + 60
        while not any(record.get("model") == "slow" for record in server.events()):
            assert time.monotonic() < deadline
            time.sleep(0.05)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_real_model(smollm2: Running, protocol: Any) -> None:
    with Client(smollm2.url, protocol=protocol) as client:
        reply = client.complete("Say hello.", temperature=0, max_tokens=12)
        assert reply.text
        assert reply.usage.prompt > 10
        with client.stream("Say hello.", temperature=0, max_tokens=12) as events:
            assert list(events)
        assert events.reply().text == reply.text
        play = client.complete("Who wrote Hamlet, and when?", output_schema=Play, temperature=0, max_tokens=80)
        assert isinstance(play.output, Play)
        called = client.complete(
            "Weather in Paris?", tools=[weather], tool_choice="weather", temperature=0, max_tokens=60
        )
        assert called.tool_calls[0].name == "weather"
