"""What clients of Lethean's Go server rely on: served by Dragoman, and by Dragoman in front of such a server."""

import asyncio
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from dragoman import Client, Engine
from dragoman.core.engine import Output
from dragoman.core.errors import BadAnswer, BadRequest, ModelNotFound
from dragoman.core.request import GenerationRequest
from tests.support.compat_servers import CITY, LETHEAN_TOKENS, THOUGHT, CompatServer, lethean
from tests.support.requests import CHAT, HELLO, ask, frames, refused, talking, text_of
from tests.support.server_process import Running, Serving, command_of

CHANNELS = "<|channel>thought\nA capital.<|channel>assistant\nParis."
CLOSED_CHANNELS = "<|channel>thought\nA capital.<channel|>Paris."
OTHER_STYLE = "<think>A capital.</think>Paris."


class Sampled(Engine):
    """Tells the sampling that it gets."""

    def supports(self) -> frozenset[str]:
        return super().supports() | {"temperature", "top_p", "top_k", "max_tokens"}

    def generate(self, request: GenerationRequest) -> Iterator[Output]:
        sampling = request.sampling
        yield f"{sampling.temperature} {sampling.top_p} {sampling.top_k} {request.max_tokens}"


class Loading(Engine):
    """Does not load before the end of the test."""

    async def start(self) -> None:
        await asyncio.Event().wait()

    def generate(self, request: GenerationRequest) -> Iterator[Output]:
        yield "never"


@pytest.fixture(scope="module")
def upstream() -> Iterator[CompatServer]:
    with CompatServer(lethean).running() as server:
        yield server


def scripted(output: str, **options: Any) -> dict[str, Any]:
    return {"engine": "scripted", "replies": [{"output": output}], **options}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, serving: Serving, upstream: CompatServer) -> Iterator[Running]:
    relayed = {"engine": "upstream", "url": upstream.url, "protocol": "chat"}
    config = {
        "models": {
            "gemma": relayed,
            "other": relayed | {"model": "missing"},
            "channels": scripted(CHANNELS, format="channel", chunk=3),
            "closed-channels": scripted(CLOSED_CHANNELS, format="channel", chunk=3),
            "other-style": scripted(OTHER_STYLE, format="hermes", chunk=3),
            "sampled": {
                "engine": f"{__name__}:Sampled",
                "sampling": {"temperature": 1.0, "top_p": 0.95, "top_k": 64, "max_tokens": 2048},
            },
            "loading": {"engine": f"{__name__}:Loading"},
            "cold": {"engine": "tests.support.engines:SlowToLoad"},
            "failing": scripted("one two three four", fail_after=2),
            "failing-at-once": scripted("one", fail_after=0),
            "short": scripted("word " * 100, context=20),
            "echo": {"engine": "scripted"},
        },
        "default": "echo",
        "errors": "lethean",
        "limits": {"load_seconds": 5},
    }
    with serving(tmp_path_factory.mktemp("lethean"), config) as running:
        yield running


@pytest.fixture
def client(server: Running) -> Iterator[httpx.Client]:
    with talking(server) as made:
        yield made


