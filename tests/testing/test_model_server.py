"""The model server of `dragoman.testing`: what it answers, what it refuses, and what it keeps."""

import asyncio
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anthropic
import httpx
import openai
import pytest

from dragoman import AsyncClient, Client
from dragoman.core.errors import ConfigError
from dragoman.testing import ModelServer, call, error, reply, serve_script
from tests.support.requests import HELLO, SMALLEST

WEATHER = {
    "name": "get_weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
TOOL = {"type": "function", "function": WEATHER}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}
CHAT = "/chat/completions"


@pytest.fixture
def server() -> Iterator[ModelServer]:
    server = ModelServer()
    server.start()
    yield server
    server.close()


def ask(server: ModelServer, path: str = CHAT, **fields: Any) -> httpx.Response:
    body = SMALLEST[f"/v1{path}"] | {"model": "any"} | fields
    return httpx.post(server.openai_url + path, json=body, trust_env=False, timeout=60)


def content(response: httpx.Response) -> Any:
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["message"]["content"]


def test_replies_are_played_in_order_to_all_protocols(server: ModelServer) -> None:
    server.add("one", "two", reply(json={"a": 1}), "four")
    assert content(ask(server)) == "one"
    assert ask(server, "/completions").json()["choices"][0]["text"] == "two"
    assert ask(server, "/messages").json()["content"][0]["text"] == '{"a":1}'
    (message,) = ask(server, "/responses").json()["output"]
    assert message["content"][0]["text"] == "four"
    server.check_all_played()
    assert [request.path for request in server.requests] == [
        f"/v1{path}" for path in (CHAT, "/completions", "/messages", "/responses")
    ]


def test_request_can_be_inspected(server: ModelServer) -> None:
    server.add("one")
    messages = [{"role": "system", "content": "Be brief."}, *HELLO]
    httpx.post(
        f"{server.openai_url}{CHAT}",
        json={"model": "gpt-5", "messages": messages, "tools": [TOOL], "temperature": 0.5},
        headers={"user-agent": "agent/1"},
        trust_env=False,
    )
    (request,) = server.requests
    assert request.model == "gpt-5"
    assert request.json["temperature"] == 0.5
    assert request.headers["user-agent"] == "agent/1"
    assert [(message.role, message.text) for message in request.messages] == [
        ("system", "Be brief."),
        ("user", "hello"),
    ]
    assert (request.text, [tool.name for tool in request.tools]) == ("hello", ["get_weather"])
    assert request.generation is not None
    assert request.generation.sampling.temperature == 0.5


def test_invalid_request_is_kept_too(server: ModelServer) -> None:
    response = ask(server, messages="no")
    assert response.status_code == 400
    (request,) = server.requests
    assert (request.json["messages"], request.messages, request.text) == ("no", (), "")
    server.check()


