"""What users of an older Python client rely on, with `Client` and `AsyncClient`."""

import asyncio
import json
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from hypothesis import given

from dragoman import AsyncClient, Client
from dragoman.core.errors import (
    AnswerTimeout,
    BadAnswer,
    BadRequest,
    ContextTooLong,
    DragomanError,
    MalformedToolCall,
    ServerFailed,
    StreamCutOff,
    Unreachable,
)
from dragoman.core.events import Finished, Started, TextDelta, ToolCallDelta, ToolCallStart
from dragoman.core.reply import Choice, Reply
from tests.client.replay import outcome
from tests.support.bad_server import (
    CHAT,
    DONE,
    END,
    HEL,
    HELLO,
    LO,
    REPLY,
    BadServer,
    Script,
    answer,
    call,
    cut,
    delta,
    finish,
    frame,
    refused,
    stream,
    whole,
)
from tests.support.compat_servers import Respond, astrai, lethean, ruby
from tests.support.server_process import Running
from tests.support.text_splits import cut_bytes, cuttings

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}


@pytest.fixture(scope="module")
def server() -> Iterator[BadServer]:
    with BadServer() as made:
        yield made


def client_of(server: BadServer, **options: Any) -> Client:
    return Client(server.url, protocol="chat", timeout=server.silence, retries=0, **options)


def replied(server: BadServer, script: Script, **options: Any) -> Reply:
    """The reply of both methods of both clients."""
    server.play(script)

    async def ask() -> list[Reply]:
        async with AsyncClient(server.url, protocol="chat", timeout=server.silence, retries=0) as client:
            whole = await client.complete("hello", **options)
            async with client.stream("hello", **options) as events:
                assert [event async for event in events]
                return [whole, events.reply()]

    with client_of(server) as client:
        first = client.complete("hello", **options)
        with client.stream("hello", **options) as events:
            list(events)
            replies = [events.reply(), *asyncio.run(ask())]
    assert [(reply.text, reply.usage, reply.reason) for reply in replies] == [
        (first.text, first.usage, first.reason)
    ] * 3
    return first


def body(message: Mapping[str, Any], reason: str = "stop", **fields: Any) -> Script:
    choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": reason}
    return answer({"id": "r-1", "model": "m-1", "choices": [choice], **fields})


def test_complete_and_stream_over_a_server(scripted: Running) -> None:
    with Client(scripted.url, model="poet") as client:
        text = client.complete("Write.").text
        with client.stream("Write.") as events:
            received = list(events)
    assert text == "Roses are red, violets are blue."
    assert type(received[0]) is Started
    assert type(received[-1]) is Finished
    assert "".join(event.text for event in received if isinstance(event, TextDelta)) == text


def test_events_of_a_stream_with_a_tool_call_and_usage(server: BadServer) -> None:
    usage = {"prompt_tokens": 3, "completion_tokens": 2}
    pieces = [call('{"city":', id="c1", name="weather", index=0), call(' "Paris"}', index=0)]
    server.play(stream(HEL, *pieces, finish("tool_calls"), frame({"choices": [], "usage": usage}), DONE))
    with client_of(server) as client, client.stream("hello", tools=[TOOL]) as events:
        kinds = [type(event) for event in events]
        reply = events.reply()
    assert kinds == [Started, TextDelta, ToolCallStart, ToolCallDelta, ToolCallDelta, Finished]
    [made] = reply.tool_calls
    assert (made.id, made.name, made.parsed_arguments) == ("c1", "weather", {"city": "Paris"})
    assert (reply.usage.prompt, reply.usage.completion) == (3, 2)


@pytest.mark.parametrize("content", [None, "Hello", [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]])
def test_content_as_null_string_or_parts(server: BadServer, content: Any) -> None:
    assert replied(server, body({"content": content})).text == ("Hello" if content else "")


@pytest.mark.parametrize("arguments", ['{"city": "Paris"}', {"city": "Paris"}])
@pytest.mark.parametrize("is_legacy", [False, True])
def test_legacy_calls_arguments_as_objects_and_missing_ids(server: BadServer, arguments: Any, is_legacy: bool) -> None:
    function = {"name": "weather", "arguments": arguments}
    calls = {"function_call": function} if is_legacy else {"tool_calls": [{"function": function}]}
    reply = replied(server, body({"content": None, **calls}, "tool_calls"), tools=[TOOL])
    [made] = reply.tool_calls
    assert made.id
    assert (made.name, made.parsed_arguments) == ("weather", {"city": "Paris"})


