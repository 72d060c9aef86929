"""What an engine sees of a request beyond its protocol: unknown fields, headers, the caller. Hooks of the app."""

import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.authentication import AuthCredentials, AuthenticationBackend, SimpleUser
from starlette.middleware import Middleware
from starlette.middleware.authentication import AuthenticationMiddleware
from starlette.requests import HTTPConnection
from starlette.routing import Mount

from dragoman import Engine, Hooks, create_app, serve
from dragoman.config.settings import Settings
from dragoman.core.embeddings import Embedding, Input
from dragoman.core.errors import BadRequest, ConfigError, DragomanError
from dragoman.core.events import Event, Usage
from dragoman.core.request import GenerationRequest
from tests.support.requests import CHAT, COMPLETIONS, HELLO, SMALLEST, refused, talk, talking, text_of
from tests.support.server_process import Running, Serving

MODULE = """
import json
from dragoman import Engine, ModelInfo

class Curious(Engine):
    reads_fields = ("persona",)
    reads_headers = ("x-tenant", "x-missing")

    def __init__(self, name="curious"):
        self.name = name

    @classmethod
    def configured(cls, name, options):
        return cls(name)

    def models(self):
        return [ModelInfo(self.name)]

    def generate(self, request):
        seen = [request.extra, request.headers, request.principal.partition(":")[0]]
        return json.dumps(seen)

class InWorker(Curious):
    @classmethod
    def needs_worker(cls, options):
        return True
"""
SENT = {"persona": {"name": "pirate"}, "other": 1}
HEADERS = {"x-tenant": "acme", "authorization": "Bearer a secret key"}
TENANT = {"x-tenant": "acme"}
SEEN = [{"persona": {"name": "pirate"}}, {"x-tenant": "acme"}, "key"]
ENTRIES = {"here": {"engine": "curious:Curious"}, "apart": {"engine": "curious:InWorker"}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, serving: Serving) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("curious")
    (folder / "curious.py").write_text(MODULE)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("PYTHONPATH", str(folder), prepend=":")
        with serving(folder, {"models": ENTRIES, "api_keys": ["a secret key"]}) as running:
            yield running


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/v1/messages", "/v1/responses"])
@pytest.mark.parametrize("model", ENTRIES)
def test_unknown_fields_headers_and_principal_reach_the_engine(server: Running, model: str, path: str) -> None:
    with talking(server, HEADERS) as client:
        reply = client.post(path, json={**SMALLEST[path], "model": model, **SENT})
    assert reply.status_code == 200, reply.text
    assert json.loads(str(_text(path, reply.json()))) == SEEN
    assert reply.headers["x-dragoman-ignored"] == "other"


def _text(path: str, body: dict[str, Any]) -> object:
    if path == "/v1/messages":
        return body["content"][0]["text"]
    if path == "/v1/responses":
        return body["output"][0]["content"][0]["text"]
    choice = body["choices"][0]
    return choice["text"] if path == COMPLETIONS else choice["message"]["content"]


def test_strict_mode_accepts_a_field_that_the_engine_reads(server: Running) -> None:
    with talking(server, HEADERS | {"x-dragoman-strict": "true"}) as client:
        body = {"model": "here", "messages": HELLO, "persona": "pirate"}
        assert client.post(CHAT, json=body).status_code == 200
        refused(client.post(CHAT, json=body | {"other": 1}), 400, param="other")


class Recording(Engine):
    """Keeps its requests."""

    def __init__(self, *reads_fields: str) -> None:
        self.reads_fields = reads_fields
        self.requests: list[GenerationRequest] = []

    def generate(self, request: GenerationRequest) -> Iterator[str]:
        self.requests.append(request)
        yield from ("one ", "two")


def test_star_reads_all_unknown_fields_but_no_nested_ones() -> None:
    engine = Recording("*")
    body = {"messages": HELLO, **SENT, "reasoning": {"exclude": True}}
    reply = talk(create_app(engine), lambda client: client.post(CHAT, json=body))
    assert engine.requests[0].extra == SENT
    assert reply.headers["x-dragoman-ignored"] == "reasoning.exclude"


def test_engine_that_reads_nothing_gets_nothing() -> None:
    engine = Recording()
    reply = talk(create_app(engine), lambda client: client.post(CHAT, json={"messages": HELLO, **SENT}))
    assert (engine.requests[0].extra, engine.requests[0].headers) == ({}, {})
    assert reply.headers["x-dragoman-ignored"] == "persona, other"


def test_unknown_field_of_an_embedding_request_is_ignored_by_every_engine() -> None:
    class Lengths(Recording):
        def embed(self, inputs: Sequence[Input]) -> Sequence[Embedding]:
            return [Embedding.of([1.0], tokens=1) for _ in inputs]

    body = {"input": "x", "persona": "pirate"}
    reply = talk(create_app(Lengths("*")), lambda client: client.post("/v1/embeddings", json=body))
    assert reply.status_code == 200
    assert reply.headers["x-dragoman-ignored"] == "persona"


