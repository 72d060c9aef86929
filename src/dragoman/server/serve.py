"""A server from its start to a clean end: the app in uvicorn, or the parent of several front ends."""

import asyncio
import logging
import math
import os
import signal
import socket
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import msgspec
import uvloop

from dragoman.config.settings import Settings
from dragoman.core.engine import Engine
from dragoman.core.errors import ConfigError, DragomanError, ModelLoading, ModelNotFound
from dragoman.core.logs import configure
from dragoman.engines.llama.hardware import cpus
from dragoman.models import Host
from dragoman.server.app import App, Reread
from dragoman.server.auth.admin_token import TokenFile
from dragoman.server.factory import ENGINES_ONLY, build_app
from dragoman.server.frontends.supervisor import Crew, places
from dragoman.server.http.server import Listener, SocketFile, settle, unix_socket
from dragoman.server.preflight_checks import check_exposure, check_place, remarks, with_hosts

log = logging.getLogger("dragoman")

RETRY_SECONDS = 0.2
MOST_WORKERS, CPUS_PER_WORKER = 4, 4


def serve(*engines: Engine, host: str | None = None, port: int | None = None, settings: Settings | None = None) -> None:
    """Serve engines of your own until the process is told to stop. `host` and `port` win over the settings."""
    settings = settings or ENGINES_ONLY
    key = os.environ.get("DRAGOMAN_API_KEY")
    if key and not settings.api_keys:
        settings = msgspec.structs.replace(settings, api_keys=(key,))
    run(
        msgspec.structs.replace(settings, host=host or settings.host, port=settings.port if port is None else port),
        engines,
    )


def run(
    settings: Settings, engines: Sequence[Engine] = (), reread: Reread | None = None, warnings: Sequence[str] = ()
) -> None:
    """Serve until a signal says stop. A model without which nothing can be served is a ConfigError if it fails.

    `reread` gives the settings as they are written now, for SIGHUP and `POST /admin/reload`; `warnings` are logged.
    """
    check_exposure(settings)
    check_place(settings)
    configure(settings.telemetry.log_format, settings.telemetry.log_level)
    for words in (*warnings, *remarks(settings)):
        log.warning("%s", words)
    app = build_app(with_hosts(settings), engines, None if reread is None else _again(reread, settings))
    with asyncio.Runner(loop_factory=uvloop.Loop) as runner:
        count = settings.workers or default_workers(cpus())
        runner.run(_serve(app) if count == 1 else _serve_by_fronts(app, count))


