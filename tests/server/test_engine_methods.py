"""The methods of an engine: async or plain, in every form, and models that change."""

import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from dragoman import Engine, ModelInfo, create_app
from dragoman.core.embeddings import Embedding, Input
from dragoman.core.errors import ConfigError
from dragoman.core.events import Event, Finished, Listener, Started, TextDelta
from dragoman.core.request import GenerationRequest
from dragoman.engines import engine_class
from tests.support.requests import (
    CHAT,
    COMPLETIONS,
    HELLO,
    ask,
    eventually,
    frames,
    in_process,
    refused,
    stream_texts,
    talk,
    talking,
    text_of,
)
from tests.support.server_process import Serving


def post(app: Any, path: str = CHAT, **body: Any) -> httpx.Response:
    reply: httpx.Response = talk(app, lambda client: client.post(path, json={"messages": HELLO} | body))
    return reply


class ReturnsText(Engine):
    def generate(self, request: GenerationRequest) -> str:
        assert threading.current_thread() is not threading.main_thread()
        return "the whole text"


class ReturnsTextAsync(Engine):
    async def generate(self, request: GenerationRequest) -> str:  # type: ignore[override]
        return "the whole text"


class ReturnsEvent(Engine):
    def generate(self, request: GenerationRequest) -> Event:  # type: ignore[override]
        return TextDelta("the whole text", count=3)


class ReturnsIterator(Engine):
    def generate(self, request: GenerationRequest) -> Iterator[str]:
        return iter(["the ", "whole ", "text"])


class ReturnsAsyncIterator(Engine):
    def generate(self, request: GenerationRequest) -> AsyncIterator[str]:
        return self._stream()

    async def _stream(self) -> AsyncIterator[str]:
        for word in ("the ", "whole ", "text"):
            yield word


class DeliversPlainly(Engine):
    def deliver(self, request: GenerationRequest, listener: Listener) -> None:  # type: ignore[override]
        for events in ([Started()], [TextDelta("the whole ")], [TextDelta("text")], [Finished("stop")]):
            listener(events)


@pytest.mark.parametrize(
    "engine", [ReturnsText, ReturnsTextAsync, ReturnsEvent, ReturnsIterator, ReturnsAsyncIterator, DeliversPlainly]
)
def test_every_form_of_generate(engine: type[Engine]) -> None:
    app = create_app(engine())
    assert text_of(post(app)) == "the whole text"
    *chunks, done = frames(post(app, stream=True).text)
    assert (stream_texts(chunks), done) == ({0: "the whole text"}, "[DONE]")
    assert text_of(post(app, stop=["le t"])) == "the who"


def test_returned_text_is_one_piece() -> None:
    assert post(create_app(ReturnsText())).json()["usage"]["completion_tokens"] == 1
    assert sum(
        '"content":"the whole text"' in line for line in post(create_app(ReturnsText()), stream=True).iter_lines()
    )


def test_generate_that_returns_nothing_is_a_500(caplog: pytest.LogCaptureFixture) -> None:
    class Nothing(Engine):
        def generate(self, request: GenerationRequest) -> None:  # type: ignore[override]
            pass

    refused(post(create_app(Nothing())), 500)
    assert "`generate` yields or returns text or events, not NoneType" in caplog.text


def test_plain_deliver_ends_with_its_request() -> None:
    ended = threading.Event()

    class Endless(Engine):
        def deliver(self, request: GenerationRequest, listener: Listener) -> None:  # type: ignore[override]
            listener([Started()])
            try:
                while True:
                    listener([TextDelta("tick ")])
            finally:
                ended.set()

    assert text_of(post(create_app(Endless()), max_tokens=3)) == "tick tick tick "
    assert eventually(ended.is_set)


class PlainThroughout(Engine):
    calls: tuple[str, ...] = ()

    def start(self) -> None:  # type: ignore[override]
        self.calls += ("start",)

    def stop(self) -> None:  # type: ignore[override]
        self.calls += ("stop",)

    def generate(self, request: GenerationRequest) -> str:
        return "text"

    def count_tokens(self, request: GenerationRequest) -> int:
        return 7

    def embed(self, inputs: Sequence[Input]) -> Sequence[Embedding]:
        return [Embedding.of([1.0], tokens=1) for _ in inputs]


