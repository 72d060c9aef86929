"""Custom engines: ten lines give every API, mounted in another app and from the command line."""

import asyncio
import json
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI
from fastapi.requests import Request
from fastapi.responses import Response
from tools.ports import free_port

from dragoman import Engine, ModelInfo, create_app
from dragoman.config.settings import Settings
from dragoman.core.embeddings import Embedding, Input
from dragoman.core.engine import Output
from dragoman.core.errors import BadRequest
from dragoman.core.events import Finished, Started, TextDelta, Usage
from dragoman.core.request import GenerationRequest
from tests.support.requests import (
    CHAT,
    COMPLETIONS,
    HELLO,
    SMALLEST,
    eventually,
    frames,
    refused,
    saying,
    stream_texts,
    talk,
    talking,
    text_of,
)
from tests.support.server_process import Serving

WORDS = ["one", "two", "three", "four", "five"]


class Shout(Engine):
    def generate(self, request: GenerationRequest) -> Iterator[str]:
        for word in request.last_user_text.upper().split():
            yield word + " "


class Counting(Engine):
    """A plain generator that never waits."""

    def models(self) -> Sequence[ModelInfo]:
        return [ModelInfo("counting", owner="me", context=100), ModelInfo("org/counting")]

    def generate(self, request: GenerationRequest) -> Iterator[Output]:
        yield from (f"{word} " for word in WORDS)


class CountingEvents(Counting):
    def generate(self, request: GenerationRequest) -> Iterator[Output]:
        yield Started(prompt_tokens=7)
        for word in WORDS:
            yield TextDelta(f"{word} ")
        yield Finished("stop", usage=Usage(prompt=7, completion=5))


def ask(app: Any, path: str, /, prefix: str = "", **fields: Any) -> httpx.Response:
    response: httpx.Response = talk(app, lambda client: client.post(prefix + path, json=SMALLEST[path] | fields))
    return response


def streamed(response: httpx.Response) -> list[str]:
    """The text of every choice of a complete stream."""
    *chunks, done = frames(response.text)
    assert done == "[DONE]"
    return [text for _, text in sorted(stream_texts(chunks).items())]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("engine", [Counting, CountingEvents])
def test_every_kind_of_engine(engine: type[Engine], path: str) -> None:
    app = create_app(engine())
    whole = ask(app, path)
    assert text_of(whole) == "one two three four five "
    assert whole.json()["choices"][0]["finish_reason"] == "stop"
    assert whole.json()["model"] == "counting"
    assert whole.json()["usage"]["completion_tokens"] == 5
    assert streamed(ask(app, path, stream=True)) == [text_of(whole)]
    stops = ["e four", "zebra"]
    assert text_of(ask(app, path, stop=stops)) == "one two thre"
    assert streamed(ask(app, path, stop=stops, stream=True)) == ["one two thre"]
    limited = ask(app, path, max_tokens=3)
    assert limited.json()["usage"]["completion_tokens"] == 3
    assert limited.json()["choices"][0]["finish_reason"] == "length"
    assert streamed(ask(app, path, max_tokens=3, stream=True)) == [text_of(limited)] == ["one two three "]
    several = ask(app, path, n=3)
    assert [text_of(several, at) for at in range(3)] == [text_of(whole)] * 3
    assert several.json()["usage"]["completion_tokens"] == 15
    assert streamed(ask(app, path, n=3, max_tokens=1, stream=True)) == ["one "] * 3


def test_models_of_an_engine() -> None:
    app = create_app(Counting(), Shout())

    async def script(client: httpx.AsyncClient) -> tuple[httpx.Response, httpx.Response]:
        await client.post(CHAT, json=SMALLEST[CHAT])
        return await client.get("/v1/models"), await client.get("/v1/models/org%2Fcounting")

    listed, one = talk(app, script)
    models = {model["id"]: model for model in listed.json()["data"]}
    assert list(models) == ["counting", "org/counting", "shout"]
    assert models["counting"]["owned_by"] == "me"
    assert models["counting"]["max_model_len"] == 100
    assert one.json()["id"] == "org/counting"
    assert text_of(ask(app, CHAT, model="shout")) == "HELLO "