def test_multi_line_data_and_a_trailing_frame(server: BadServer) -> None:
    lines = b'data: {"choices":\ndata: [{"delta": {"content": "Hello"}}]}\n\n'
    assert replied(server, stream(lines, END.rstrip())).text == "Hello"


@pytest.mark.parametrize(
    ("usage", "counts"),
    [
        ({"prompt_tokens": 5, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}, (5, 2, 4, 0, 0)),
        ({"input_tokens": 5, "output_tokens": 2, "output_tokens_details": {"reasoning_tokens": 1}}, (5, 2, 0, 1, 0)),
        ({"prompt_eval_count": 5, "eval_count": 2}, (5, 2, 0, 0, 0)),
        ({"prompt_tokens": "5", "completion_tokens": "2", "cached_tokens": "4"}, (5, 2, 4, 0, 0)),
        ({"prompt_tokens": 5, "completion_tokens": 2, "cache_creation_input_tokens": 3}, (5, 2, 0, 0, 3)),
        ({"input_tokens": 5, "output_tokens": 2, "cache_creation_input_tokens": 3}, (8, 2, 0, 0, 3)),
        ({"prompt_tokens": "many", "completion_tokens": -1}, (0, 0, 0, 0, 0)),
    ],
)
def test_usage_under_the_names_of_several_servers(
    server: BadServer, usage: dict[str, Any], counts: tuple[int, ...]
) -> None:
    used = replied(server, body({"content": "Hello"}, usage=usage)).usage
    assert (used.prompt, used.completion, used.cached, used.reasoning, used.kept) == counts


@pytest.mark.parametrize(
    ("script", "kind"),
    [
        (refused("400 Bad", "no"), BadRequest),
        (refused("500 Oops", "no"), ServerFailed),
        (["close"], Unreachable),
        (["hang"], AnswerTimeout),
        ([whole(b"<html>")], BadAnswer),
        (answer({"choices": []}), BadAnswer),
        (answer({"choices": [{}]}), BadAnswer),
        (answer({"choices": [{"index": 0}]}), BadAnswer),
        (answer({"choices": [{"message": None}]}), BadAnswer),
        (answer({"choices": [{"message": {}}]}), BadAnswer),
        (answer({"choices": [{"message": {"role": "assistant", "content": None, "tool_calls": []}}]}), BadAnswer),
        (answer({"choices": [{"message": "Hello", "finish_reason": "stop"}]}), BadAnswer),
        (answer({"choices": {"message": {"content": "Hello"}}}), BadAnswer),
        (stream(call("{", id="c", name="f"), END), MalformedToolCall),
        (stream(HEL, frame({"error": {"message": "boom"}})), ServerFailed),
        (stream(HEL), StreamCutOff),
        ([*cut(HEL), 0.05, "reset"], StreamCutOff),
        ([*cut(HEL), "hang"], StreamCutOff),
    ],
    ids=str,
)
def test_one_error_type_for_every_failure(server: BadServer, script: Script, kind: type[DragomanError]) -> None:
    server.play(script)
    with client_of(server) as client:
        for ask in (client.complete, lambda text: list(client.stream(text))):
            with pytest.raises(kind) as caught:
                ask("hello")
            assert isinstance(caught.value, DragomanError)


def test_error_has_the_status_and_the_body(server: BadServer) -> None:
    server.play(refused("400 Bad", "too hot"))
    with client_of(server) as client, pytest.raises(BadRequest, match="too hot") as caught:
        client.complete("hello")
    assert caught.value.answered is not None
    assert (caught.value.answered.status, "too hot" in caught.value.answered.body) == (400, True)


def test_json_body_in_answer_to_a_stream_request(server: BadServer) -> None:
    assert replied(server, answer(REPLY)).text == "Hello"


def test_calls_without_an_index_do_not_merge(server: BadServer) -> None:
    calls = [call('{"city": "A"}', id="a", name="weather"), call('{"city": "B"}', id="b", name="weather")]
    reply = replied(server, stream(*calls, END), tools=[TOOL])
    assert [made.parsed_arguments["city"] for made in reply.tool_calls] == ["A", "B"]


def seed_stream(respond: Respond, path: str, **fields: Any) -> bytes:
    message = {"role": "user", "content": "hello"}
    return respond(path, {"model": "gemma", "messages": [message], "stream": True, **fields})[2].encode()


