"""Runs a server from start to clean stop, in one process or with several front ends."""

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
from dragoman.models import ModelHost
from dragoman.server.app import App, SettingsLoader
from dragoman.server.auth.admin_token import TokenFile
from dragoman.server.factory import ENGINES_ONLY, build_app
from dragoman.server.frontends.supervisor import FrontEndSupervisor, bind_frontend_sockets
from dragoman.server.http.server import HttpServer, SocketFile, tune_memory, unix_socket
from dragoman.server.preflight_checks import check_exposure, check_listen_address, preflight_warnings, with_hosts

log = logging.getLogger("dragoman")

RETRY_SECONDS = 0.2
MAX_WORKERS, CPUS_PER_WORKER = 4, 4


def serve(*engines: Engine, host: str | None = None, port: int | None = None, settings: Settings | None = None) -> None:
    """Serve your own engines until a signal stops the process. `host` and `port` override the settings."""
    settings = settings or ENGINES_ONLY
    key = os.environ.get("DRAGOMAN_API_KEY")
    if key and not settings.api_keys:
        settings = msgspec.structs.replace(settings, api_keys=(key,))
    run(
        msgspec.structs.replace(settings, host=host or settings.host, port=settings.port if port is None else port),
        engines,
    )


def run(
    settings: Settings,
    engines: Sequence[Engine] = (),
    reload_settings: SettingsLoader | None = None,
    warnings: Sequence[str] = (),
) -> None:
    """Serve until a signal stops the process. If the only model fails to load, raise a ConfigError.

    `reload_settings` loads the settings again, for SIGHUP and `POST /admin/reload`. `warnings` are logged.
    """
    check_exposure(settings)
    check_listen_address(settings)
    configure(settings.telemetry.log_format, settings.telemetry.log_level)
    for warning in (*warnings, *preflight_warnings(settings)):
        log.warning("%s", warning)
    app = build_app(
        with_hosts(settings), engines, None if reload_settings is None else _checked_reload(reload_settings, settings)
    )
    with asyncio.Runner(loop_factory=uvloop.Loop) as runner:
        count = settings.workers or default_workers(cpus())
        runner.run(_serve(app) if count == 1 else _serve_with_frontends(app, count))