def test_unsupported_feature_is_a_501() -> None:
    app = create_app(Counting())
    refused(ask(app, COMPLETIONS, prompt=[1, 2]), 501, param="prompt", code="not_implemented")
    refused(ask(app, COMPLETIONS, suffix="x"), 501, param="suffix")
    refused(ask(app, CHAT, tools=[{"type": "function", "function": {"name": "f"}}]), 501, param="tools")
    refused(ask(app, CHAT, functions=[{"name": "f"}]), 501, param="functions")
    refused(ask(app, CHAT, response_format={"type": "json_object"}), 501, param="response_format")
    refused(ask(app, COMPLETIONS, guided_regex="a"), 501, param="guided_regex")
    for part in (
        {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}},
        {"type": "file", "file": {"file_id": "f"}},
    ):
        messages = [*HELLO, {"role": "user", "content": [part]}]
        refused(ask(app, CHAT, messages=messages), 501, param="messages[1].content[0]")

    def post(path: str, **body: Any) -> httpx.Response:
        response: httpx.Response = talk(app, lambda client: client.post(path, json=body))
        return response

    refused(post("/tokenize", content="x"), 501)
    refused(post("/detokenize", tokens=[1, 2]), 501)
    refused(post("/tokenize"), 400, param="content")
    refused(post("/detokenize", tokens=[-1]), 400, param="tokens[0]")
    silent = create_app(Lengths())
    refused(ask(silent, CHAT), 501, param="messages", code="not_implemented")
    refused(ask(silent, COMPLETIONS), 501, param="prompt", code="not_implemented")


class Lengths(Engine):
    def embed(self, inputs: Sequence[Input]) -> Sequence[Embedding]:
        return [Embedding.of([len(entry), 1.0], tokens=len(entry)) for entry in inputs]


class TokenEngine(Counting):
    def supports(self) -> frozenset[str]:
        return super().supports() | {"temperature", "token_prompt"}

    def generate(self, request: GenerationRequest) -> Iterator[Output]:
        yield f"{request.prompt} at {request.sampling.temperature}"

    def tokenize(self, text: str, special: bool) -> list[int]:
        return [len(word) for word in text.split()]

    async def detokenize(self, tokens: Sequence[int]) -> str:
        return " ".join("x" * token for token in tokens)


def test_declared_features_reach_the_engine() -> None:
    app = create_app(TokenEngine())
    response = ask(app, COMPLETIONS, prompt=[1, 2], temperature=0)
    assert text_of(response) == "(1, 2) at 0.0"
    assert "x-dragoman-ignored" not in response.headers
    tokens = talk(app, lambda client: client.post("/tokenize", json={"content": "one three"})).json()
    assert tokens == {"tokens": [3, 5], "count": 2, "max_model_len": 100, "token_strs": None}
    text = talk(app, lambda client: client.post("/detokenize", json={"tokens": [3, 5]})).json()
    assert text == {"content": "xxx xxxxx", "prompt": "xxx xxxxx"}


def test_event_log_names_the_model_of_tokenize(tmp_path: Path) -> None:
    log = tmp_path / "events.jsonl"
    app = create_app(TokenEngine(), settings=Settings(event_log=str(log)))

    async def use(client: httpx.AsyncClient) -> None:
        await client.post("/tokenize", json={"content": "one", "model": "org/counting"})
        await client.post("/detokenize", json={"tokens": [3]})
        await app.stop()

    talk(app, use)
    requests = [json.loads(line) for line in log.read_text().splitlines() if '"request"' in line]
    assert [event["model"] for event in requests] == ["org/counting", "counting"]


class Raising(Engine):
    """Fails after as many words as the message has."""

    def generate(self, request: GenerationRequest) -> Iterator[Output]:
        yield from request.last_user_text.split()
        raise ValueError("a secret")


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_engine_that_raises(path: str) -> None:
    app = create_app(Raising())
    nothing = saying(path, "")
    for response in (ask(app, path), ask(app, path, **nothing), ask(app, path, stream=True, **nothing)):
        message = refused(response, 500, code="inference_error")
        assert "secret" not in message
    late = ask(app, path, stream=True)
    assert late.status_code == 200
    *chunks, last = frames(late.text)
    assert last["error"]["code"] == "inference_error"
    assert "hello" in str(chunks)


