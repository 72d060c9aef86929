"""The upstream engine with scripted servers: names, keys, rejected fields, errors, other routes."""

import asyncio
import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from dragoman.config.loading import Flags, load_settings
from dragoman.config.sections import KeyLimits, Keys
from dragoman.config.settings import Settings
from dragoman.core.errors import ConfigError
from dragoman.engines.upstream.engine import UpstreamEngine
from dragoman.engines.upstream.options import UpstreamOptions
from dragoman.server.telemetry.recorder import without_secrets
from tests.engines.upstream_app import CHAT, USER, ask, ask_all, client_of, sent, upstream_app
from tests.support.bad_server import (
    HEL,
    HELLO,
    REPLY,
    BadServer,
    Script,
    answer,
    cut,
    delta,
    finish,
    frame,
    refused,
    stream,
)

LABELS: dict[str, Any] = {"user": "ann", "prompt_cache_key": "k", "safety_identifier": "s", "service_tier": "flex"}
MESSAGE = {"type": "message", "content": [{"type": "text", "text": "Hello"}], "stop_reason": "end_turn"}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]


@pytest.mark.parametrize(("options", "name"), [({"model": "gpt-upstream"}, "gpt-upstream"), ({}, "m")])
def test_model_name_on_the_server_and_in_the_reply(server: BadServer, options: dict[str, Any], name: str) -> None:
    server.play(HELLO)
    response = ask(upstream_app(server.url, **options))
    assert response.json()["model"] == "m"
    assert sent(server)[0]["model"] == name


async def test_password_in_url_is_sent_only_to_the_server(server: BadServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    server.play(HELLO, refused("500 Oh"))
    url = server.url.replace("://", "://me:hidden@")
    app = upstream_app(url)
    async with client_of(app) as client:
        body = {"model": "m", "messages": USER}
        assert [(await client.post(CHAT, json=body)).status_code for _ in range(2)] == [200, 502]
        drained = (await client.post("/admin/upstreams/drain", json={"model": "m", "url": url})).text
        shown = (await client.get("/admin/upstreams")).text
    assert '"drained"' in drained
    assert server.url.replace("://", "://***@") in shown
    assert "hidden" not in drained + shown + caplog.text + json.dumps(without_secrets(app.settings))
    # "me:hidden"
    assert "\r\nauthorization: basic bwu6aglkzgvu\r\n" in server.heads[-1]


@pytest.mark.parametrize("script", [HELLO, [*cut(HEL), "close"]], ids=["no usage", "cut off"])
def test_unreported_tokens_are_estimated_for_quota_and_metrics(server: BadServer, script: Script) -> None:
    server.play(script)
    limits = Keys(limits=KeyLimits(tokens_per_minute=5000))
    app = upstream_app(server.url, settings=Settings(api_keys=("k",), keys=limits))
    headers = {"authorization": "Bearer k"}
    first, second = ask_all(app, [{"max_tokens": 5, "stream": True}] * 2, headers=headers)
    left = [int(reply.headers["x-ratelimit-remaining-tokens"]) for reply in (first, second)]
    counted = app.telemetry.metrics.models["m"]
    assert counted.tokens["unfinished_tokens"] == 2 * (left[0] - left[1]) > 20
    assert (counted.tokens["prompt_tokens"], counted.tokens["completion_tokens"]) == (0, 0)
    assert counted.first_token.count == 2
    assert '"usage":{' not in first.text


def test_request_fields_are_passed_on(server: BadServer) -> None:
    server.play(HELLO)
    shape = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}, "strict": True}}
    fields: dict[str, Any] = {"temperature": 0.5, "seed": 7, "max_tokens": 9, "tool_choice": "required"}
    fields |= {"stop": ["x"], "reasoning_effort": "low", "logit_bias": {"5": -1.0}, "logprobs": True, "top_logprobs": 1}
    responses = ask_all(upstream_app(server.url), [fields | {"tools": TOOLS}, {"response_format": shape}])
    assert [response.status_code for response in responses] == [200, 200]
    first, second = sent(server)
    assert fields.items() <= first.items()
    assert first["tools"][0]["function"]["name"] == "f"
    assert second["response_format"]["json_schema"]["schema"] == {"type": "object"}