def default_workers(cpus: int) -> int:
    """One process on a laptop; more only if there are CPUs that no engine uses."""
    return max(1, min(MAX_WORKERS, cpus // CPUS_PER_WORKER))


def _checked_reload(reload_settings: SettingsLoader, initial: Settings) -> SettingsLoader:
    """Load the settings again, and check them for the address of the running server, which does not change."""

    def load() -> Settings:
        settings = reload_settings()
        actual = msgspec.structs.replace(settings, host=initial.host, port=initial.port, socket=initial.socket)
        check_exposure(actual)
        return msgspec.structs.replace(settings, hosts=with_hosts(actual).hosts)

    return load


def _log_address(app: App, port: int) -> None:
    names = ", ".join(model.name for model in app.catalog.models.values()) or "the models folder"
    log.info("serving %s on %s", names, _url(msgspec.structs.replace(app.settings, port=port)))


def _write_token_file(app: App, port: int) -> TokenFile:
    settings = app.settings
    return TokenFile(app.admin_token, settings.host, port, settings.socket)


def _port(sockets: Sequence[socket.socket]) -> int:
    """The actual port; 0 for a Unix socket."""
    name = sockets[0].getsockname()
    return name[1] if isinstance(name, tuple) else 0


def _url(settings: Settings) -> str:
    if settings.socket is not None:
        return f"the Unix socket {settings.socket}"
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    return f"{'https' if settings.tls else 'http'}://{host}:{settings.port}/v1"


class AppServer(HttpServer):
    """Serves in one process. SIGTERM and SIGINT stop it: running requests may finish, or get an error."""

    def __init__(self, app: App, file: SocketFile | None = None) -> None:
        super().__init__(app)
        self._app = app
        self._file = file
        self._token_file: TokenFile | None = None
        self._forced = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            port = _port([one for server in self.servers for one in server.sockets])
            self._token_file = _write_token_file(self._app, port)
            _log_address(self._app, port)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._app.stop_requests()
        await _drain(self._app.settings, self._forced)
        if self._file is not None:
            self._file.remove()
        await super().shutdown(sockets)

    def remove_token(self) -> None:
        if self._token_file is not None:
            self._token_file.remove()

    def force_stop(self) -> None:
        super().force_stop()
        self._forced.set()

    def give_up(self) -> None:
        """Stop without draining, because no model can be served."""
        self.should_exit = True
        self._forced.set()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # Supervisors and shells may send SIGTERM twice, to the process and to its group. Only Ctrl-C forces a stop.
        if self.should_exit and sig == signal.SIGINT:
            asyncio.get_running_loop().call_soon_threadsafe(self.force_stop)
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


async def _drain(settings: Settings, forced: asyncio.Event) -> None:
    """Accept new requests for `drain_seconds` more, or until a forced stop."""
    if forced.is_set():
        return
    if settings.drain_seconds:
        log.info("stopping; new requests are taken for another %g s", settings.drain_seconds)
        try:
            async with asyncio.timeout(settings.drain_seconds):
                await forced.wait()
            return
        except TimeoutError:
            pass
    log.info("stopping; running requests have %g s to finish", math.ceil(settings.grace_seconds))


async def _serve(app: App) -> None:
    path = app.settings.socket
    sockets = None if path is None else [unix_socket(Path(path))]
    file = SocketFile(path)
    server = AppServer(app, file)
    preload = asyncio.create_task(_preload(app, server.give_up))
    try:
        with _reload_on_sighup(app):
            await server.serve(sockets)
    finally:
        file.remove()
        server.remove_token()
        preload.cancel()
        # A forced stop skips the shutdown of the lifespan.
        await app.stop()
    if error := _failure(preload):
        raise error


def _failure(preload: "asyncio.Task[None]") -> BaseException | None:
    return preload.exception() if preload.done() and not preload.cancelled() else None


async def _serve_with_frontends(app: App, count: int) -> None:
    """Run the parent, which has all state; the front ends have the connections."""
    initial = app.settings
    sockets = bind_frontend_sockets(initial, count)
    file = SocketFile(initial.socket)
    app.start()
    token_file = _write_token_file(app, _port(sockets[0]))
    stopping, forced = asyncio.Event(), asyncio.Event()
    supervisor = FrontEndSupervisor(app, sockets)
    preload = asyncio.create_task(_preload(app, stopping.set))
    with _reload_on_sighup(app), _signals(stopping, forced, supervisor):
        try:
            await supervisor.wait_until_started(stopping)
            if not stopping.is_set():
                _log_address(app, _port(sockets[0]))
            await supervisor.wait_for_any(stopping)
            app.stop_requests()
            supervisor.announce_stop()
            if _failure(preload) is None:
                await _drain(app.settings, forced)
            file.remove()
            await supervisor.stop(initial.grace_seconds)
        finally:
            file.remove()
            token_file.remove()
            preload.cancel()
            await supervisor.end()
            await app.stop()
    if error := _failure(preload):
        raise error


@contextmanager
def _signals(
    stopping: asyncio.Event, forced: asyncio.Event, supervisor: FrontEndSupervisor
) -> Generator[None, None, None]:
    """The first signal stops cleanly, a second Ctrl-C forces the stop, a third kills the front ends."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()

    def interrupt() -> None:
        if forced.is_set():
            supervisor.kill()
        elif stopping.is_set():
            forced.set()
            supervisor.force_stop()
        stopping.set()

    loop.add_signal_handler(signal.SIGINT, interrupt)
    loop.add_signal_handler(signal.SIGTERM, stopping.set)
    try:
        yield
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


@contextmanager
def _reload_on_sighup(app: App) -> Generator[None, None, None]:
    """Reload the configuration on SIGHUP. Without a configuration file the signal keeps its default effect."""
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
        result = await app.reload()
    except ConfigError as error:
        for mistake in error.messages:
            log.error("configuration not reloaded: %s", mistake)
        return
    if result.restart_needed:
        log.warning("these settings change only after a restart: %s", ", ".join(result.restart_needed))


async def _preload(app: App, stop: Callable[[], None]) -> None:
    """Load the default model before the first request. If it is the only one and fails, stop the server."""
    try:
        host = (await app.catalog.find("")).host
    except ModelNotFound:
        log.info("no models found; models added to the models folder are served")
        return
    try:
        await _wait_until_loaded(host)
        tune_memory()
        log.info("ready")
    except DragomanError as error:
        if all(model.host is host for model in app.catalog.list_models()):
            stop()
            raise ConfigError(host.failure or error.message) from error


async def _wait_until_loaded(host: ModelHost) -> None:
    """Wait without a time limit; `ready` gives up after that of a request."""
    while True:
        try:
            await host.ready()
            return
        except ModelLoading:
            await asyncio.sleep(RETRY_SECONDS)