@pytest.mark.parametrize(
    ("protocol", "data"),
    [
        ("chat", seed_stream(lethean, CHAT)),
        ("chat", seed_stream(astrai, CHAT)),
        ("chat", seed_stream(astrai, CHAT, tools=[TOOL])),
        ("messages", seed_stream(astrai, "/v1/messages")),
        ("chat", seed_stream(ruby, CHAT)),
    ],
    ids=["lethean", "astrai", "astrai with tools", "astrai messages", "ruby"],
)
@given(cuts=cuttings())
def test_stream_split_at_any_byte(protocol: str, data: bytes, cuts: list[int]) -> None:
    whole = outcome(protocol, [data])
    assert isinstance(whole, Choice)
    assert whole.parts
    assert outcome(protocol, cut_bytes(data, cuts)) == whole


def test_reasoning_is_kept(server: BadServer) -> None:
    assert replied(server, stream(delta(reasoning="Hmm"), HEL, LO, END)).reasoning == "Hmm"


def test_continue_after_length_and_compact_when_too_long(server: BadServer) -> None:
    server.play(body({"content": "Hel"}, "length"), refused("400 Bad", "maximum context length is 9"), HELLO)
    with client_of(server) as client:
        reply = client.complete("hello")
        assert reply.reason == "length"
        with pytest.raises(ContextTooLong):
            client.complete([{"role": "user", "content": "hello"}, reply.message])
        assert client.complete("hello").text == "Hello"


def test_one_connection_for_many_requests(server: BadServer) -> None:
    server.play(answer(REPLY))
    with client_of(server) as client:
        for _ in range(3):
            client.complete("hello")
    assert server.connections == 1


def test_output_schema_with_a_name_and_strict(server: BadServer) -> None:
    script = body({"content": '{"city": "Paris"}'})
    wrapped = {"name": "place", "schema": SCHEMA, "strict": False}
    for shape in (wrapped, {"type": "json_schema", "json_schema": wrapped}):
        reply = replied(server, script, output_schema=shape)
        assert reply.output == {"city": "Paris"}
        sent = json.loads(server.requests[CHAT][-1])["response_format"]["json_schema"]
        assert sent == {"name": "place", "schema": SCHEMA, "strict": False}


def test_plain_schema_is_still_the_schema(server: BadServer) -> None:
    schema = {"type": "object", "properties": {"schema": {"type": "string"}, "name": {"type": "string"}}}
    replied(server, body({"content": "{}"}), output_schema=schema)
    assert json.loads(server.requests[CHAT][-1])["response_format"]["json_schema"]["schema"] == schema


def test_id_model_and_raw_body_of_a_reply(server: BadServer) -> None:
    reply = replied(server, body({"content": "Hello"}, extra=5))
    assert (reply.id, reply.model) == ("r-1", "m-1")
    assert reply.raw is not None
    assert reply.raw["extra"] == 5
    streamed = frame({"id": "r-2", "model": "m-2", "choices": [{"delta": {}, "finish_reason": "stop"}]})
    reply = replied(server, stream(HEL, LO, streamed, DONE))
    assert (reply.id, reply.model, reply.raw) == ("r-2", "m-2", None)


def test_unknown_finish_reason_is_passed_on(server: BadServer) -> None:
    assert replied(server, body({"content": "Hello"}, "Paused")).reason == "Paused"
    assert replied(server, stream(HEL, LO, finish("Paused"))).reason == "Paused"
    assert replied(server, stream(HEL, LO, finish("Paused"), END)).reason == "stop"
    assert replied(server, stream(HEL, frame({"choices": [{"finish_reason": 1}]}))).reason == "stop"


@pytest.mark.parametrize(
    ("protocol", "empty"),
    [("messages", {"content": []}), ("messages", {"content": None}), ("responses", {"output": []})],
)
def test_empty_reply_of_other_protocols(server: BadServer, protocol: Any, empty: Any) -> None:
    server.play(answer(empty), path=f"/v1/{protocol}")
    with Client(server.url, model="m", protocol=protocol) as client, pytest.raises(BadAnswer):
        client.complete("hello")


def test_empty_reply_with_content_or_a_finish_reason_is_a_reply(server: BadServer) -> None:
    assert replied(server, body({"content": None}, "length")).reason == "length"
    reply = replied(server, answer({"choices": [{"message": {"content": ""}}]}))
    assert (reply.text, reply.reason) == ("", "stop")


