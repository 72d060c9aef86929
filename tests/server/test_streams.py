"""Streams on the wire, frame by frame."""

import json
import time
from typing import Any

import httpx
import pytest

from tests.protocols.anthropic_stream import read
from tests.support.requests import (
    CHAT,
    COMPLETIONS,
    SMALLEST,
    ask,
    frames,
    refused,
    saying,
    stream_texts,
    talking,
    text_of,
)
from tests.support.server_process import Running, server_fixture

ROUTES = pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
ROSES = "Roses are red, violets are blue."


def streamed(client: httpx.Client, path: str, /, **fields: Any) -> tuple[httpx.Response, list[Any]]:
    response = ask(client, path, stream=True, **fields)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    return response, frames(response.text)


def reasons(chunks: list[Any]) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            found.setdefault(choice["index"], [])
            if choice["finish_reason"]:
                found[choice["index"]].append(choice["finish_reason"])
    return found


def test_frames_of_a_chat(client: httpx.Client) -> None:
    before = int(time.time())
    response, sent = streamed(client, CHAT)
    created, fingerprint = sent[0]["created"], sent[0]["system_fingerprint"]
    assert before <= created <= time.time()
    assert fingerprint == ask(client, CHAT).json()["system_fingerprint"]

    def chunk(delta: dict[str, str], finish: str | None = None) -> dict[str, Any]:
        return {
            "id": response.headers["x-request-id"],
            "object": "chat.completion.chunk",
            "created": created,
            "model": "echo",
            "system_fingerprint": fingerprint,
            "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}],
        }

    assert sent == [
        chunk({"role": "assistant", "content": ""}),
        chunk({"content": "hell"}),
        chunk({"content": "o"}),
        chunk({}, "stop"),
        "[DONE]",
    ]
    assert response.headers["x-request-id"].startswith("chatcmpl-")


USAGE = {
    "prompt_tokens": 2,
    "completion_tokens": 2,
    "total_tokens": 4,
    "prompt_tokens_details": {"cached_tokens": 0},
    "completion_tokens_details": {"reasoning_tokens": 0},
}


@ROUTES
def test_usage_comes_last_and_only_on_request(client: httpx.Client, path: str) -> None:
    _, plain = streamed(client, path)
    *chunks, usage, done = streamed(client, path, stream_options={"include_usage": True})[1]
    assert done == "[DONE]"
    assert usage["choices"] == []
    assert usage["usage"] == USAGE
    assert usage["id"] == chunks[0]["id"]
    assert [chunk["usage"] for chunk in chunks] == [None] * len(chunks)
    assert len(plain) == len(chunks) + 1
    assert all("usage" not in chunk for chunk in plain[:-1])
    for options in (None, {}, {"include_usage": False}, {"include_usage": None}):
        assert "usage" not in streamed(client, path, stream_options=options)[1][-2]


@ROUTES
@pytest.mark.parametrize(
    "fields",
    [
        {"model": "poet"},
        {"model": "poet", "max_tokens": 3},
        {"model": "poet", "max_tokens": 8},
        {"model": "poet", "n": 3},
        {"model": "poet", "n": 2, "max_tokens": 1},
        {"model": "poet", "stop": "violets"},
        {"model": "poet", "stop": ["blue", "red, v", "red"]},
        {"model": "poet", "stop": "blue.!"},
        {"model": "poet", "stop": "s", "n": 3},
        {"model": "short"},
        {"model": "crashing"},
    ],
    ids=lambda fields: json.dumps(fields),
)
def test_stream_equals_the_whole_reply(client: httpx.Client, path: str, fields: dict[str, Any]) -> None:
    if fields["model"] == "crashing":
        fields = fields | {"max_tokens": 1}
    whole = ask(client, path, **fields)
    assert whole.status_code == 200, whole.text
    choices = whole.json()["choices"]
    *chunks, usage, _ = streamed(client, path, stream_options={"include_usage": True}, **fields)[1]
    assert stream_texts(chunks) == {choice["index"]: text_of(whole, at) for at, choice in enumerate(choices)}
    assert reasons(chunks) == {choice["index"]: [choice["finish_reason"]] for choice in choices}
    assert usage["usage"] == whole.json()["usage"]


