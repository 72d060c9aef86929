"""The upstream engine: when a server is asked to stream, and replies with unusual contents."""

import json
from typing import Any

import pytest

from dragoman.core.events import Finished, Started, TextDelta
from dragoman.pipeline.local_generation import generate
from tests.engines.upstream_app import REQUEST, ask, ask_all, client_of, sent, start_engine, upstream_app
from tests.support.bad_server import (
    CHAT,
    DONE,
    END,
    HEL,
    HELLO,
    LO,
    REPLY,
    USED,
    BadServer,
    Script,
    answer,
    finish,
    frame,
    refused,
    stream,
)

COUNTED_FRAMES = [HEL, LO, END, frame({"choices": [], "usage": USED}), DONE]
COUNTED = stream(*COUNTED_FRAMES)
STRAY = stream(HEL, LO, END, frame(USED), DONE)
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"


def streams_without_usage(head: str, body: bytes) -> Script:
    return HELLO if json.loads(body).get("stream") else answer(REPLY | {"usage": USED})


def test_usage_that_only_whole_replies_have(server: BadServer) -> None:
    server.play(streams_without_usage)
    for response in ask_all(upstream_app(server.url), [{}, {}]):
        usage = response.json()["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (3, 2)


@pytest.mark.parametrize(("script", "is_streamed"), [(COUNTED, True), (HELLO, False), (STRAY, False)])
def test_caller_that_does_not_stream_gets_a_stream_only_if_nothing_is_lost(
    server: BadServer, script: Script, is_streamed: bool
) -> None:
    server.play(script)
    ask_all(upstream_app(server.url), [{}, {"stream": True}, {}])
    assert ["stream" in body for body in sent(server)] == [False, True, is_streamed]


def test_streams_that_stop_reporting_the_usage(server: BadServer) -> None:
    server.play(COUNTED, HELLO, answer(REPLY))
    ask_all(upstream_app(server.url), [{"stream": True}, {}, {}])
    assert ["stream" in body for body in sent(server)] == [True, True, False]


@pytest.mark.parametrize(
    "message",
    [
        "Stream must be set to true",
        "This model only support stream mode, please enable the stream parameter to access the model.",
        "parameter.enable_thinking must be set to false for non-streaming calls",
    ],
)
def test_server_that_only_streams(server: BadServer, message: str) -> None:
    server.play(refused("400 Bad", message), HELLO)
    responses = ask_all(upstream_app(server.url), [{"seed": 1}] * 2)
    assert [response.json()["choices"][0]["message"]["content"] for response in responses] == ["Hello"] * 2
    assert ["stream" in body for body in sent(server)] == [False, True, True]
    assert all("seed" in body for body in sent(server))


def test_stream_that_did_not_help_is_not_tried_first_later(server: BadServer) -> None:
    server.play(refused("400 Bad", "invalid prompt: 'stream'"))
    assert [response.status_code for response in ask_all(upstream_app(server.url), [{}, {}])] == [400, 400]
    assert ["stream" in body for body in sent(server)] == [False, True] * 2


async def test_whole_reply_says_nothing_about_the_speed(server: BadServer) -> None:
    server.play(answer(REPLY | {"usage": USED}))
    async with client_of(upstream_app(server.url)) as client:
        assert (await client.post(CHAT, json={"model": "m", "messages": [{"role": "user", "content": "x"}]})).is_success
        [model] = (await client.get("/admin/models")).json()["data"]
    assert "tokens_per_second" not in model


async def test_events_of_a_local_generation_are_streamed(server: BadServer) -> None:
    server.play(HELLO)
    async with start_engine(server.url) as engine:
        events = [event async for event in generate(engine, REQUEST)]
        reply = await generate(engine, REQUEST)
    assert [type(event) for event in events] == [Started, TextDelta, TextDelta, Finished]
    assert reply.text == "Hello"
    assert ["stream" in body for body in sent(server)] == [True, False]


# Finish reasons


PAUSED = {"choices": [REPLY["choices"][0] | {"finish_reason": "Paused"}]}


@pytest.mark.parametrize("script", [stream(HEL, LO, finish("Paused")), answer(PAUSED)], ids=["stream", "whole"])
def test_unknown_finish_reason_is_passed_on(server: BadServer, script: Script) -> None:
    server.play(script)
    app = upstream_app(server.url)
    whole, streamed = ask_all(app, [{}, {"stream": True}])
    assert whole.json()["choices"][0]["finish_reason"] == "Paused"
    assert '"finish_reason":"Paused"' in streamed.text


@pytest.mark.parametrize("fields", [{}, {"stream": True}], ids=["whole", "stream"])
def test_unknown_finish_reason_of_a_completion_is_passed_on(server: BadServer, fields: dict[str, Any]) -> None:
    server.play(answer({"choices": [{"text": "Hello", "finish_reason": "Paused"}]}), path="/v1/completions")
    response = ask(upstream_app(server.url), "/v1/completions", prompt="hello", **fields)
    assert '"finish_reason":"Paused"' in response.text


def test_unknown_finish_reason_where_the_protocol_has_a_fixed_set(server: BadServer) -> None:
    server.play(answer(PAUSED))
    app = upstream_app(server.url)
    message = ask(app, MESSAGES, max_tokens=5)
    assert (message.json()["stop_reason"], message.json()["content"][0]["text"]) == ("end_turn", "Hello")
    assert "unknown finish reason: 'Paused'" in message.headers["x-dragoman-warning"]
    response = ask(upstream_app(server.url), RESPONSES, input="hello").json()
    assert (response["status"], response["incomplete_details"]) == ("completed", None)


@pytest.mark.parametrize(
    ("reason", "stop_reason"), [("MAX_TOKENS", "max_tokens"), ("PROHIBITED_CONTENT", "refusal"), ("EOS", "end_turn")]
)
def test_finish_reasons_of_other_servers(server: BadServer, reason: str, stop_reason: str) -> None:
    server.play(answer({"choices": [REPLY["choices"][0] | {"finish_reason": reason}]}))
    assert ask(upstream_app(server.url), MESSAGES, max_tokens=5).json()["stop_reason"] == stop_reason


@pytest.mark.parametrize("reason", [1, True, {"type": "stop"}, ["stop"]])
def test_finish_reason_that_is_no_text(server: BadServer, reason: Any) -> None:
    server.play(answer({"choices": [REPLY["choices"][0] | {"finish_reason": reason}]}))
    response = ask(upstream_app(server.url))
    assert response.json()["choices"][0]["finish_reason"] == "stop"
    assert "unknown finish reason" in response.headers["x-dragoman-warning"]


@pytest.mark.parametrize("syntax", [None, "hermes"])
def test_tool_calls_with_an_unknown_finish_reason(server: BadServer, syntax: str | None) -> None:
    function = {"name": "f", "arguments": "{}"}
    message: dict[str, Any] = {"content": None, "tool_calls": [{"id": "a", "function": function}]}
    if syntax is not None:
        message = {"content": '<tool_call>{"name": "f", "arguments": {}}</tool_call>'}
    server.play(answer({"choices": [{"message": message, "finish_reason": "Paused"}]}))
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
    choice = ask(upstream_app(server.url, format=syntax), tools=tools).json()["choices"][0]
    assert (choice["finish_reason"], len(choice["message"]["tool_calls"])) == ("tool_calls", 1)


def test_text_with_an_unknown_finish_reason_and_a_format(server: BadServer) -> None:
    server.play(answer(PAUSED))
    assert ask(upstream_app(server.url, format="hermes")).json()["choices"][0]["finish_reason"] == "Paused"


# Unusual replies


CHOICES: list[Any] = [None, [], [None], [[]], "x", {}, {"message": {"content": "Hello"}}]
EMPTY_CHOICES: list[Any] = [
    *[{}, {"message": None}, {"message": {}}, {"message": {"content": None}}, {"message": {"tool_calls": []}}],
    *[{"message": {"content": []}}, {"message": {"content": 5}}, {"message": {"content": [5]}}],
    *[{"message": "Hello", "finish_reason": "stop"}, {"message": ["Hello"], "finish_reason": "stop"}],
]


@pytest.mark.parametrize("choices", [*CHOICES, *([choice] for choice in EMPTY_CHOICES)], ids=str)
def test_empty_reply_is_an_error(server: BadServer, choices: Any) -> None:
    server.play(answer({"choices": choices}))
    for is_streamed in (False, True):
        response = ask(upstream_app(server.url), stream=is_streamed)
        assert (response.status_code, response.json()["error"]["code"]) == (502, "bad_answer")


@pytest.mark.parametrize("choices", [*CHOICES, [{}], [{"message": None}], [{"delta": {}}]], ids=str)
def test_empty_stream_is_an_error(server: BadServer, choices: Any) -> None:
    server.play(stream(frame({"choices": choices}), DONE))
    for is_streamed in (False, True):
        response = ask(upstream_app(server.url), stream=is_streamed)
        assert (response.status_code, response.json()["error"]["code"]) == (502, "stream_cut_off")


USAGES: list[Any] = [None, [], "x", {}, {"prompt_tokens": "many"}]
ODD: list[Any] = [*({"choices": choices} for choices in CHOICES), *({"usage": usage} for usage in USAGES), None, []]


@pytest.mark.parametrize("odd", ODD, ids=str)
def test_odd_frames_are_skipped(server: BadServer, odd: Any) -> None:
    server.play(stream(frame(odd), HEL, frame(odd), LO, END, frame(odd), DONE))
    assert ask(upstream_app(server.url)).json()["choices"][0]["message"]["content"] == "Hello"


def test_parts_of_unknown_types_are_reported(server: BadServer) -> None:
    parts = [{"type": "audio", "data": "A"}, {"type": "text", "text": "Hello"}, 3, None, {"type": 7}]
    server.play(answer({"choices": [{"message": {"content": parts}, "finish_reason": "stop"}]}))
    response = ask(upstream_app(server.url))
    assert response.json()["choices"][0]["message"]["content"] == "Hello"
    assert "parts of unknown types: 'audio', 7" in response.headers["x-dragoman-warning"]


def test_counts_as_text_and_tokens_written_to_a_cache(server: BadServer) -> None:
    usage = {"prompt_tokens": "9", "completion_tokens": "2", "cache_creation_input_tokens": "4", "cached_tokens": "3"}
    server.play(answer(REPLY | {"usage": usage}))
    counts = ask(upstream_app(server.url), MESSAGES, max_tokens=5).json()["usage"]
    assert (counts["input_tokens"], counts["cache_read_input_tokens"], counts["cache_creation_input_tokens"]) == (
        2,
        3,
        4,
    )
    assert counts["output_tokens"] == 2


def test_frames_separated_by_one_newline(server: BadServer) -> None:
    frames = b"".join(COUNTED_FRAMES).replace(b"\n\n", b"\n")
    server.play(stream(frames), stream(*(frames[at : at + 1] for at in range(len(frames)))))
    for response in ask_all(
        upstream_app(server.url), [{"stream": True, "stream_options": {"include_usage": True}}] * 2
    ):
        assert '"content":"Hel"' in response.text
        assert '"completion_tokens":2' in response.text