def default_workers(cpus: int) -> int:
    """A laptop has one process; more pay where there are CPUs that no engine uses."""
    return max(1, min(MOST_WORKERS, cpus // CPUS_PER_WORKER))


def _again(reread: Reread, begun: Settings) -> Reread:
    """The settings as they are now, checked for the place where the server listens, which does not change."""

    def read() -> Settings:
        settings = reread()
        here = msgspec.structs.replace(settings, host=begun.host, port=begun.port, socket=begun.socket)
        check_exposure(here)
        return msgspec.structs.replace(settings, hosts=with_hosts(here).hosts)

    return read


def _tell_place(app: App, port: int) -> None:
    """With the port that it is, where any would do."""
    names = ", ".join(model.name for model in app.catalog.models.values()) or "the models folder"
    log.info("serving %s on %s", names, _place(msgspec.structs.replace(app.settings, port=port)))


def _write_token_file(app: App, port: int) -> TokenFile:
    settings = app.settings
    return TokenFile(app.admin_token, settings.host, port, settings.socket)


def _port(sockets: Sequence[socket.socket]) -> int:
    """0 for a Unix socket, which has none."""
    name = sockets[0].getsockname()
    return name[1] if isinstance(name, tuple) else 0


def _place(settings: Settings) -> str:
    if settings.socket is not None:
        return f"the Unix socket {settings.socket}"
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    return f"{'https' if settings.tls else 'http'}://{host}:{settings.port}/v1"


class Server(Listener):
    """Ends with exit code 0 when a signal asks it to; what is running then may finish, or is told that it cannot."""

    def __init__(self, app: App, file: SocketFile | None = None) -> None:
        super().__init__(app)
        self._app = app
        self._file = file
        self._token_file: TokenFile | None = None
        self._hurried = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            port = _port([one for server in self.servers for one in server.sockets])
            self._token_file = _write_token_file(self._app, port)
            _tell_place(self._app, port)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._app.stop_requests()
        await _drained(self._app.settings, self._hurried)
        if self._file is not None:
            self._file.remove()
        await super().shutdown(sockets)

    def remove_token(self) -> None:
        if self._token_file is not None:
            self._token_file.remove()

    def hurry(self) -> None:
        super().hurry()
        self._hurried.set()

    def give_up(self) -> None:
        """There is nothing to serve, and no reason to take new requests for a while."""
        self.should_exit = True
        self._hurried.set()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # Supervisors and shells may send SIGTERM twice, to the process and to its group, and mean nothing by it.
        if self.should_exit and sig == signal.SIGINT:
            asyncio.get_running_loop().call_soon_threadsafe(self.hurry)
        self.should_exit = True

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


async def _drained(settings: Settings, hurried: asyncio.Event) -> None:
    """Until new requests are not taken any more."""
    if hurried.is_set():
        return
    if settings.drain_seconds:
        log.info("stopping; new requests are taken for another %g s", settings.drain_seconds)
        try:
            async with asyncio.timeout(settings.drain_seconds):
                await hurried.wait()
            return
        except TimeoutError:
            pass
    log.info("stopping; running requests have %g s to finish", math.ceil(settings.grace_seconds))


async def _serve(app: App) -> None:
    path = app.settings.socket
    sockets = None if path is None else [unix_socket(Path(path))]
    file = SocketFile(path)
    server = Server(app, file)
    preload = asyncio.create_task(_preload(app, server.give_up))
    try:
        with _reloading(app):
            await server.serve(sockets)
    finally:
        file.remove()
        server.remove_token()
        preload.cancel()
        # Where somebody was in a hurry and sent the signal twice, nobody else has done it.
        await app.stop()
    if error := _failure(preload):
        raise error


def _failure(preload: "asyncio.Task[None]") -> BaseException | None:
    return preload.exception() if preload.done() and not preload.cancelled() else None


async def _serve_by_fronts(app: App, count: int) -> None:
    """The parent has everything but connections."""
    begun = app.settings
    opened = places(begun, count)
    file = SocketFile(begun.socket)
    app.start()
    token_file = _write_token_file(app, _port(opened[0]))
    ended, hurried = asyncio.Event(), asyncio.Event()
    crew = Crew(app, opened)
    preload = asyncio.create_task(_preload(app, ended.set))
    with _reloading(app), _signals(ended, hurried, crew):
        try:
            await crew.started(ended)
            if not ended.is_set():
                _tell_place(app, _port(opened[0]))
            await crew.until(ended)
            app.stop_requests()
            crew.tell_stopping()
            if _failure(preload) is None:
                await _drained(app.settings, hurried)
            file.remove()
            await crew.stop(begun.grace_seconds)
        finally:
            file.remove()
            token_file.remove()
            preload.cancel()
            await crew.end()
            await app.stop()
    if error := _failure(preload):
        raise error


@contextmanager
def _signals(ended: asyncio.Event, hurried: asyncio.Event, crew: Crew) -> Generator[None, None, None]:
    """The first asks for a clean end; a Ctrl-C after it for one at once, and one more waits for nobody."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()

    def hurry() -> None:
        if hurried.is_set():
            crew.kill()
        elif ended.is_set():
            hurried.set()
            crew.hurry()
        ended.set()

    loop.add_signal_handler(signal.SIGINT, hurry)
    loop.add_signal_handler(signal.SIGTERM, ended.set)
    try:
        yield
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


@contextmanager
def _reloading(app: App) -> Generator[None, None, None]:
    """SIGHUP has the configuration read again. Without one to read, the signal means what it always does."""
    if not app.can_reload or threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    reloads: set[asyncio.Task[None]] = set()

    def reload() -> None:
        task = loop.create_task(_reload(app))
        reloads.add(task)
        task.add_done_callback(reloads.discard)

    loop.add_signal_handler(signal.SIGHUP, reload)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGHUP)


async def _reload(app: App) -> None:
    try:
        told = await app.reload()
    except ConfigError as error:
        for mistake in error.mistakes:
            log.error("the configuration stays as it was: %s", mistake)
        return
    if told.restart_needed:
        log.warning("these hold only after a restart: %s", ", ".join(told.restart_needed))


async def _preload(app: App, end: Callable[[], None]) -> None:
    """Load the default model before anybody asks for it; where it is the only one, its failure is the server's."""
    try:
        host = (await app.catalog.find("")).host
    except ModelNotFound:
        log.info("there is no model yet; one that is put into the models folder is served")
        return
    try:
        await _loaded(host)
        settle()
        log.info("ready")
    except DragomanError as error:
        if all(model.host is host for model in app.catalog.listed()):
            end()
            raise ConfigError(host.failure or error.message) from error


async def _loaded(host: Host) -> None:
    """A request gives up waiting for a model after a while; the server does not."""
    while True:
        try:
            await host.ready()
            return
        except ModelLoading:
            await asyncio.sleep(RETRY_SECONDS)
