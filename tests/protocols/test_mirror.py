"""Both sides of every protocol agree: what the client encodes, the server decodes to the same request, and what the
server encodes as a reply, a stream or an error, the client decodes to the same."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.client.call import ClientCall
from dragoman.core import errors
from dragoman.core.embeddings import Embedding, EmbeddingRequest
from dragoman.core.events import (
    Event,
    Finished,
    FinishReason,
    ReasoningDelta,
    Started,
    TextDelta,
    ToolCallDelta,
    ToolCallStart,
    Usage,
)
from dragoman.core.reply import Choice, Reply
from dragoman.core.request import (
    Constraint,
    Delivery,
    GenerationRequest,
    Grammar,
    Image,
    JsonObject,
    JsonSchema,
    Logprobs,
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
from dragoman.protocols import embeddings
from dragoman.protocols.chat.client import COMPLETIONS
from dragoman.protocols.errors import error_from_response
from dragoman.protocols.registry import ANTHROPIC, CLIENT_PROTOCOLS
from dragoman.protocols.request_fields import EMPTY_SCHEMA, used_fields
from dragoman.protocols.wire_protocol import OPENAI
from tests.client.replay import collect
from tests.protocols.wire import collected, decode_body, encode_reply, encoder, recordings
from tests.support.text_splits import cut_bytes, cuttings

CLIENTS = {**CLIENT_PROTOCOLS, "completions": COMPLETIONS}
CHATS = pytest.mark.parametrize("protocol", CLIENT_PROTOCOLS)
ALL = pytest.mark.parametrize("protocol", CLIENTS)
REQUEST = GenerationRequest(id="x-1", model="m", messages=(Message("user", (Text("hello"),)),))
REPLY_TO = GenerationRequest(id="x-1", model="m", prompts=("hello",), delivery=Delivery(stream=True, usage=True))
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = (Tool("weather", "The weather.", SCHEMA), Tool("clock", "", {"type": "object", "properties": {}}, strict=True))


def normalized(request: GenerationRequest, protocol: str) -> Any:
    """Remove what the server adds, and what the protocol cannot express."""
    plain = msgspec.to_builtins(request)
    for name in ("asked", "extra", "delivery", "choices", "best_of", "echo", "edits"):
        del plain[name]
    if protocol != "messages":
        del plain["keep_seconds"]
    if not request.tools:
        del plain["tool_choice"]
    for tool in plain["tools"]:
        del tool["path"]
        tool["parameters"] = tool["parameters"] or EMPTY_SCHEMA
    (plain["constraint"] or {}).pop("path", None)
    merged: list[dict[str, Any]] = []
    for message in request.messages:
        role = "system" if message.role == "developer" else message.role
        if protocol == "messages" and role == "system" and merged and merged[-1]["role"] != "system":
            role = "user"
        parts = [msgspec.to_builtins(part) for part in message.parts if can_express(protocol, part)]
        if merged and merged[-1]["role"] == role != "tool":
            separator = [{"type": "text", "text": "\n\n"}] if role == "system" and protocol == "messages" else []
            merged[-1]["parts"] += separator + parts
        elif parts:
            merged.append({"role": role, "parts": parts})
    plain["messages"] = [{"role": message["role"], "parts": joined(protocol, message["parts"])} for message in merged]
    return plain


def can_express(protocol: str, part: Part) -> bool:
    return part != Text("") and not (protocol == "messages" and isinstance(part, Reasoning) and not part.signature)


def joined(protocol: str, parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join adjacent texts, and remove the signatures that only messages keep."""
    found: list[dict[str, Any]] = []
    for part in parts:
        if part["type"] == "summary":
            part["type"] = "text"
        if protocol != "messages":
            part.pop("signature", None)
            part.pop("is_error", None)
        if part["type"] == "tool_result":
            part["content"] = joined(protocol, part["content"])
        if part["type"] == "text" and found and found[-1]["type"] == "text":
            found[-1]["text"] += part["text"]
        elif part.get("text") != "" or part.get("signature"):
            found.append(part)
    return found