def test_any_model_and_any_key(server: ModelServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server.add(reply("Hello.", times=None))
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("NO_PROXY", "*")
    with openai.OpenAI() as sdk:
        assert sdk.chat.completions.create(model="gpt-5", messages=HELLO).choices[0].message.content == "Hello."  # type: ignore[arg-type]
        assert len(sdk.embeddings.create(model="embed", input="hello").data) == 1
    with anthropic.Anthropic() as claude:
        message = claude.messages.create(model="claude-5", max_tokens=9, messages=HELLO)  # type: ignore[arg-type]
        assert message.content[0].type == "text"
    with Client(model="org/any:7b") as client:
        assert client.complete("Hi.").text == "Hello."


def test_condition_selects_a_request(server: ModelServer) -> None:
    server.add(reply("title", match="(?i)title"), reply("one"), reply("two"), reply("always", times=None))
    said = ["hello", "Write a title.", "a title again", "and so on", "and so on"]
    answers = [content(ask(server, messages=[{"role": "user", "content": text}])) for text in said]
    assert answers == ["one", "title", "two", "always", "always"]


@pytest.mark.parametrize(
    ("planned", "fields", "reason"),
    [
        (reply(calls=[call("get_time")]), {}, "it calls get_time, but the request offers no tools"),
        (reply(calls=[call("get_time")]), {"tools": [TOOL]}, "it calls get_time, but the request offers get_weather"),
        (
            reply(calls=[call("get_weather", city=5)]),
            {"tools": [TOOL]},
            "does not match the parameters of get_weather: ['city'] 5 is not of type 'string'",
        ),
        (
            reply(calls=[call("get_weather", "{city")]),
            {"tools": [TOOL]},
            "the arguments of get_weather are not a JSON object: {city",
        ),
        (
            reply(calls=[call("get_weather", city="Bonn")]),
            {"tools": [TOOL], "tool_choice": "none"},
            "it calls get_weather, but the request offers no tools",
        ),
        (reply("no"), {"tools": [TOOL], "tool_choice": "required"}, "the request requires a call of a tool"),
        (
            reply(calls=[call("get_weather", city="Bonn"), call("get_weather", city="Köln")]),
            {"tools": [TOOL], "parallel_tool_calls": False},
            "the request allows one call, but the reply has 2",
        ),
        (
            reply("no JSON"),
            {"response_format": SCHEMA},
            "the request has a schema, but the text is not JSON: 'no JSON'",
        ),
        (
            reply(json={"city": None}),
            {"response_format": SCHEMA},
            "does not match response_format.json_schema.schema: ['city'] None is not of type 'string'",
        ),
        (reply("[]"), {"response_format": {"type": "json_object"}}, "the request asks for a JSON object"),
        (reply("x"), {"structured_outputs": {"regex": "[0-9]+"}}, "the text does not match '[0-9]+': 'x'"),
        (reply("x"), {"structured_outputs": {"choice": ["a", "b"]}}, "the text is not one of 'a', 'b': 'x'"),
    ],
)
def test_reply_that_does_not_fit_is_refused(
    server: ModelServer, planned: Any, fields: dict[str, Any], reason: str
) -> None:
    server.add(planned)
    response = ask(server, **fields)
    assert response.status_code == 400
    assert reason in response.json()["error"]["message"]
    with pytest.raises(AssertionError, match="request 'hello': the scripted reply does not fit it") as caught:
        server.check()
    assert reason in str(caught.value)


def test_check_can_be_turned_off(server: ModelServer) -> None:
    server.add(reply(calls=[call("get_time", "{")], check=False), reply("no JSON", check=False))
    assert ask(server, tools=[TOOL]).json()["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"] == "{"
    assert content(ask(server, response_format=SCHEMA)) == "no JSON"
    server.check_all_played()


def test_request_without_a_reply_is_refused(server: ModelServer) -> None:
    server.add(reply("one", match="^other$"))
    assert "the script has no reply for it; 1 unplayed replies are for other requests" in ask(server).text
    with pytest.raises(AssertionError, match="request 'hello': the script has no reply for it"):
        server.check()


def test_unplayed_replies_are_reported(server: ModelServer) -> None:
    server.add("one", reply(calls=[call("f", a=1)]), error(503), reply())
    ask(server)
    server.check()
    expected = '3 replies of the script were not played:\n- f({"a":1})\n- error 503\n- an empty reply'
    with pytest.raises(AssertionError) as caught:
        server.check_all_played()
    assert str(caught.value) == expected


def test_errors_have_the_format_of_the_protocol(server: ModelServer) -> None:
    server.add(error(429, "slow down", retry_after=3), error("context_length_exceeded"), error(503))
    limited = ask(server)
    assert (limited.status_code, limited.headers["retry-after"]) == (429, "3")
    assert limited.json()["error"]["message"] == "slow down"
    assert ask(server).json()["error"]["code"] == "context_length_exceeded"
    overloaded = ask(server, "/messages")
    assert (overloaded.status_code, overloaded.json()["error"]["type"]) == (529, "overloaded_error")
    server.check_all_played()


def test_error_and_cut_in_a_stream(server: ModelServer) -> None:
    server.add(error(500, text="one two three", after=2), reply("one two three", cut_after=2))
    late = ask(server, stream=True)
    assert (late.status_code, late.text.count('"content":"')) == (200, 3)
    assert "scripted error" in late.text
    assert "[DONE]" not in late.text
    received: list[bytes] = []
    with (
        httpx.stream("POST", server.openai_url + CHAT, json={"messages": HELLO, "stream": True}) as response,
        pytest.raises(httpx.RemoteProtocolError),
    ):
        received.extend(response.iter_raw())
    assert b'"two "' in b"".join(received)
    assert b"error" not in b"".join(received)
    server.check_all_played()


def test_delay_and_speed() -> None:
    with serve_script([reply("12345678", delay=0.2)], tokens_per_second=10) as server:
        began = time.monotonic()
        assert content(ask(server)) == "12345678"
        assert time.monotonic() - began >= 0.4


def test_raw_output_in_the_syntax_of_a_model() -> None:
    output = '<think>Hm.</think><tool_call>{"name": "get_weather", "arguments": {"city": "Bonn"}}</tool_call>'
    with serve_script([output], format="hermes") as server:
        message = ask(server, tools=[TOOL]).json()["choices"][0]["message"]
    assert message["reasoning"] == "Hm."
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"city": "Bonn"}


def test_block_with_a_refused_request_fails() -> None:
    with pytest.raises(AssertionError, match="the script has no reply"), serve_script() as server:
        ask(server)
    with pytest.raises(KeyError) as caught, serve_script() as server:
        ask(server).json()["choices"]
    assert "the script has no reply" in caught.value.__notes__[0]


def test_server_ends_while_a_request_runs() -> None:
    with ThreadPoolExecutor() as pool, serve_script([reply("late", delay=60)]) as server:
        running = pool.submit(ask, server)
        while not server.requests:
            time.sleep(0.01)
        server.close()
        assert running.result().status_code == 503


def test_async_client() -> None:
    async def run(server: ModelServer) -> str:
        async with AsyncClient(server.url) as client:
            return (await client.complete("Hi.")).text

    with serve_script(["Hello."]) as server:
        assert asyncio.run(run(server)) == "Hello."


def test_parallel_servers_do_not_share_anything() -> None:
    with serve_script(["one"]) as first, serve_script(["two"]) as second:
        assert first.url != second.url
        assert (content(ask(second)), content(ask(first))) == ("two", "one")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: reply("a", json=1), "give either text or json"),
        (lambda: reply("a", times=0), "Expected `int` >= 1"),
        (lambda: reply("a", match="("), "match is not a regular expression"),
        (lambda: error(418), "unknown status 418"),
        (lambda: error("nope"), "unknown code 'nope'"),
        (lambda: call("f", {"a": 1}, b=2), "either as one value or as keywords"),
        (lambda: serve_script(crash_after=1), "crash_after: not an option of a model server"),
        (lambda: serve_script(chunk=0), "Expected `int` >= 1"),
        (lambda: serve_script(speed=1), "unknown field `speed`"),
    ],
)
def test_mistakes_of_the_test_are_errors(make: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make()
    assert message in str(caught.value)
