"""Round trips between the client and server sides of the protocols."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.client.call import PROTOCOLS, ClientCall
from dragoman.core.errors import DragomanError, EngineFailed, UnsupportedParameter
from dragoman.core.events import (
    Event,
    Finished,
    ReasoningDelta,
    Started,
    TextDelta,
    ToolCallDelta,
    ToolCallStart,
    Usage,
)
from dragoman.core.reply import Collection
from dragoman.core.request import (
    GenerationRequest,
    Grammar,
    Image,
    JsonObject,
    JsonSchema,
    Message,
    OneOf,
    Part,
    Reasoning,
    Regex,
    Sampling,
    Text,
    Thinking,
    Tool,
    ToolCall,
    ToolChoice,
    ToolResult,
)
from dragoman.protocols import responses
from dragoman.protocols.messages.blocks import sign
from dragoman.protocols.registry import PROTOCOLS as SERVED
from dragoman.protocols.responses.decode import ResponseRequest, decode, parse
from tests.client.replay import REQUEST, collect, replay
from tests.support.text_splits import cut_bytes, cuttings

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
THOUGHT = Reasoning("I had better ask.", sign("I had better ask."))
TOOLS = (Tool("weather", "The weather.", SCHEMA), Tool("clock", "", {"type": "object", "properties": {}}, strict=True))
HISTORY = (
    Message("system", (Text("Be brief."),)),
    Message("user", (Text("Weather in Paris and Rome?"),)),
    Message("assistant", (THOUGHT, Text("Let me see."), ToolCall("a", "weather", '{"city":"Paris"}'))),
    Message("tool", (ToolResult("a", (Text("sunny"),)),)),
    Message("assistant", (ToolCall("b", "weather", '{"city":"Rome"}'), ToolCall("c", "clock", "{}"))),
    Message("tool", (ToolResult("b", (Text("rain"),)),)),
    Message("tool", (ToolResult("c", (Text("noon"),)),)),
    Message("assistant", (Text("Sunny, then rain."),)),
    Message("user", (Text("Thanks. And here? "), Image(url="https://example.org/a.png"), Text("?"))),
)
REQUESTS = {
    "history": GenerationRequest(model="m", messages=HISTORY, tools=TOOLS, max_tokens=9),
    "required": GenerationRequest(messages=HISTORY[:2], tools=TOOLS, tool_choice=ToolChoice("required"), max_tokens=9),
    "named": GenerationRequest(
        messages=HISTORY[:2], tools=TOOLS, tool_choice=ToolChoice("named", "clock", False), max_tokens=9
    ),
    "none": GenerationRequest(messages=HISTORY[:2], tools=TOOLS, tool_choice=ToolChoice("none"), max_tokens=9),
    "one at a time": GenerationRequest(
        messages=HISTORY[:2], tools=TOOLS, tool_choice=ToolChoice(parallel=False), max_tokens=9
    ),
    "schema": GenerationRequest(messages=HISTORY[:2], constraint=JsonSchema(SCHEMA), max_tokens=9),
    "sampling": GenerationRequest(
        messages=HISTORY[:2], sampling=Sampling(temperature=0, top_p=0.5, top_k=3, seed=7), stop=("END",), max_tokens=9
    ),
    "no thinking": GenerationRequest(messages=HISTORY[:2], thinking=Thinking(enabled=False), max_tokens=9),
    "effort": GenerationRequest(messages=HISTORY[:2], thinking=Thinking(effort="high"), max_tokens=9),
}
ONLY_CHAT = {
    "every sampling": Sampling(0.5, 0.4, 3, 0.1, 7, 1.1, 0.2, 0.3, {5: 1.5}),
    "json": JsonObject(),
    "regex": Regex("a+"),
    "grammar": Grammar("start: 'a'"),
    "one of": OneOf(("a", "b")),
}


def served(protocol: str, body: dict[str, Any]) -> GenerationRequest:
    data = json.dumps(body).encode()
    if protocol != "responses":
        return SERVED[protocol].decode(data)
    question: ResponseRequest = decode(parse(data))
    return question.request


def compared(request: GenerationRequest) -> Any:
    """Remove what a protocol adds or cannot express (chat has no signatures)."""
    plain = msgspec.to_builtins(request)
    for name in ("asked", "delivery"):
        del plain[name]
    for tool in plain["tools"]:
        del tool["path"]
    (plain["constraint"] or {}).pop("path", None)
    for message in plain["messages"]:
        for part in message["parts"]:
            part.pop("signature", None)
    return plain


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("name", REQUESTS)
def test_request_round_trip(protocol: str, name: str) -> None:
    request = REQUESTS[name]
    body = ClientCall(PROTOCOLS[protocol], request, stream=True).body
    found = served(protocol, body)
    expected = request
    if name == "no thinking" and protocol == "responses":
        expected = msgspec.structs.replace(request, thinking=Thinking(enabled=False, effort="none"))
    assert compared(found) == compared(expected)
    assert found.delivery.stream


@pytest.mark.parametrize("name", ONLY_CHAT)
def test_field_that_only_some_protocols_support(name: str) -> None:
    value = ONLY_CHAT[name]
    with_it = {"sampling": value} if isinstance(value, Sampling) else {"constraint": value}
    request = GenerationRequest(messages=HISTORY[:2], **with_it)
    assert compared(served("chat", ClientCall(PROTOCOLS["chat"], request, stream=False).body)) == compared(request)
    if name != "json":
        with pytest.raises(UnsupportedParameter):
            ClientCall(PROTOCOLS["messages"], request, stream=False)


def test_messages_omits_reasoning_without_signature() -> None:
    messages = (Message("user", (Text("a"),)), Message("assistant", (Reasoning("hm"), Text("b"))), REQUEST.messages[0])
    body = PROTOCOLS["messages"].encode(GenerationRequest(messages=messages), False)
    assert body["messages"][1]["content"] == [{"type": "text", "text": "b"}]


def test_inline_images() -> None:
    image = Image(b"png", "image/png")
    request = GenerationRequest(messages=(Message("user", (Text("what?"), image)),))
    assert served("messages", PROTOCOLS["messages"].encode(request, False)).messages[0].parts == (Text("what?"), image)
    for protocol in ("chat", "responses"):
        found = served(protocol, PROTOCOLS[protocol].encode(request, False)).messages[0].parts[1]
        assert found == Image(url="data:image/png;base64,cG5n")


def encoder(protocol: str) -> Any:
    if protocol != "responses":
        return SERVED[protocol].encoder(REQUEST, 0)
    question = decode(parse(json.dumps({"input": "hello"}).encode()))
    return responses.ResponseEncoding(question.context, lambda: 0.0).encoder(REQUEST, 0)


PIECES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)
CALLS = st.sampled_from(['{"city":"Paris"}', "{}", '{"a":{"b":[1,2,"}"]}}'])


@st.composite
def replies(draw: st.DrawFn) -> list[Event]:
    """Reasoning, then text, then calls: an order that every protocol can express."""
    events: list[Event] = [Started(3)]
    events += [ReasoningDelta(text) for text in draw(st.lists(PIECES, max_size=4))]
    events += [TextDelta(text) for text in draw(st.lists(PIECES, max_size=6))]
    calls = draw(st.lists(CALLS, max_size=3))
    for at, arguments in enumerate(calls):
        half = len(arguments) // 2
        events += [ToolCallStart(f"call_{at}", "f"), ToolCallDelta(arguments[:half]), ToolCallDelta(arguments[half:])]
    return [*events, Finished("tool_calls" if calls else "stop", usage=Usage(3, 5, 1, 2))]


@pytest.mark.parametrize("protocol", PROTOCOLS)
@given(events=replies(), cuts=cuttings())
def test_stream_round_trip(protocol: str, events: list[Event], cuts: list[int]) -> None:
    stream_encoder = encoder(protocol)
    data = b"".join(stream_encoder.feed(0, [event]) for event in events) + stream_encoder.end()
    found = collect(replay(protocol, cut_bytes(data, cuts)))
    collection = Collection()
    collection.add(0, events)
    expected = collection.reply().choices[0]
    assert (unsigned(found.parts), found.reason) == (expected.parts, expected.reason)
    if protocol != "chat":
        assert found.usage == expected.usage


def unsigned(parts: tuple[Part, ...]) -> tuple[Part, ...]:
    return tuple(Reasoning(part.text) if isinstance(part, Reasoning) else part for part in parts)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_error_frame_raises(protocol: str) -> None:
    stream_encoder = encoder(protocol)
    data = stream_encoder.feed(0, [Started(), TextDelta("a")]) + stream_encoder.fail(EngineFailed("boom"))
    with pytest.raises(DragomanError, match="boom"):
        replay(protocol, [data])


def test_messages_keeps_signatures() -> None:
    reasoning = [ReasoningDelta("Hm"), ReasoningDelta("m", signature="s1"), ReasoningDelta("", signature="sealed")]
    events: list[Event] = [Started(), *reasoning, TextDelta("a"), Finished()]
    stream_encoder = encoder("messages")
    streamed = collect(replay("messages", [stream_encoder.feed(0, events) + stream_encoder.end()]))
    collection = Collection()
    collection.add(0, events)
    whole = SERVED["messages"].encode_reply(REQUEST, 0, collection.reply())
    assert streamed.parts == (Reasoning("Hmm", "s1"), Reasoning("", "sealed"), Text("a"))
    assert collect(replay("messages", [json.dumps(whole).encode()])).parts == streamed.parts