@ROUTES
def test_finish_reason_length_at_the_effective_limit(client: httpx.Client, path: str) -> None:
    def reason(**fields: Any) -> tuple[str, int]:
        reply = ask(client, path, **fields).json()
        return reply["choices"][0]["finish_reason"], reply["usage"]["completion_tokens"]

    assert reason(model="poet", max_tokens=7) == ("length", 7)
    assert reason(model="poet", max_tokens=8) == ("stop", 8)
    # The newer name of the limit wins.
    assert path != CHAT or reason(model="poet", max_completion_tokens=1, max_tokens=5) == ("length", 1)
    # The script ends with the context: 20 tokens less those of the prompt.
    long = "x" * 48
    assert reason(model="short", **saying(path, long)) == ("length", 8)


@ROUTES
def test_choices_are_interleaved(client: httpx.Client, path: str) -> None:
    response, sent = streamed(client, path, model="slow", n=2, max_tokens=4)
    [stamp] = {(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in sent[:-1]}
    assert stamp[0] == response.headers["x-request-id"]
    order = [choice["index"] for chunk in sent[:-1] for choice in chunk["choices"]]
    assert all(len(chunk["choices"]) == 1 for chunk in sent[:-1])
    assert stream_texts(sent[:-1]) == dict.fromkeys(range(2), "tick tick tick t")
    assert reasons(sent[:-1]) == {index: ["length"] for index in range(2)}
    firsts = [order.index(index) for index in range(2)]
    lasts = [len(order) - 1 - order[::-1].index(index) for index in range(2)]
    assert max(firsts) < min(lasts)


@ROUTES
def test_usage_of_several_choices_counts_the_prompt_once(client: httpx.Client, path: str) -> None:
    usage = ask(client, path, n=4).json()["usage"]
    assert usage == USAGE | {"completion_tokens": 8, "total_tokens": 10}
    assert streamed(client, path, n=4, stream_options={"include_usage": True})[1][-2]["usage"] == usage


@pytest.mark.parametrize("fields", [{}, {"n": 2}, {"prompt": ["one", "two"], "n": 2}, {"max_tokens": 0}])
def test_echo_begins_with_the_prompt(client: httpx.Client, fields: dict[str, Any]) -> None:
    fields |= {"model": "poet", "echo": True}
    prompts = fields.get("prompt", ["hello"])
    reply = ROSES if "max_tokens" not in fields else ""
    expected = [prompt + reply for prompt in prompts for _ in range(fields.get("n", 1))]
    whole = ask(client, COMPLETIONS, **fields)
    assert [choice["text"] for choice in whole.json()["choices"]] == expected
    assert stream_texts(streamed(client, COMPLETIONS, **fields)[1][:-1]) == dict(enumerate(expected))


@ROUTES
def test_late_failure_is_an_error_frame_and_no_end(client: httpx.Client, path: str) -> None:
    _, several = streamed(client, path, model="failing", n=3)
    assert [list(frame) for frame in several].count(["error"]) == 1
    assert "error" in several[-1]
    _, sent = streamed(client, path, model="failing", stream_options={"include_usage": True})
    *chunks, last = sent
    assert stream_texts(chunks) == {0: "one two "}
    assert reasons(chunks) == {0: []}
    assert list(last) == ["error"]
    assert last["error"]["type"] == last["error"]["code"] == "inference_error"
    assert list(last["error"]) == ["message", "type", "param", "code"]


@ROUTES
def test_reply_names_the_model_that_answered(client: httpx.Client, path: str) -> None:
    for asked, answered in [
        ("gpt-4o", "poet"),
        ("GPT-4o-mini", "poet"),
        (" Poet ", "poet"),
        ("ORG/Nested", "org/nested"),
        ("", "echo"),
        (None, "echo"),
    ]:
        assert ask(client, path, model=asked).json()["model"] == answered
        assert {chunk["model"] for chunk in streamed(client, path, model=asked)[1][:-1]} == {answered}


@ROUTES
def test_tokens_are_sent_immediately(client: httpx.Client, path: str) -> None:
    body = SMALLEST[path] | {"model": "slow", "max_tokens": 12, "stream": True}
    with client.stream("POST", path, json=body) as response:
        arrivals = [time.monotonic() for line in response.iter_lines() if line.startswith("data: {")]
    # Twelve tokens, twenty a second.
    assert arrivals[-1] - arrivals[0] > 0.4


quiet = server_fixture(
    {
        "models": {
            "slow-to-start": {"engine": "scripted", "prefill_seconds": 1.3},
            "slow": {"engine": "scripted", "tokens_per_second": 0.8},
            "failing": {"engine": "scripted", "prefill_seconds": 0.9, "fail_after": 0},
            "fast": {"engine": "scripted", "tokens_per_second": 20},
            "narrow": {
                "engine": "scripted",
                "slots": 1,
                "replies": [{"output": "tick" * 12_000}],
                "tokens_per_second": 20,
            },
        },
        "limits": {"keepalive_seconds": 0.5, "queue_seconds": 1.2},
    }
)
"""A server with a short keep-alive interval."""


class TestKeepAlive:
    @ROUTES
    def test_before_the_first_token(self, quiet: Running, path: str) -> None:
        body = SMALLEST[path] | {"stream": True, "stream_options": {"include_usage": True}}
        with talking(quiet) as client, client.stream("POST", path, json=body) as response:
            assert response.status_code == 200
            pieces = list(response.iter_text())
        assert pieces[0] == ": keep-alive\n\n"
        text = "".join(pieces)
        comments = text[: text.index("data:")]
        assert comments.count(": keep-alive\n\n") >= 1
        assert comments.replace(": keep-alive\n\n", "") == ""
        sent = frames(text)
        assert stream_texts(sent[:-2]) == {0: "hello"}
        assert sent[-1] == "[DONE]"
        if path == CHAT:
            assert sent[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}

    def test_before_the_first_token_of_a_message(self, quiet: Running) -> None:
        body = SMALLEST[CHAT] | {"model": "slow-to-start", "max_tokens": 10, "stream": True}
        with talking(quiet) as client:
            response = client.post("/v1/messages", json=body)
        assert response.text.startswith(": keep-alive\n\n")
        assert read(response.content)[-1] == {"type": "message_stop"}

    def test_between_tokens(self, quiet: Running) -> None:
        with talking(quiet) as client:
            response, sent = streamed(client, CHAT, model="slow")
        first, second = response.text.index('"hell"'), response.text.index('"o"')
        assert ": keep-alive\n\n" in response.text[first:second]
        assert stream_texts(sent[:-1]) == {0: "hello"}

    def test_no_comments_while_tokens_arrive(self, quiet: Running) -> None:
        with talking(quiet) as client:
            response, _ = streamed(client, COMPLETIONS, model="fast", prompt="hello " * 20)
        assert ": keep-alive" not in response.text

    def test_failure_after_the_headers_is_an_error_frame(self, quiet: Running) -> None:
        with talking(quiet) as client:
            *_, last = streamed(client, CHAT, model="failing")[1]
            assert last["error"]["code"] == "inference_error"
            assert ask(client, CHAT, model="failing").status_code == 500

    def test_in_the_queue_and_its_end_is_an_error_frame(self, quiet: Running) -> None:
        body = SMALLEST[CHAT] | {"model": "narrow", "stream": True}
        with talking(quiet) as client, client.stream("POST", CHAT, json=body) as first:
            assert first.status_code == 200
            with client.stream("POST", CHAT, json=body) as second:
                assert second.status_code == 200
                text = second.read().decode()
            response = ask(client, CHAT, model="narrow")
            refused(response, 503, code="overloaded")
            assert int(response.headers["retry-after"]) >= 1
        assert text.startswith(": keep-alive\n\n")
        assert [frame["error"]["code"] for frame in frames(text)] == ["overloaded"]