def check_request(protocol: str, request: GenerationRequest, expected: GenerationRequest | None = None) -> None:
    body = msgspec.json.encode(ClientCall(CLIENTS[protocol], request, stream=True).body)
    decoded = decode_body(protocol, body)
    assert normalized(decoded, protocol) == normalized(expected or request, protocol)
    assert decoded.delivery.stream


WORDS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)
ARGUMENTS = st.sampled_from(['{"city":"Paris"}', "{}", '{"a":{"b":[1,2,"}"]}}'])
IMAGE = Image(url="https://example.org/a.png")
SAMPLINGS = st.builds(
    Sampling,
    temperature=st.sampled_from([None, 0, 0.5]),
    top_p=st.sampled_from([None, 0.5]),
    top_k=st.sampled_from([None, 3]),
    seed=st.sampled_from([None, 7]),
)
CHOICES = st.sampled_from(
    [ToolChoice(), ToolChoice("required"), ToolChoice("named", "clock", False), ToolChoice(parallel=False)]
)


@st.composite
def conversations(draw: st.DrawFn) -> tuple[Message, ...]:
    """Conversations that every protocol can express."""
    messages = [Message("system", (Text(draw(WORDS)),))] if draw(st.booleans()) else []
    for turn in range(draw(st.integers(0, 3))):
        messages.append(Message("user", (Text(draw(WORDS)), *draw(st.sampled_from([(), (IMAGE, Text("?"))])))))
        calls = [ToolCall(f"c{turn}{at}", "weather", draw(ARGUMENTS)) for at in range(draw(st.integers(0, 2)))]
        reasoning = draw(st.sampled_from([(), (Reasoning("hm", "signature"),)]))
        messages.append(Message("assistant", (*reasoning, Text(draw(WORDS)), *calls)))
        messages += [Message("tool", (ToolResult(call.id, (Text(draw(WORDS)),)),)) for call in calls]
    return (*messages, Message("user", (Text(draw(WORDS)),)))


@CHATS
@given(messages=conversations(), sampling=SAMPLINGS, choice=CHOICES, stop=st.sampled_from([(), ("END",)]))
def test_request(
    protocol: str, messages: tuple[Message, ...], sampling: Sampling, choice: ToolChoice, stop: tuple[str, ...]
) -> None:
    request = GenerationRequest(model="m", messages=messages, max_tokens=9, sampling=sampling, stop=stop)
    check_request(protocol, request)
    with_tools = msgspec.structs.replace(request, tools=TOOLS, tool_choice=choice)
    check_request(protocol, with_tools)


@CHATS
@pytest.mark.parametrize(
    "fields",
    [
        {"constraint": JsonSchema(SCHEMA)},
        {"thinking": Thinking(enabled=False)},
        {"thinking": Thinking(effort="high")},
        {"labels": {"user": "ann"}},
    ],
)
def test_request_option(protocol: str, fields: dict[str, Any]) -> None:
    request = msgspec.structs.replace(REQUEST, id="", max_tokens=9, **fields)
    expected = request
    if protocol == "responses" and request.thinking.is_off:
        expected = msgspec.structs.replace(request, thinking=Thinking(enabled=False, effort="none"))
    check_request(protocol, request, expected)


@pytest.mark.parametrize("constraint", [JsonObject(), Regex("a+"), Grammar("start: 'a'"), OneOf(("a", "b"))])
def test_constraints_of_chat(constraint: Constraint) -> None:
    request = msgspec.structs.replace(REQUEST, id="", constraint=constraint)
    check_request("chat", request)
    if not isinstance(constraint, JsonObject):
        with pytest.raises(errors.UnsupportedParameter):
            ClientCall(CLIENTS["messages"], request, stream=False)