def message(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()["choices"][0]["message"]
    return found


def joined(response: httpx.Response, field: str) -> str:
    *chunks, done = frames(response.text)
    assert done == "[DONE]"
    return "".join(choice["delta"].get(field) or "" for chunk in chunks for choice in chunk["choices"])


def test_request_fields_of_the_handler_are_passed_on(client: httpx.Client, upstream: CompatServer) -> None:
    upstream.requests.clear()
    fields = {"temperature": 0, "top_p": 0.5, "top_k": 3, "max_tokens": 7, "user": "me"}
    assert message(ask(client, CHAT, model="gemma", **fields))["content"] == CITY
    assert fields.items() <= upstream.bodies[-1].items()


@pytest.mark.parametrize(("limit", "reason"), [(LETHEAN_TOKENS, "length"), (50, "stop")])
def test_usage_and_finish_reason_of_a_whole_reply(
    client: httpx.Client, upstream: CompatServer, limit: int, reason: str
) -> None:
    for is_streamed in (False, True, False):
        upstream.requests.clear()
        response = ask(client, CHAT, model="gemma", max_tokens=limit, stream=is_streamed)
        if is_streamed:
            assert frames(response.text)[-2]["choices"][0]["finish_reason"] == reason
            assert len(upstream.requests) <= 2
            continue
        reply = response.json()
        assert reply["choices"][0]["finish_reason"] == reason
        assert (reply["usage"]["prompt_tokens"], reply["usage"]["completion_tokens"]) == (9, LETHEAN_TOKENS)
        assert ["stream" in body for body in upstream.bodies] == [False]


def test_unknown_fields_are_left_out_and_this_is_remembered(client: httpx.Client, upstream: CompatServer) -> None:
    for _ in range(2):
        upstream.requests.clear()
        assert joined(ask(client, CHAT, model="gemma", stream=True), "content") == CITY
    [body] = upstream.bodies
    assert "stream_options" not in body
    ignored = ask(client, CHAT, model="gemma", seed=1, presence_penalty=0.5)
    assert message(ignored)["content"] == CITY
    assert {"seed", "presence_penalty"} <= set(ignored.headers["x-dragoman-ignored"].split(", "))
    count = len(upstream.requests)
    ask(client, CHAT, model="gemma", seed=1, presence_penalty=0.5)
    assert len(upstream.requests) == count + 1


def test_reasoning_of_earlier_turns_is_left_out(client: httpx.Client) -> None:
    earlier = {"role": "assistant", "content": CITY, "reasoning_content": THOUGHT}
    assert text_of(ask(client, CHAT, model="gemma", messages=[*HELLO, earlier, *HELLO])) == CITY


def test_stop_strings_instead_of_numeric_ids(client: httpx.Client) -> None:
    assert text_of(ask(client, CHAT, model="gemma", stop=["is"])) == "Par"
    assert text_of(ask(client, CHAT, model="echo", stop=["l"])) == "he"


@pytest.mark.parametrize("model", ["gemma", "channels", "closed-channels", "other-style"])
def test_hidden_channel_is_a_field_of_its_own_in_replies_and_chunks(client: httpx.Client, model: str) -> None:
    whole = message(ask(client, CHAT, model=model))
    assert (whole["content"].strip(), whole["reasoning_content"].strip()) == (CITY, THOUGHT)
    streamed = ask(client, CHAT, model=model, stream=True)
    assert joined(streamed, "content").strip() == CITY
    assert joined(streamed, "reasoning_content").strip() == THOUGHT


def test_model_name_is_trimmed_and_case_does_not_matter(client: httpx.Client) -> None:
    assert text_of(ask(client, CHAT, model=" Echo ")) == "hello"


def test_defaults_apply_only_to_omitted_fields(client: httpx.Client) -> None:
    assert text_of(ask(client, CHAT, model="sampled")) == "1.0 0.95 64 2048"
    given = {"temperature": 0, "top_p": 1, "top_k": 1, "max_tokens": 7}
    assert text_of(ask(client, CHAT, model="sampled", **given)) == "0.0 1.0 1 7"


def test_other_fields_are_accepted(client: httpx.Client) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    reply = ask(client, CHAT, model="echo", tools=[tool], n=2, seed=1, nickname="x")
    assert (text_of(reply), text_of(reply, 1)) == ("hello", "hello")
    assert set(reply.headers["x-dragoman-ignored"].split(", ")) == {"seed", "nickname"}


def test_length_without_a_limit_of_the_caller(client: httpx.Client) -> None:
    assert ask(client, CHAT, model="short").json()["choices"][0]["finish_reason"] == "length"


def test_concurrent_requests_load_once_and_share_no_state(client: httpx.Client, server: Running) -> None:
    def said(number: int) -> str:
        name = "echo" if number % 2 else "cold"
        return text_of(ask(client, CHAT, model=name, messages=[{"role": "user", "content": f"word {number}"}]))

    with ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(said, range(16)))
    assert replies == [f"word {number}" if number % 2 else "at last" for number in range(16)]
    assert server.log.read_text().count("model cold: loading") == 1