def test_api_key_is_read_from_the_environment(server: BadServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="THE_KEY has no key"):
        UpstreamEngine("m", UpstreamOptions(url=server.url, key_env="THE_KEY"))
    monkeypatch.setenv("THE_KEY", "secret")
    engine = UpstreamEngine("m", UpstreamOptions(url=server.url, key_env="THE_KEY"))
    assert engine.servers[0].planner.headers("chat")["authorization"] == "Bearer secret"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "url is missing"),
        ({"url": "localhost:80"}, "expected an address"),
        ({"urls": ["http://a", "http://a/v1"]}, "same address twice"),
        ({"urls": ["one", "two"]}, "'one': expected an address.*'two': expected an address"),
        ({"url": "http://a", "urls": ["http://b"]}, "exclude each other"),
        ({"url": "http://a", "proxy": "nonsense"}, "proxy: 'nonsense': expected an address"),
        ({"url": "http://a/v1?api-version=1"}, "must not contain"),
        ({"url": "http://a", "model": "x", "models": "all"}, "exclude each other"),
        ({"url": "http://a", "protocol": "smtp"}, "protocol"),
        ({"urls": [{"url": "http://a", "key": "secret"}]}, "unknown key"),
    ],
)
def test_invalid_options(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    file = tmp_path / "dragoman.json"
    file.write_text(json.dumps({"models": {"m": {"engine": "upstream", **options}}}))
    with pytest.raises(ConfigError, match=rf"dragoman.json:1: models\.m.*{words}"):
        load_settings(str(file), Flags(), {})


@pytest.mark.parametrize(
    ("field", "message", "code"),
    [
        ("seed", "Unsupported parameter: 'seed' is not supported with this model", "unsupported_parameter"),
        ("prompt_cache_key", "Unrecognized request argument supplied: prompt_cache_key", None),
    ],
)
def test_rejected_optional_parameter_is_omitted_reported_and_remembered(
    server: BadServer, field: str, message: str, code: str | None
) -> None:
    server.play(refused("400 Bad", message, code), HELLO)
    responses = ask_all(upstream_app(server.url), [{"seed": 1, "temperature": 1.5, **LABELS}] * 2)
    assert [response.headers["x-dragoman-ignored"] for response in responses] == [field, field]
    assert [field in body for body in sent(server)] == [True, False, False]
    assert all((body["temperature"], body["user"]) == (1.5, "ann") for body in sent(server))


def test_rejected_parameter_is_an_error_in_strict_mode(server: BadServer) -> None:
    server.play(refused("400 Bad", "logprobs are not supported"), HELLO)
    response = ask(upstream_app(server.url), headers={"x-dragoman-strict": "true"}, logprobs=True)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "logprobs")


@pytest.mark.parametrize(
    "no",
    [
        refused("400 Bad", "registry/m does not support tools"),
        refused("500 Oops", "tools param requires --jinja flag"),
        refused("400 Bad", '"auto" tool choice requires --enable-auto-tool-choice; tools not enabled'),
    ],
)
def test_rejected_essential_parameter_is_not_supported(server: BadServer, no: Script) -> None:
    server.play(no, HELLO)
    first, second = ask_all(upstream_app(server.url), [{"tools": TOOLS}, {}])
    assert (first.status_code, first.json()["error"]["param"]) == (501, "tools")
    assert second.status_code == 200


UNEXPLAINED = refused("400 Bad", "invalid request body")


def test_unexplained_rejection_is_tried_once_without_optional_fields(server: BadServer) -> None:
    server.play(UNEXPLAINED, HELLO)
    app = upstream_app(server.url)
    first, second = ask_all(app, [{"stream": True, "seed": 1, "temperature": 0.5, "max_tokens": 9}] * 2)
    assert [first.headers["x-dragoman-ignored"], second.headers["x-dragoman-ignored"]] == ["seed", "seed"]
    bodies = sent(server)
    assert [("stream_options" in body, "seed" in body) for body in bodies] == [
        *[(True, True), (False, False), (False, False)]
    ]
    assert all((body["temperature"], body["max_tokens"], body["stream"]) == (0.5, 9, True) for body in bodies)