class Choosy(Engine):
    def generate(self, request: GenerationRequest) -> Iterator[Output]:
        raise BadRequest("messages: this model talks of nothing but cats", param="messages")


def test_engine_error_reaches_the_client() -> None:
    message = refused(ask(create_app(Choosy()), CHAT, stream=True), 400, param="messages")
    assert "cats" in message


class TestMounted:
    """Mounted in a FastAPI app, under a prefix."""

    def app(self, engine: Engine, settings: Settings | None = None) -> FastAPI:
        ours = create_app(engine, settings=settings)

        @asynccontextmanager
        async def lifespan(_: FastAPI) -> AsyncIterator[None]:
            ours.start()
            yield
            await ours.stop()

        api = FastAPI(lifespan=lifespan)

        @api.middleware("http")
        async def sign(request: Request, call_next: Callable[[Request], Any]) -> Response:
            response: Response = await call_next(request)
            response.headers["x-theirs"] = "yes"
            return response

        @api.get("/theirs")
        def theirs() -> dict[str, str]:
            return {"whose": "theirs"}

        api.mount("/llm", ours)
        return api

    @pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
    def test_routes(self, path: str) -> None:
        api = self.app(Counting())
        whole = ask(api, path, prefix="/llm")
        assert text_of(whole) == "one two three four five "
        assert whole.headers["x-theirs"] == "yes"
        assert whole.headers["x-request-id"] == whole.json()["id"]
        assert streamed(ask(api, path, prefix="/llm", stream=True, n=2)) == ["one two three four five "] * 2
        refused(ask(api, path, prefix="/llm", n=0), 400, param="n")
        assert talk(api, lambda client: client.get("/theirs")).json() == {"whose": "theirs"}
        assert talk(api, lambda client: client.get("/llm/health")).json() == {"status": "ok"}
        assert talk(api, lambda client: client.get("/llm/v1/models/org%2Fcounting")).json()["id"] == "org/counting"
        refused(talk(api, lambda client: client.get("/llm/nowhere")), 404)

    def test_on_a_socket(self, tmp_path: Path) -> None:
        engine = Patient()
        api = self.app(engine, Settings(event_log=str(tmp_path / "events.jsonl")))
        port = free_port()
        with (
            in_thread(api, port),
            httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=60) as client,
        ):
            with client.stream("POST", "/llm" + CHAT, json={"messages": HELLO, "stream": True}) as response:
                assert len(list(response.iter_lines())) > 10
            whole = client.post("/llm" + CHAT, json={"messages": HELLO})
            assert text_of(whole) == "tick tick tick tick tick tick tick tick tick tick "
            with client.stream("POST", "/llm" + CHAT, json={"messages": HELLO, "stream": True}) as response:
                next(response.iter_lines())
            assert eventually(lambda: engine.closed == 3)
        start, *requests, end = map(json.loads, (tmp_path / "events.jsonl").read_text().splitlines())
        assert (start["event"], end["event"]) == ("run_start", "run_end")
        assert [request["status"] for request in requests] == [200, 200, 499]
        assert [request["route"] for request in requests] == [f"POST {CHAT}"] * 3


class Patient(Engine):
    closed = 0

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Output, None]:
        try:
            for _ in range(10):
                await asyncio.sleep(0.1)
                yield "tick "
        finally:
            self.closed += 1


@contextmanager
def in_thread(app: Any, port: int) -> Iterator[None]:
    """An app in a plain uvicorn server, in a thread."""
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        assert eventually(lambda: server.started)
        yield
    finally:
        server.should_exit = True
        thread.join()


MODULE = """
from dragoman import Engine

class Shout(Engine):
    def generate(self, request):
        for word in request.last_user_text.upper().split():
            yield word + " "
"""


def test_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, serving: Serving) -> None:
    (tmp_path / "loud.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    flags = ("--engine", "loud:Shout", "--alias", "gpt-*=shout")
    with serving(tmp_path, {}, *flags) as running, talking(running) as client:
        response = client.post(CHAT, json={"model": "gpt-4o", "messages": HELLO, "stream": True})
        assert streamed(response) == ["HELLO "]
        assert client.get("/v1/models").json()["data"][0]["id"] == "shout"
        assert running.stop() == 0
