"""A model server in a thread of this process, on a free port.

Rules
1. It answers chat completions, completions, Messages, Responses and embeddings, for any model name and any key.
2. It uses no files, no configuration and no environment, so tests may run in parallel.
3. At the end of the `with` block it raises an AssertionError if it had to refuse a request.
"""

import asyncio
import socket
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Self

import msgspec
import uvloop

from dragoman.config.sections import Keys
from dragoman.config.settings import Settings
from dragoman.core.errors import ConfigError
from dragoman.core.request import GenerationRequest
from dragoman.engines.scripted import ScriptedOptions
from dragoman.server.app import App
from dragoman.server.http.server import HttpServer, bind_sockets
from dragoman.server.http_exchange import HttpExchange
from dragoman.server.routes import build_routes
from dragoman.server.telemetry.recording import ExchangeRecording
from dragoman.testing.engine import PlannedEngine, describe
from dragoman.testing.received_request import BodyListener, ReceivedRequest
from dragoman.testing.replies import PlannedReply, to_planned

HOST = "127.0.0.1"
KEY = "none"
NO_KEYS = Keys(store="/nonexistent/keys.db", anonymous=True)
"""The keys of the user of this machine are not required."""
FIXED_OPTIONS = ("replies", "crash_after")


class ModelServer:
    """`options` are those of the scripted engine, such as `chunk`, `tokens_per_second` and `context`."""

    def __init__(self, *replies: PlannedReply | str, model: str = "scripted", **options: Any) -> None:
        self.model = model
        self.url = ""
        """For Anthropic's SDK, and for `dragoman.Client`."""
        self.requests: list[ReceivedRequest] = []
        """All requests with a body, in the order of their arrival."""
        self._engine = PlannedEngine(model, _read_options(options), self._note_generation, self._drop)
        self._app: _ListeningApp | None = None
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = asyncio.Event()
        self.add(*replies)

    @property
    def openai_url(self) -> str:
        return f"{self.url}/v1"

    @property
    def environment(self) -> Mapping[str, str]:
        """The variables with which the SDKs of OpenAI and Anthropic, and `dragoman`, find this server."""
        return {
            "OPENAI_BASE_URL": self.openai_url,
            "OPENAI_API_KEY": KEY,
            "ANTHROPIC_BASE_URL": self.url,
            "ANTHROPIC_API_KEY": KEY,
            "DRAGOMAN_URL": self.url,
        }

    def add(self, *replies: PlannedReply | str) -> None:
        """Add replies to the script. A text is a reply of text."""
        for entry in replies:
            self._engine.add(to_planned(entry))

    @property
    def failures(self) -> list[str]:
        """The requests that were refused, and why."""
        return self._engine.failures

    @property
    def unplayed(self) -> list[PlannedReply]:
        return self._engine.unplayed

    def check(self) -> None:
        """Raise an AssertionError if a request was refused."""
        if self.failures:
            raise AssertionError("\n".join(self.failures))

    def check_all_played(self) -> None:
        """Raise an AssertionError if a request was refused, or if a reply of the script was not played."""
        self.check()
        if self.unplayed:
            raise AssertionError(
                f"{len(self.unplayed)} replies of the script were not played:\n{describe(self.unplayed)}"
            )

    def start(self) -> None:
        listeners = bind_sockets(HOST, 0)
        self.url = f"http://{HOST}:{listeners[0].getsockname()[1]}"
        started: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(listeners, started), name="model server", daemon=True)
        self._thread.start()
        started.result()

    def close(self) -> None:
        """Stop the server. Requests that are running get an error. Further calls do nothing."""
        if self._thread is not None and self._loop is not None:
            self._loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join()
        self._thread = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
        if error is None:
            self.check()
        for failure in self.failures:
            if error is not None:
                error.add_note(failure)

    def _run(self, listeners: Sequence[socket.socket], started: "Future[None]") -> None:
        try:
            with asyncio.Runner(loop_factory=uvloop.Loop) as runner:
                runner.run(self._serve(listeners, started))
        except BaseException as error:
            if started.done():
                raise
            started.set_exception(error)

    async def _serve(self, listeners: Sequence[socket.socket], started: "Future[None]") -> None:
        self._loop = asyncio.get_running_loop()
        settings = Settings(models_dir=(), aliases={"*": self.model}, keys=NO_KEYS)
        self._app = app = _ListeningApp(settings, self._engine, self.requests)
        app.start()
        server = HttpServer(app, listeners)
        await server.run(self._stopping, lambda: started.set_result(None))
        app.stop_requests()
        await server.stop(0)
        await server.end()
        await app.stop()

    def _note_generation(self, request: GenerationRequest) -> None:
        for received in reversed(self.requests):
            if received.id == request.id:
                received.generation = request
                return

    def _drop(self, request_id: str) -> None:
        assert self._app is not None
        for exchange in self._app.exchanges:
            if exchange.record.id == request_id:
                exchange.drop()


class _ListeningApp(App):
    """An app that keeps the requests it gets."""

    def __init__(self, settings: Settings, engine: PlannedEngine, requests: list[ReceivedRequest]) -> None:
        super().__init__(build_routes(settings), settings, [engine])
        self._requests = requests

    def _begin_recording(self, exchange: HttpExchange) -> ExchangeRecording:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in exchange.headers.items()}

        def keep(body: bytes) -> None:
            self._requests.append(ReceivedRequest(exchange.record.id, exchange.path, headers, body))

        return BodyListener(exchange.timer.started, keep)


def _read_options(options: Mapping[str, Any]) -> ScriptedOptions:
    wrong = [name for name in options if name in FIXED_OPTIONS]
    if wrong:
        raise ConfigError(f"{wrong[0]}: not an option of a model server")
    try:
        return msgspec.convert(dict(options), ScriptedOptions)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def serve_script(replies: Iterable[PlannedReply | str] = (), *, model: str = "scripted", **options: Any) -> ModelServer:
    """A server for a `with` block, which plays these replies in order. See `ModelServer`."""
    return ModelServer(*replies, model=model, **options)