@pytest.mark.parametrize(
    ("fields", "requests"),
    [({}, 1), ({"seed": 1, "min_p": 0.1}, 2), ({"stream": True}, 2), ({"stream": True, "seed": 1, "user": "ann"}, 2)],
)
def test_unexplained_rejection_is_never_sent_more_than_twice(
    server: BadServer, fields: dict[str, Any], requests: int
) -> None:
    server.play(UNEXPLAINED)
    app = upstream_app(server.url)
    assert [response.status_code for response in ask_all(app, [fields] * 2)] == [400, 400]
    # What did not help is not left out later.
    assert len(sent(server)) == 2 * requests
    assert sent(server)[0] == sent(server)[requests]


def test_rejections_by_name_are_sent_once_per_field(server: BadServer) -> None:
    refusals = [refused("400 Bad", f"{name} is not supported") for name in ("seed", "logit_bias", "min_p")]
    server.play(*refusals, UNEXPLAINED, HELLO)
    fields: dict[str, Any] = {"seed": 1, "logit_bias": {"5": 1}, "min_p": 0.1, "top_k": 5}
    response = ask(upstream_app(server.url), **fields)
    assert set(response.headers["x-dragoman-ignored"].split(", ")) == set(fields)
    assert [sum(name in body for name in fields) for body in sent(server)] == [4, 3, 2, 1, 0]


async def test_concurrent_requests_with_a_rejected_field_all_succeed(server: BadServer) -> None:
    def reject_seed(head: str, body: bytes) -> Script:
        no = refused("400 Bad", "Unsupported parameter: 'seed'", "unsupported_parameter")
        return [0.2, *no] if b'"seed"' in body else HELLO

    server.play(reject_seed)
    async with client_of(upstream_app(server.url)) as client:
        body = {"model": "m", "messages": USER, "seed": 1}
        responses = await asyncio.gather(*(client.post(CHAT, json=body) for _ in range(3)))
    assert [response.status_code for response in responses] == [200] * 3


def test_server_that_refuses_to_stream_by_name(server: BadServer) -> None:
    server.play(refused("400 Bad", "Streaming is not supported"), answer(REPLY))
    first, second = ask_all(upstream_app(server.url), [{"stream": True}] * 2)
    assert '"content":"Hello"' in first.text
    assert '"content":"Hello"' in second.text
    assert ["stream" in body for body in sent(server)] == [True, False, False]


def test_explained_rejection_is_sent_once(server: BadServer) -> None:
    server.play(refused("400 Bad", "messages must not be empty"))
    assert ask(upstream_app(server.url), seed=1).status_code == 400
    assert len(sent(server)) == 1


def test_field_that_was_accepted_before_is_not_left_out(server: BadServer) -> None:
    server.play(HELLO, UNEXPLAINED, HELLO)
    bodies = [{"seed": seed, "user": "ann", "stream": True} for seed in (1, 2, 3)]
    responses = ask_all(upstream_app(server.url), bodies)
    assert [response.status_code for response in responses] == [200, 400, 200]
    assert [(body["seed"], body["user"], "stream_options" in body) for body in sent(server)] == [
        (seed, "ann", True) for seed in (1, 2, 3)
    ]


def test_unexplained_rejection_in_strict_mode_does_not_drop_fields(server: BadServer) -> None:
    server.play(UNEXPLAINED, HELLO)
    response = ask(upstream_app(server.url), headers={"x-dragoman-strict": "true"}, seed=1)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "seed")


def test_constraint_missing_in_a_protocol_is_not_supported(server: BadServer) -> None:
    response = ask(upstream_app(server.url, protocol="messages"), structured_outputs={"regex": "a+"})
    assert (response.status_code, response.json()["error"]["param"]) == (501, "structured_outputs.regex")
    assert not server.requests["/v1/messages"]