def test_counting_tokens_sees_what_generating_sees() -> None:
    class Counting(Recording):
        reads_headers = ("x-tenant",)

        def count_tokens(self, request: GenerationRequest) -> int:
            self.requests.append(request)
            return 7

    engine = Counting("persona")
    body = {"model": "", "messages": HELLO, **SENT}
    reply = talk(create_app(engine), lambda client: client.post("/v1/messages/count_tokens", json=body, headers=TENANT))
    assert reply.json() == {"input_tokens": 7}
    assert (engine.requests[0].extra, engine.requests[0].headers) == (SEEN[0], TENANT)


class HeaderUser(AuthenticationBackend):
    async def authenticate(self, connection: HTTPConnection) -> tuple[AuthCredentials, SimpleUser] | None:
        name = connection.headers.get("x-user")
        return (AuthCredentials(), SimpleUser(name)) if name else None


def host(*engines: Engine, **options: Any) -> Starlette:
    """An app with users of its own, and Dragoman mounted in it."""
    routes = [Mount("/llm", create_app(*engines, **options))]
    return Starlette(routes=routes, middleware=[Middleware(AuthenticationMiddleware, backend=HeaderUser())])


def post(app: Any, path: str = "/llm" + CHAT, headers: Mapping[str, str] | None = None) -> httpx.Response:
    reply: httpx.Response = talk(app, lambda client: client.post(path, json={"messages": HELLO}, headers=headers))
    return reply


def test_principal_is_the_user_of_the_host_application() -> None:
    engine = Recording()
    app = host(engine)
    post(app, headers={"x-user": "ada"})
    post(app)
    assert [request.principal for request in engine.requests] == ["host:ada", "anonymous"]


def test_identify_names_the_user() -> None:
    engine = Recording()
    app = host(engine, identify=lambda scope: dict(scope["headers"]).get(b"x-session", b"").decode() or None)
    post(app, headers={"x-user": "ada", "x-session": "grace"})
    post(app, headers={"x-user": "ada"})
    assert [request.principal for request in engine.requests] == ["host:grace", "anonymous"]


def test_keys_stay_required_for_users_of_the_host_application() -> None:
    engine = Recording()
    app = host(engine, settings=Settings(models_dir=(), api_keys=("a secret key",)))
    refused(post(app, headers={"x-user": "ada"}), 401)
    post(app, headers={"x-user": "ada", "authorization": "Bearer a secret key"})
    assert engine.requests[0].principal.startswith("key:")


def test_user_of_the_host_application_is_no_operator() -> None:
    app = host(Recording())
    refused(talk(app, lambda client: client.get("/llm/admin/models", headers={"x-user": "ada"})), 401)


class HookLog:
    def __init__(self) -> None:
        self.entries: list[tuple[Any, ...]] = []
        self.hooks = Hooks(on_request=self.on_request, on_token=self.on_token, on_finish=self.on_finish)

    def on_request(self, request: GenerationRequest) -> None:
        self.entries.append(("request", request.model))
        if request.last_user_text == "refuse":
            raise BadRequest("not this", param="messages")

    def on_token(self, request: GenerationRequest, choice: int, event: Event) -> None:
        self.entries.append(("token", choice, getattr(event, "text", None)))

    def on_finish(self, request: GenerationRequest, usage: Usage, error: DragomanError | None) -> None:
        self.entries.append(("finish", usage.completion, error and error.message))


@pytest.mark.parametrize("is_stream", [True, False])
def test_hooks_see_a_generation(is_stream: bool) -> None:
    log = HookLog()
    app = create_app(Recording(), hooks=log.hooks)
    body = {"messages": HELLO, "stream": is_stream}
    assert talk(app, lambda client: client.post(CHAT, json=body)).status_code == 200
    tokens = [("token", 0, "one "), ("token", 0, "two")]
    assert log.entries == [("request", "recording"), *tokens, ("finish", 2, None)]


def test_hook_refuses_a_request() -> None:
    log = HookLog()
    engine = Recording()
    body = {"messages": [{"role": "user", "content": "refuse"}], "stream": True}
    reply = talk(create_app(engine, hooks=log.hooks), lambda client: client.post(CHAT, json=body))
    refused(reply, 400, param="messages")
    assert log.entries == [("request", "recording"), ("finish", 0, "not this")]
    assert not engine.requests


def test_failing_finish_hook_leaves_the_reply_alone() -> None:
    def fail(*_: object) -> None:
        raise ValueError("a mistake")

    app = create_app(Recording(), hooks=Hooks(on_finish=fail))
    assert text_of(post(app, CHAT)) == "one two"


def test_finish_hook_sees_a_cancelled_request() -> None:
    log = HookLog()

    async def run() -> None:
        started = asyncio.Event()

        async def generation(receive: Any) -> None:
            started.set()
            await asyncio.sleep(60)

        task = asyncio.create_task(log.hooks.run(GenerationRequest(), lambda *_: None, generation))
        await started.wait()
        task.cancel()
        await asyncio.wait([task])

    asyncio.run(run())
    assert log.entries[-1] == ("finish", 0, "the request was cancelled")


def test_hooks_need_one_process() -> None:
    with pytest.raises(ConfigError, match="front ends cannot call hooks; set `workers: 1`"):
        serve(Recording(), settings=Settings(workers=2), hooks=Hooks())