class AsyncThroughout(Engine):
    """Knows its models and features only after the start."""

    calls: tuple[str, ...] = ()

    async def start(self) -> None:
        self.calls += ("start",)
        self.names = ["plain-throughout"]

    async def stop(self) -> None:
        self.calls += ("stop",)

    async def models(self) -> Sequence[ModelInfo]:  # type: ignore[override]
        return [ModelInfo(name) for name in self.names]

    async def supports(self) -> frozenset[str]:  # type: ignore[override]
        return frozenset({*super().supports(), "temperature"})

    async def generate(self, request: GenerationRequest) -> AsyncIterator[str]:
        yield "text"

    async def count_tokens(self, request: GenerationRequest) -> int:
        return 7

    async def embed(self, inputs: Sequence[Input]) -> Sequence[Embedding]:
        return [Embedding.of([1.0], tokens=1) for _ in inputs]


@pytest.mark.parametrize("engine", [PlainThroughout(), AsyncThroughout()], ids=["plain", "async"])
def test_every_method_may_be_async_or_plain(engine: PlainThroughout | AsyncThroughout) -> None:
    app = create_app(engine)

    async def script(client: httpx.AsyncClient) -> list[httpx.Response]:
        replies = [
            await client.get("/v1/models"),
            await client.post(CHAT, json={"messages": HELLO, "temperature": 1}),
            await client.post("/v1/embeddings", json={"input": "x"}),
            await client.post("/v1/messages/count_tokens", json={"model": "", "messages": HELLO}),
        ]
        await app.stop()
        return replies

    listed, chat, vectors, counted = talk(app, script)
    assert len(listed.json()["data"]) == 1
    assert text_of(chat) == "text"
    assert ("x-dragoman-ignored" in chat.headers) == isinstance(engine, PlainThroughout)
    assert vectors.json()["data"][0]["embedding"] == [1.0]
    assert counted.json() == {"input_tokens": 7}
    assert engine.calls == ("start", "stop")


class Changing(Engine):
    def __init__(self, *names: str) -> None:
        self.names = list(names)

    def models(self) -> Sequence[ModelInfo]:
        return [ModelInfo(name) for name in self.names]

    def generate(self, request: GenerationRequest) -> str:
        return request.model


def names(reply: httpx.Response) -> list[str]:
    return [model["id"] for model in reply.json()["data"]]


def test_models_are_asked_again_when_listed_or_unknown() -> None:
    engine = Changing("first")
    app = create_app(engine)

    async def script(client: httpx.AsyncClient) -> None:
        assert names(await client.get("/v1/models")) == ["first"]
        engine.names.append("second")
        assert text_of(await client.post(CHAT, json={"messages": HELLO, "model": "second"})) == "second"
        engine.names[:] = ["third", "second"]
        assert names(await client.get("/v1/models")) == ["third", "second"]
        refused(await client.post(CHAT, json={"messages": HELLO, "model": "first"}), 404, param="model")

    talk(app, script)


def test_engine_may_have_no_models_at_first() -> None:
    engine = Changing()
    app = create_app(engine)

    async def script(client: httpx.AsyncClient) -> None:
        assert names(await client.get("/v1/models")) == []
        refused(await client.post(CHAT, json={"messages": HELLO}), 404, param="model")
        engine.names.append("late")
        assert text_of(await client.post(CHAT, json={"messages": HELLO})) == "late"

    talk(app, script)


def test_failing_models_keep_the_last_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Changing("first")
    app = create_app(engine)

    def fail() -> Sequence[ModelInfo]:
        raise ValueError("a mistake")

    async def script(client: httpx.AsyncClient) -> None:
        # A model that is loaded is described by its engine.
        assert text_of(await client.post(CHAT, json={"messages": HELLO})) == "first"
        monkeypatch.setattr(engine, "models", fail)
        assert names(await client.get("/v1/models")) == ["first"]
        assert (await client.get("/v1/models/first")).json()["id"] == "first"

    talk(app, script)
    assert list(app.catalog.models) == ["first"]


def test_model_of_another_engine_is_not_replaced() -> None:
    first, second = Changing("first"), Changing("second")
    app = create_app(first, second)
    second.names.append("first")
    talk(app, lambda client: client.get("/v1/models"))
    assert app.catalog.models["first"].host.key == "first"


def test_two_engines_with_the_same_model_are_refused() -> None:
    with pytest.raises(ConfigError, match="two models are called 'same'"):
        create_app(Changing("same"), Changing("same"))