@pytest.mark.parametrize(
    "message",
    ["Extra inputs are not permitted: stream_options", "stream_options: invalid", "Unknown field: include_usage"],
)
def test_server_that_rejects_stream_options(server: BadServer, message: str) -> None:
    server.play(refused("422 No", message), HELLO)
    first, second = ask_all(upstream_app(server.url), [{"stream": True, "seed": 1}] * 2)
    for response in (first, second):
        assert response.status_code == 200
        assert "x-dragoman-ignored" not in response.headers
    assert [("stream_options" in body, "seed" in body) for body in sent(server)] == [
        *[(True, True), (False, True), (False, True)]
    ]


def test_fields_missing_in_a_protocol_are_reported(server: BadServer) -> None:
    server.play(answer(MESSAGE), path="/v1/messages")
    app = upstream_app(server.url, protocol="auto")
    response = ask(app, min_p=0.1, logprobs=True)
    assert response.json()["choices"][0]["message"]["content"] == "Hello"
    assert set(response.headers["x-dragoman-ignored"].split(", ")) == {"min_p", "logprobs"}


OPEN: dict[str, Any] = {
    "messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "Hel"}],
    "continue_final_message": True,
    "add_generation_prompt": False,
}


def test_continued_message_is_passed_on(server: BadServer) -> None:
    server.play(HELLO)
    response = ask(upstream_app(server.url), **OPEN)
    assert OPEN.items() <= sent(server)[-1].items()
    assert "x-dragoman-ignored" not in response.headers
    server.play(answer(MESSAGE), path="/v1/messages")
    response = ask(upstream_app(server.url, protocol="messages"), **OPEN)
    assert sent(server, "/v1/messages")[-1]["messages"][-1]["role"] == "assistant"
    assert "x-dragoman-ignored" not in response.headers


def test_continued_message_that_the_server_rejects_is_reported(server: BadServer) -> None:
    server.play(refused("400 Bad", "Unrecognized request argument supplied: continue_final_message"), HELLO)
    responses = ask_all(upstream_app(server.url), [OPEN] * 2)
    assert [response.headers["x-dragoman-ignored"] for response in responses] == ["continue_final_message"] * 2
    assert ["continue_final_message" in body for body in sent(server)] == [True, False, False]


def test_labels_are_passed_on(server: BadServer) -> None:
    server.play(HELLO)
    response = ask(upstream_app(server.url), metadata={"a": "b"}, **LABELS)
    assert {name: sent(server)[-1].get(name) for name in (*LABELS, "metadata")} == LABELS | {"metadata": None}
    assert response.headers["x-dragoman-ignored"] == "metadata"
    assert "x-dragoman-ignored" not in ask(upstream_app(server.url), service_tier="auto").headers
    assert "service_tier" not in sent(server)[-1]
    server.play(answer(MESSAGE), path="/v1/messages")
    response = ask(upstream_app(server.url, protocol="messages"), **LABELS)
    assert sent(server, "/v1/messages")[-1]["metadata"] == {"user_id": "ann"}
    ignored = set(response.headers["x-dragoman-ignored"].split(", "))
    assert ignored == {"prompt_cache_key", "safety_identifier", "service_tier"}


def marked(mark: dict[str, str], places: Collection[str]) -> dict[str, Any]:
    """The fields of a request with `cache_control` at the end of these places."""
    control = {place: {"cache_control": mark} if place in places else {} for place in ("tools", "system", "messages")}
    tool = {"name": "f", "input_schema": {"type": "object"}} | control["tools"]
    system = [{"type": "text", "text": "Be brief."} | control["system"]]
    content = [{"type": "text", "text": "hello"} | control["messages"]]
    return {"max_tokens": 9, "tools": [tool], "system": system, "messages": [{"role": "user", "content": content}]}


@pytest.mark.parametrize("mark", [{"type": "ephemeral"}, {"type": "ephemeral", "ttl": "1h"}], ids=["5m", "1h"])
@pytest.mark.parametrize("places", [(), ("tools",), ("system",), ("messages",), ("tools", "system", "messages")])
def test_cache_control_is_passed_on(server: BadServer, places: tuple[str, ...], mark: dict[str, str]) -> None:
    server.play(answer(MESSAGE), path="/v1/messages")
    response = ask(upstream_app(server.url, protocol="messages"), "/v1/messages", **marked(mark, places))
    assert "x-dragoman-ignored" not in response.headers
    body = sent(server, "/v1/messages")[-1]
    ends = {"tools": body["tools"][-1], "system": body["system"][-1], "messages": body["messages"][-1]["content"][-1]}
    found = {name: end.get("cache_control") for name, end in ends.items() if isinstance(end, dict)}
    assert {name for name, control in found.items() if control == mark} == set(places)
    server.play(HELLO)
    response = ask(upstream_app(server.url), "/v1/messages", **marked(mark, places))
    assert response.headers.get("x-dragoman-ignored") == ("cache_control" if places else None)