def test_parts_that_cannot_be_read_are_kept(server: BadServer) -> None:
    audio = {"type": "audio", "data": "AAAA"}
    reply = replied(server, body({"content": [{"type": "text", "text": "Hello"}, audio]}))
    assert (reply.text, reply.unknown_parts) == ("Hello", (audio,))


@pytest.mark.parametrize(
    ("protocol", "script", "kept"),
    [
        (
            "messages",
            answer({"id": "x", "content": [{"type": "text", "text": "Hello"}, {"type": "server_tool_use", "id": "s"}]}),
            {"type": "server_tool_use", "id": "s"},
        ),
        (
            "responses",
            answer(
                {
                    "id": "x",
                    "status": "completed",
                    "output": [
                        {"type": "web_search_call", "id": "s"},
                        {"type": "message", "content": [{"type": "output_text", "text": "Hello"}]},
                    ],
                }
            ),
            {"type": "web_search_call", "id": "s"},
        ),
    ],
)
def test_unknown_parts_of_other_protocols(server: BadServer, protocol: Any, script: Script, kept: Any) -> None:
    server.play(script, path=f"/v1/{protocol}")
    with Client(server.url, model="m", protocol=protocol) as client:
        reply = client.complete("hello")
    assert (reply.text, reply.id, reply.unknown_parts) == ("Hello", "x", (kept,))


def test_streamed_block_that_cannot_be_read_is_not_a_tool_call(server: BadServer) -> None:
    search = {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}}
    pieces = [{"type": "input_json_delta", "partial_json": piece} for piece in ('{"query":', ' "x"}')]
    events: list[dict[str, Any]] = [
        {"type": "message_start", "message": {"id": "x", "model": "m-1", "usage": {"input_tokens": 1}}},
        {"type": "content_block_start", "index": 0, "content_block": search},
        *({"type": "content_block_delta", "index": 0, "delta": piece} for piece in pieces),
        {"type": "content_block_stop", "index": 0},
        {"type": "content_block_start", "index": 1, "content_block": {"type": "text", "text": "Hello"}},
        {"type": "content_block_stop", "index": 1},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 2}},
        {"type": "message_stop"},
    ]
    server.play(stream(*map(frame, events)), path="/v1/messages")
    with Client(server.url, model="m", protocol="messages") as client, client.stream("hello") as received:
        list(received)
    reply = received.reply()
    assert (reply.text, reply.id, reply.model, reply.tool_calls) == ("Hello", "x", "m-1", ())
    assert reply.unknown_parts == ({**search, "deltas": pieces},)


def test_defaults_are_given_once(server: BadServer) -> None:
    server.play(HELLO)
    with client_of(server, model="m", temperature=0, max_tokens=5) as client:
        client.complete("hello")
        client.complete("hello", max_tokens=7, model="n")
    first, second = (json.loads(sent) for sent in server.requests[CHAT])
    assert (first["model"], first["temperature"], first["max_tokens"]) == ("m", 0, 5)
    assert (second["model"], second["temperature"], second["max_tokens"]) == ("n", 0, 7)
    with pytest.raises(TypeError, match="temprature"):
        Client(server.url, temprature=1)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("url", "key", "is_sent"),
    [
        ("DRAGOMAN_URL", "DRAGOMAN_API_KEY", True),
        ("OPENAI_BASE_URL", "OPENAI_API_KEY", True),
        ("ANTHROPIC_BASE_URL", "ANTHROPIC_API_KEY", True),
        ("DRAGOMAN_URL", "OPENAI_API_KEY", False),
        (None, "OPENAI_API_KEY", False),
    ],
)
def test_server_and_key_from_the_environment(
    server: BadServer, monkeypatch: pytest.MonkeyPatch, url: str | None, key: str, is_sent: bool
) -> None:
    for name in ("DRAGOMAN", "OPENAI", "ANTHROPIC"):
        for ending in ("URL", "BASE_URL", "API_KEY"):
            monkeypatch.delenv(f"{name}_{ending}", raising=False)
    monkeypatch.setenv(key, "from-environment")
    if url is not None:
        monkeypatch.setenv(url, f"{server.url}/v1")
    server.play(HELLO)
    with Client(None if url else server.url) as client:
        assert client.complete("hello").text == "Hello"
    assert ("authorization: bearer from-environment" in server.heads[-1]) == is_sent