@pytest.mark.parametrize("protocol", ["chat", "completions", "responses"])
def test_every_sampling_field(protocol: str) -> None:
    sampling = Sampling(0.5, 0.4, 3, 0.1, 7, 1.1, 0.2, 0.3, {5: 1.5})
    fields = {"prompts": ("a",)} if protocol == "completions" else {"messages": REQUEST.messages}
    request = GenerationRequest(sampling=sampling, stop_token_ids=(2,), ignore_eos=True, labels={"user": "u"}, **fields)
    check_request(protocol, request)
    if protocol != "responses":
        check_request(protocol, msgspec.structs.replace(request, logprobs=Logprobs(2)))


RECORDINGS = [(protocol, name) for protocol in CLIENTS for name in recordings(protocol)]


@pytest.mark.parametrize(("protocol", "name"), RECORDINGS)
def test_recorded_request(protocol: str, name: str) -> None:
    """What the server decodes from a real client, our client can send on."""
    body = recordings(protocol)[name]
    if "item_reference" in json.dumps(body) or "thread" in body:
        pytest.skip("refers to what a server has stored")
    decoded = decode_body(protocol, json.dumps({**body, "previous_response_id": None}).encode())
    single = msgspec.structs.replace(
        decoded, choices=1, best_of=1, echo=False, prompts=decoded.prompts[:1], max_tokens=decoded.max_tokens or None
    )
    if single.logprobs is not None:
        single = msgspec.structs.replace(single, logprobs=Logprobs(single.logprobs.top))
    unsupported = set(used_fields(single)) - CLIENTS[protocol].supported_fields
    if unsupported:
        labels = {label: value for label, value in single.labels.items() if label not in unsupported}
        single = msgspec.structs.replace(single, labels=labels, logprobs=None, constraint=None)
    check_request(protocol, single)


@CHATS
def test_inline_image(protocol: str) -> None:
    image = Image(b"png", "image/png")
    request = GenerationRequest(messages=(Message("user", (Text("what?"), image)),))
    seen = decode_body(protocol, msgspec.json.encode(CLIENTS[protocol].encode(request, False))).messages[0].parts[1]
    assert seen == (image if protocol == "messages" else Image(url="data:image/png;base64,cG5n"))


@st.composite
def replies(draw: st.DrawFn, protocol: str) -> list[Event]:
    """Reasoning, then text, then calls: an order that every protocol can express."""
    events: list[Event] = [Started(9, cached_tokens=1)]
    calls: list[str] = []
    if protocol != "completions":
        events += [ReasoningDelta(text) for text in draw(st.lists(WORDS, max_size=4))]
        calls = draw(st.lists(ARGUMENTS, max_size=3))
    events += [TextDelta(text) for text in draw(st.lists(WORDS, max_size=6))]
    for at, arguments in enumerate(calls):
        half = len(arguments) // 2
        events += [ToolCallStart(f"call_{at}", "f"), ToolCallDelta(arguments[:half]), ToolCallDelta(arguments[half:])]
    reason: FinishReason = "tool_calls" if calls else draw(st.sampled_from(["stop", "length", "content_filter"]))
    kept = draw(st.integers(0, 3)) if protocol in ("messages", "responses") else 0
    return [*events, Finished(reason, usage=Usage(9, 5, 1, 2, kept))]


def read(protocol: str, pieces: list[bytes]) -> Choice:
    client_call = ClientCall(CLIENTS[protocol], GenerationRequest(), stream=True)
    events = [event for piece in pieces for event in client_call.feed(piece)]
    return collect([*events, *(event for last in client_call.end() for event in last)])


def check_reply(found: Choice, expected: Reply) -> None:
    parts = tuple(Reasoning(part.text) if isinstance(part, Reasoning) else part for part in found.parts)
    choice = expected.choices[0]
    assert (parts, found.reason, found.usage) == (choice.parts, choice.reason, choice.usage)


