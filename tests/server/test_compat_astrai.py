"""What clients of AstrAI's server rely on: served by Dragoman, and by Dragoman in front of such a server."""

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from dragoman import Client, StopMatcher
from tests.support.compat_servers import WORDS, CompatServer, astrai
from tests.support.requests import CHAT, HELLO, ask, frames, refused, talking, text_of, under_way
from tests.support.sdk import anthropic_sdk
from tests.support.server_process import Running, Serving

TEXT = "".join(WORDS)
MESSAGES = "/v1/messages"
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]
PROTOCOLS = ["chat", "messages"]


@pytest.fixture(scope="module")
def upstream() -> Iterator[CompatServer]:
    with CompatServer(astrai).running() as server:
        yield server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, serving: Serving, upstream: CompatServer) -> Iterator[Running]:
    relayed = {"engine": "upstream", "url": upstream.url}
    config: dict[str, Any] = {
        "models": {
            **{protocol: relayed | {"protocol": protocol} for protocol in PROTOCOLS},
            "poet": {"engine": "scripted", "chunk": 2, "replies": [{"output": TEXT}]},
            "short": {"engine": "scripted", "context": 20},
            # Ten minutes.
            "endless": {"engine": "scripted", "tokens_per_second": 20, "replies": [{"output": "tick" * 12_000}]},
        },
        "default": "poet",
    }
    with serving(tmp_path_factory.mktemp("astrai"), config) as running:
        yield running


@pytest.fixture
def client(server: Running) -> Iterator[httpx.Client]:
    with talking(server) as made:
        yield made


@pytest.mark.parametrize("model", [*PROTOCOLS, "poet"])
def test_two_protocols_share_one_generation(client: httpx.Client, server: Running, model: str) -> None:
    assert text_of(ask(client, CHAT, model=model)) == TEXT
    *chunks, done = frames(ask(client, CHAT, model=model, stream=True).text)
    assert done == "[DONE]"
    assert "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"]) == TEXT
    with anthropic_sdk(server) as anthropic:
        messages: Any = HELLO
        reply = anthropic.messages.create(model=model, max_tokens=50, messages=messages)
        assert reply.content[0].type == "text"
        assert reply.content[0].text == TEXT
        with anthropic.messages.stream(model=model, max_tokens=50, messages=messages) as stream:
            assert "".join(stream.text_stream) == TEXT


def test_usage_frame_of_the_server_is_understood(client: httpx.Client) -> None:
    usage = ask(client, CHAT, model="chat").json()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (7, len(WORDS))
    usage = client.post(MESSAGES, json={"model": "messages", "max_tokens": 50, "messages": HELLO}).json()["usage"]
    assert (usage["input_tokens"], usage["output_tokens"]) == (7, 4)


def test_caller_that_does_not_stream_gets_a_whole_reply(client: httpx.Client, upstream: CompatServer) -> None:
    """Also after a stream: this server's streams have no `usage`."""
    for is_streamed in (False, True, False):
        upstream.requests.clear()
        response = ask(client, CHAT, model="chat", stream=is_streamed)
        assert response.status_code == 200
        assert [bool(body.get("stream")) for body in upstream.bodies] == [is_streamed]
        if not is_streamed:
            reply = response.json()
            usage = (reply["usage"]["prompt_tokens"], reply["usage"]["completion_tokens"])
            assert (reply["choices"][0]["finish_reason"], usage) == ("stop", (7, len(WORDS)))


@pytest.mark.parametrize("model", [*PROTOCOLS, "poet"])
def test_events_of_the_anthropic_stream(client: httpx.Client, model: str) -> None:
    body = {"model": model, "max_tokens": 50, "messages": HELLO, "stream": True}
    blocks = client.post(MESSAGES, json=body).text.removesuffix("\n\n").split("\n\n")
    events = [block.split("\n") for block in blocks]
    names = [name.removeprefix("event: ") for name, _ in events]
    assert [json.loads(data.removeprefix("data: "))["type"] for _, data in events] == names
    kinds = list(dict.fromkeys(name for name in names if name != "ping"))
    assert kinds == [
        *("message_start", "content_block_start", "content_block_delta", "content_block_stop"),
        *("message_delta", "message_stop"),
    ]
    # `[DONE]` is not for Anthropic's clients.
    assert "[DONE]" not in "".join(blocks)


@pytest.mark.parametrize("model", [*PROTOCOLS, "poet"])
def test_stop_sequence_is_cut_and_named(server: Running, model: str) -> None:
    with anthropic_sdk(server) as anthropic:
        messages: Any = HELLO
        reply = anthropic.messages.create(model=model, max_tokens=50, messages=messages, stop_sequences=[" re", "x"])
    assert reply.content[0].type == "text"
    assert (reply.content[0].text, reply.stop_reason, reply.stop_sequence) == ("Roses are", "stop_sequence", " re")