class TokensOnly(Engine):
    def supports(self) -> frozenset[str]:
        return frozenset({"token_prompt"})

    def generate(self, request: GenerationRequest) -> str:
        return str(request.prompt)


def test_token_only_engine_takes_ids_and_refuses_text() -> None:
    app = create_app(TokensOnly())
    assert text_of(post(app, COMPLETIONS, prompt=[1, 2])) == "(1, 2)"
    message = refused(post(app, COMPLETIONS, prompt="text"), 501, param="prompt")
    assert "takes token ids only; send them as `prompt` to /v1/completions" in message
    refused(post(app, COMPLETIONS, prompt=[[1, 2], "text"]), 501, param="prompt")
    refused(post(app, CHAT), 501, param="messages")


class Useless(Engine):
    def tokenize(self, text: str, special: bool) -> list[int]:
        return []


@pytest.mark.parametrize(
    "make", [lambda: create_app(Useless()), lambda: engine_class(f"{__name__}:Useless")], ids=["object", "name"]
)
def test_engine_that_can_answer_nothing_is_refused(make: Callable[[], object]) -> None:
    message = "engine Useless can answer nothing: define `generate` for text, or `embed`"
    with pytest.raises(ConfigError, match=message):
        make()


MODULE = """
from dragoman import Engine, ModelInfo

class Named(Engine):
    names = ["first"]

    def models(self):
        return self.names

    def generate(self, request):
        if request.last_user_text == "another":
            self.names.append("second")
        return "from " + request.model

class NamedInWorker(Named):
    @classmethod
    def needs_worker(cls, options):
        return True

class Late(Engine):
    names = ()

    async def start(self):
        self.names = ("late",)

    async def models(self):
        return [ModelInfo(name) for name in self.names]

    def generate(self, request):
        return "from " + request.model
"""


def test_async_models_behind_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, serving: Serving) -> None:
    (tmp_path / "late.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    with serving(tmp_path, {}, "--engine", "late:Late") as running:
        client = httpx.Client(base_url=running.url, trust_env=False, timeout=60)
        assert names(client.get("/v1/models")) == ["late"]
        assert text_of(client.post(CHAT, json={"messages": HELLO})) == "from late"
        client.close()


def test_models_may_be_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, serving: Serving) -> None:
    (tmp_path / "own.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    config = {"models": {"worker": {"engine": "own:NamedInWorker"}}}
    with serving(tmp_path, config, "--engine", "own:Named") as running, talking(running) as client:
        for model in ("worker", "first"):
            assert text_of(ask(client, CHAT, model=model)) == f"from {model}"
        assert names(client.get("/v1/models")) == ["first", "worker"]
        assert client.get("/v1/models/first").json()["format"] == "plain"
        another = [{"role": "user", "content": "another"}]
        assert text_of(ask(client, CHAT, model="first", messages=another)) == "from first"
        assert names(client.get("/v1/models")) == ["first", "second", "worker"]
        assert text_of(ask(client, CHAT, model="second")) == "from second"
        assert "Traceback" not in running.log.read_text()


async def test_async_models_may_be_names() -> None:
    class Named(AsyncThroughout):
        async def models(self) -> Sequence[str]:  # type: ignore[override]
            return ("one", "two")

    app = create_app(Named())
    async with in_process(app) as client:
        assert names(await client.get("/v1/models")) == ["one", "two"]
    await app.stop()


WRONG_MODELS: list[tuple[object, str]] = [
    ("first", "`models` of engine Wrong must return a list of names or ModelInfo values, not 'first'"),
    (None, "`models` of engine Wrong must return a list of names or ModelInfo values, not None"),
    (["first", 5], "`models` of engine Wrong must return a list of names or ModelInfo values, but contains 5"),
]


@pytest.mark.parametrize(("answer", "message"), WRONG_MODELS)
def test_wrong_models_are_refused(answer: object, message: str) -> None:
    class Wrong(ReturnsText):
        def models(self) -> object:  # type: ignore[override]
            return answer

    with pytest.raises(ConfigError) as raised:
        create_app(Wrong())
    assert str(raised.value) == message


def test_class_instead_of_an_engine_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^expected an engine, got the class ReturnsText; write ReturnsText\(\)$"):
        create_app(ReturnsText)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"^expected an engine, got str$"):
        create_app("scripted")  # type: ignore[arg-type]