def test_usage_is_reported_by_the_server(server: BadServer) -> None:
    used = {"prompt_tokens": 30, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 20}}
    server.play(stream(HEL, finish(usage=used)))
    usage = ask(upstream_app(server.url)).json()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (30, 2, 32)
    assert usage["prompt_tokens_details"]["cached_tokens"] == 20


def test_usage_of_a_reply_ended_by_a_stop_string(server: BadServer) -> None:
    """The server ignores stop strings, so the pipeline ends the reply."""
    used = {"prompt_tokens": 3, "completion_tokens": 2}
    server.play(answer(REPLY | {"usage": used}))
    whole = ask(upstream_app(server.url), stop="lo").json()
    assert whole["choices"][0]["message"]["content"] == "Hel"
    assert (whole["usage"]["prompt_tokens"], whole["usage"]["completion_tokens"]) == (3, 2)
    server.play(stream(HEL, delta(content="lo"), 0.05, finish(usage=used)))
    cut_short = ask(upstream_app(server.url), stop="lo")
    assert cut_short.json()["usage"]["completion_tokens"] == 0
    assert "stop string" in cut_short.headers["x-dragoman-warning"]


def test_log_contains_the_request_id_of_a_failure(server: BadServer, caplog: pytest.LogCaptureFixture) -> None:
    server.play(refused("500 Oops", "out of paper"))
    response = ask(upstream_app(server.url))
    line = next(record for record in caplog.records if "out of paper" in record.getMessage())
    request_id = response.headers["x-request-id"]
    assert f"request {request_id}: model m: {server.url}" in line.getMessage()
    assert line.__dict__["request_id"] == request_id


def test_completions_of_text_and_token_ids(server: BadServer) -> None:
    reply = {"choices": [{"text": " world", "finish_reason": "length"}], "usage": {"prompt_tokens": 1}}
    server.play(answer(reply), path="/v1/completions")
    app = upstream_app(server.url)
    first, second = ask_all(app, [{"prompt": "hello", "echo": True}, {"prompt": [1, 2]}], "/v1/completions")
    assert first.json()["choices"][0]["text"] == "hello world"
    assert second.json()["choices"][0]["finish_reason"] == "length"
    assert [body["prompt"] for body in sent(server, "/v1/completions")] == ["hello", [1, 2]]


def test_server_without_completions(server: BadServer) -> None:
    server.play(HELLO)
    assert ask(upstream_app(server.url), "/v1/completions", prompt="hello").status_code == 501


def test_embeddings_and_token_counts(server: BadServer) -> None:
    vectors = {"data": [{"embedding": [3, 4]}, {"embedding": [0, 1]}], "usage": {"prompt_tokens": 5}}
    server.play(answer(vectors), path="/v1/embeddings")
    server.also(answer({"input_tokens": 12}), path="/v1/messages/count_tokens")
    made = ask(upstream_app(server.url), "/v1/embeddings", input=["a", "b"]).json()
    assert made["data"][0]["embedding"] == pytest.approx([0.6, 0.8])
    assert made["usage"]["prompt_tokens"] == 5
    counted = ask(upstream_app(server.url), "/v1/messages/count_tokens")
    assert counted.json() == {"input_tokens": 12}
    server.play(HELLO)
    assert ask(upstream_app(server.url), "/v1/embeddings", input=["a"]).status_code == 501
    assert ask(upstream_app(server.url), "/v1/messages/count_tokens").status_code == 501