@ALL
@given(data=st.data(), cuts=cuttings())
def test_reply_and_stream(protocol: str, data: st.DataObject, cuts: list[int]) -> None:
    events = data.draw(replies(protocol))
    reply = collected(events)
    check_reply(read(protocol, [encode_reply(protocol, REPLY_TO, reply)]), reply)
    stream_encoder = encoder(protocol, REPLY_TO)
    stream = b"".join(stream_encoder.feed(0, [event]) for event in events) + stream_encoder.end()
    check_reply(read(protocol, cut_bytes(stream, cuts)), reply)


def test_messages_keep_signatures() -> None:
    reasoning = [ReasoningDelta("Hm"), ReasoningDelta("m", signature="s1"), ReasoningDelta("", signature="sealed")]
    events: list[Event] = [Started(), *reasoning, TextDelta("a"), Finished()]
    stream_encoder = encoder("messages", REQUEST)
    streamed = read("messages", [stream_encoder.feed(0, events) + stream_encoder.end()])
    assert streamed.parts == (Reasoning("Hmm", "s1"), Reasoning("", "sealed"), Text("a"))
    assert read("messages", [encode_reply("messages", REQUEST, collected(events))]).parts == streamed.parts


def test_messages_omit_reasoning_without_signature() -> None:
    messages = (*REQUEST.messages, Message("assistant", (Reasoning("hm"), Text("b"))), *REQUEST.messages)
    body = CLIENTS["messages"].encode(GenerationRequest(messages=messages), False)
    assert body["messages"][1]["content"] == [{"type": "text", "text": "b"}]


@ALL
def test_error_frame(protocol: str) -> None:
    stream_encoder = encoder(protocol, REQUEST)
    data = stream_encoder.feed(0, [Started(), TextDelta("a")]) + stream_encoder.fail(errors.EngineFailed("boom"))
    with pytest.raises(errors.DragomanError, match="boom"):
        read(protocol, [data])


@pytest.mark.parametrize(
    "error",
    [
        *(errors.BadRequest("x"), errors.Unauthorized("x"), errors.PermissionDenied("x"), errors.NotFound("x")),
        *(errors.TooLarge("x"), errors.RateLimited("x"), errors.QueueFull("x"), errors.NotSupported("x")),
        errors.ContextTooLong("maximum context length is 20 tokens, but the prompt has 25", tokens=25, limit=20),
    ],
)
def test_error_response(error: errors.DragomanError) -> None:
    for family in (OPENAI, ANTHROPIC):
        body = msgspec.json.encode(family.encode_error(error, "req_1"))
        found = error_from_response(family.status(error), {}, body)
        if isinstance(found, errors.ContextTooLong):
            assert (found.tokens, found.limit) == (25, 20)
        else:
            assert found.message == error.message
        assert type(found) is type(error) or family is ANTHROPIC


EMBEDDINGS = [EmbeddingRequest(("a",)), EmbeddingRequest(("a", (1, 2)), "m", 2, True, True)]


@pytest.mark.parametrize("name", [*recordings("embeddings"), *map(str, range(len(EMBEDDINGS)))])
def test_embeddings(name: str) -> None:
    recorded = recordings("embeddings").get(name)
    request = embeddings.decode(json.dumps(recorded).encode()) if recorded else EMBEDDINGS[int(name)]
    assert embeddings.decode(msgspec.json.encode(embeddings.encode_request(request))) == request
    vectors = [Embedding.of([at + 1, 2], tokens=3) for at in range(len(request.inputs))]
    reply = msgspec.json.encode(embeddings.encode_reply(msgspec.structs.replace(request, dimensions=None), vectors))
    found, usage = embeddings.decode_reply(reply, len(vectors))
    assert [vector.values for vector in found] == [pytest.approx(vector.values) for vector in vectors]
    assert usage == Usage(prompt=3 * len(vectors))