def test_models_by_models_yaml_architecture_and_tag_share_the_file(
    tmp_path: Path, serving: Serving, smollm2_path: Path
) -> None:
    weights = tmp_path / "models/Own-Q4_K_M.gguf"
    weights.parent.mkdir()
    shutil.copy(smollm2_path, weights)
    entry = f"{{path: {weights}, context: 512}}"
    (tmp_path / "models.yaml").write_text(f"root: {entry}\nmodels:\n  nested: {entry}\n")
    config = {"models": {"echo": {"engine": "scripted"}}, "models_dir": str(weights.parent), "default": "echo"}
    with serving(tmp_path, config, "--models-yaml", str(tmp_path / "models.yaml")) as running:
        with talking(running) as client:
            for name in ("root", " NESTED ", "llama", "llama:135m", "Llama:Q4_K_M", "own-q4_k_m"):
                reply = ask(client, CHAT, model=name, max_tokens=1)
                assert reply.status_code == 200, reply.text
            for name in ("llama:8b", "gemma3_text", "llam"):
                refused(ask(client, CHAT, model=name), 404, param="model", code="model_not_found")
        assert len([child for child in running.children() if b"worker_main" in command_of(child)]) == 1


def test_errors_name_the_field_of_a_message(client: httpx.Client) -> None:
    body = [*HELLO, {"role": "alien", "content": "x"}]
    assert "role" in refused(ask(client, CHAT, model="echo", messages=body), 400, param="messages[1].role")


def test_error_of_an_unknown_model(client: httpx.Client) -> None:
    response = ask(client, CHAT, model="nothing")
    refused(response, 404, param="model", code="model_not_found")
    assert response.json()["error"]["type"] == "model_not_found"


def test_loading_model_is_a_503_with_retry_after(client: httpx.Client) -> None:
    for is_streamed in (False, True):
        response = ask(client, CHAT, model="loading", stream=is_streamed)
        refused(response, 503, code="model_loading")
        assert response.json()["error"]["type"] == "model_loading"
        assert int(response.headers["retry-after"]) >= 1


def test_status_is_sent_only_when_the_engine_can_no_longer_fail_at_once(client: httpx.Client) -> None:
    for is_streamed in (False, True):
        response = ask(client, CHAT, model="failing-at-once", stream=is_streamed)
        refused(response, 500, code="inference_error")


def test_error_in_mid_stream_is_told(client: httpx.Client) -> None:
    *_, last = frames(ask(client, CHAT, model="failing", stream=True).text)
    assert last["error"]["code"] == "inference_error"


def test_explicit_zero_and_one_token_limit_are_honoured(client: httpx.Client) -> None:
    response = ask(client, CHAT, model="echo", temperature=0, max_tokens=1)
    assert response.json()["choices"][0]["finish_reason"] == "length"
    assert response.json()["usage"]["completion_tokens"] == 1


def test_finish_reason_error_of_the_handler_is_an_error(client: httpx.Client) -> None:
    response = ask(client, CHAT, model="gemma", messages=[{"role": "user", "content": "fail"}])
    refused(response, 502)


def test_client_of_the_handler(upstream: CompatServer) -> None:
    with Client(upstream.url, model="gemma", protocol="chat") as client:
        with client.stream("hello") as events:
            list(events)
        for reply in (client.complete("hello", temperature=0, top_k=1), events.reply()):
            assert (reply.text, reply.reasoning, reply.reason) == (CITY, THOUGHT, "stop")
            assert (reply.id, reply.model) == ("chatcmpl-1760000000000000000", "gemma")
        with client.stream("hello") as events:
            list(events)
        assert "stream_options" not in upstream.bodies[-1]


def test_client_gets_errors_of_the_handler(upstream: CompatServer) -> None:
    with Client(upstream.url, model="gemma", protocol="chat") as client:
        # An option is never dropped silently.
        with pytest.raises(BadRequest, match="invalid request body"):
            client.complete("hello", seed=1)
        with pytest.raises(ModelNotFound):
            client.complete("hello", model="nothing")
        with client.stream("fail") as events, pytest.raises(BadAnswer, match="aborted"):
            list(events)