def test_format_option_parses_plain_text(server: BadServer) -> None:
    text = '<think>Hmm</think><tool_call>{"name": "f", "arguments": {}}</tool_call>'
    server.play(stream(*(delta(content=text[at : at + 5]) for at in range(0, len(text), 5)), finish()))
    message = ask(upstream_app(server.url, format="hermes"), tools=TOOLS).json()["choices"][0]["message"]
    assert message["reasoning_content"] == "Hmm"
    assert message["tool_calls"][0]["function"]["name"] == "f"
    unparsed = ask(upstream_app(server.url), tools=TOOLS, tool_choice="required")
    assert unparsed.json()["choices"][0]["message"]["content"] == text


@pytest.mark.parametrize("status", ["401 Unauthorized", "403 Forbidden", "402 Payment Required"])
def test_rejected_upstream_key_is_502(server: BadServer, status: str) -> None:
    server.play(refused(status, f"key sk-123 at {server.url}"))
    response = ask(upstream_app(server.url))
    assert response.status_code == 502
    assert "sk-123" not in response.text


def test_retry_after_is_passed_on(server: BadServer) -> None:
    server.play(refused("429 Too Many", retry_after="7"))
    app = upstream_app(server.url)
    response = ask(app)
    assert (response.status_code, response.headers["retry-after"]) == (429, "7")
    # It does not count as a rate limit of our own.
    assert not app.telemetry.metrics.limited


async def test_server_without_room_for_batch_requests_stays_available(server: BadServer) -> None:
    async with client_of(upstream_app(server.url)) as client:
        server.play(refused("429 Too Many", "busy", "resource_unavailable", retry_after="7"))
        refusal = await client.post(CHAT, json={"model": "m", "messages": USER, "service_tier": "flex"})
        assert (refusal.status_code, refusal.headers["retry-after"]) == (429, "7")
        assert refusal.json()["error"]["code"] == "resource_unavailable"
        assert sent(server)[-1]["service_tier"] == "flex"
        server.play(HELLO)
        assert (await client.post(CHAT, json={"model": "m", "messages": USER})).status_code == 200


def test_retry_on_another_server_before_the_first_event_only(server: BadServer, other: BadServer) -> None:
    scripts: list[Script] = [["reset"], ["close"], refused("500 Oops"), refused("429 Busy"), refused("401 No")]
    for script in [*scripts, [*cut(), "close"]]:
        server.play(script)
        other.play(HELLO)
        app = upstream_app({"url": server.url}, {"url": other.url, "rank": 1})
        assert ask(app).json()["choices"][0]["message"]["content"] == "Hello", script
        assert (len(server.requests[CHAT]), len(other.requests[CHAT])) == (1, 1)
    server.play([*cut(HEL), "close"])
    broken = ask(upstream_app({"url": server.url}, {"url": other.url, "rank": 1}), stream=True)
    assert "stream_cut_off" in broken.text
    server.play(refused("400 Bad", "maximum context length is 9"))
    assert ask(upstream_app({"url": server.url}, {"url": other.url, "rank": 1})).status_code == 400
    assert len(other.requests[CHAT]) == 1


@pytest.mark.parametrize("stop", [None, "zz"])
@pytest.mark.parametrize("broken", [[*cut(HEL), "close"], stream(HEL, frame({"error": "boom"})), [*cut(HEL), "hang"]])
def test_unstreamed_reply_is_retried_on_another_server(
    server: BadServer, other: BadServer, broken: Script, stop: str | None
) -> None:
    server.play(broken)
    other.play(HELLO)
    urls = (server.url, {"url": other.url, "rank": 1})
    silence = server.silence
    answer = ask(upstream_app(*urls, silence_seconds=silence), stop=stop)
    assert (answer.status_code, answer.json()["choices"][0]["message"]["content"]) == (200, "Hello")
    assert "Hel" in ask(upstream_app(*urls, silence_seconds=silence), stream=True).text
    assert len(other.requests[CHAT]) == 1
    server.play(broken)
    several = ask(upstream_app(*urls, silence_seconds=silence), n=3).json()["choices"]
    assert [choice["message"]["content"] for choice in several] == ["Hello"] * 3


def test_json_reply_to_a_streaming_request(server: BadServer) -> None:
    server.play(answer(REPLY))
    assert ask(upstream_app(server.url), stream=True).text.endswith("data: [DONE]\n\n")