@pytest.mark.parametrize("model", ["chat", "poet"])
def test_openai_stop_is_honoured(client: httpx.Client, model: str) -> None:
    response = ask(client, CHAT, model=model, stop=["s a"])
    assert text_of(response) == "Rose"
    streamed = frames(ask(client, CHAT, model=model, stop=["s a"], stream=True).text)[:-1]
    assert "".join(choice["delta"].get("content") or "" for chunk in streamed for choice in chunk["choices"]) == "Rose"


@pytest.mark.parametrize("stop", [["re"], ["red", "re"]])
def test_half_a_stop_string_does_not_leak_and_the_first_match_counts(client: httpx.Client, stop: list[str]) -> None:
    said = [{"role": "user", "content": "never r rextra re"}]
    chunks = frames(ask(client, CHAT, model="short", messages=said, stop=stop, stream=True).text)[:-1]
    pieces = [choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"]]
    assert "".join(pieces) == "never r "
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


def test_stop_scan_is_linear() -> None:
    """In processor time, which does not depend on what else runs."""

    def seconds(count: int) -> float:
        matcher, began = StopMatcher(["aab", "never"]), time.process_time()
        for _ in range(count):
            assert matcher.feed("aa ") is None
        return time.process_time() - began

    seconds(1000)
    assert seconds(40_000) < 40 * max(seconds(4000), 0.001)


def test_finish_reason_is_length_at_the_limit(client: httpx.Client) -> None:
    reply = ask(client, CHAT, model="poet", max_tokens=2).json()
    assert (reply["choices"][0]["finish_reason"], reply["usage"]["completion_tokens"]) == ("length", 2)
    body = {"model": "poet", "max_tokens": 2, "messages": HELLO}
    assert client.post(MESSAGES, json=body).json()["stop_reason"] == "max_tokens"


def test_frames_end_with_an_empty_line(client: httpx.Client) -> None:
    for model in (*PROTOCOLS, "poet"):
        text = ask(client, CHAT, model=model, stream=True).text
        assert text.endswith("data: [DONE]\n\n")
        assert text.count("data: ") == text.count("\n\n")


def test_prompt_is_never_cut(client: httpx.Client) -> None:
    said = [{"role": "user", "content": "word " * 100}]
    refused(ask(client, CHAT, model="short", messages=said), 400, param="messages", code="context_length_exceeded")
    body = {"model": "short", "max_tokens": 5, "messages": said}
    assert "prompt is too long" in client.post(MESSAGES, json=body).json()["error"]["message"]


def test_generation_ends_when_the_client_leaves(client: httpx.Client, server: Running) -> None:
    with client.stream("POST", CHAT, json={"model": "endless", "messages": HELLO, "stream": True}) as stream:
        lines = stream.iter_lines()
        next(lines)
        under_way(server, "endless")
    under_way(server, "endless", 0)


def test_tool_call_deltas(client: httpx.Client) -> None:
    [call] = ask(client, CHAT, model="chat", tools=TOOLS).json()["choices"][0]["message"]["tool_calls"]
    assert (call["id"], call["function"]["name"]) == ("call_0", "weather")
    assert json.loads(call["function"]["arguments"]) == {"city": "Paris"}


def test_health_and_stats(client: httpx.Client) -> None:
    assert client.get("/health").status_code == 200
    ask(client, CHAT, model="poet")
    stats = client.get("/stats").json()["models"]["poet"]
    assert {"running", "waiting", "prompt_tokens", "completion_tokens", "tokens_per_second"} <= stats.keys()
    assert stats["time_to_first_token"]["mean"] > 0
    assert {"p50", "p95"} <= stats["queue"].keys()


def test_several_text_blocks_are_all_read(server: Running) -> None:
    with talking(server) as client:
        content = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
        body = {"model": "chat", "max_tokens": 50, "messages": [{"role": "user", "content": content}]}
        assert client.post(MESSAGES, json=body).status_code == 200


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_client_of_the_server(upstream: CompatServer, protocol: Any) -> None:
    with Client(upstream.url, model="m", protocol=protocol) as client:
        with client.stream("hello") as events:
            assert len(list(events)) > 3
        for reply in (client.complete("hello"), events.reply()):
            assert (reply.text, reply.reason) == (TEXT, "stop")
            assert (reply.usage.prompt, reply.usage.completion) == (7, 4)
            assert reply.id
