"""The app in uvicorn: one process, one event loop, a clean end."""

import asyncio
import errno
import gc
import ipaddress
import logging
import math
import os
import signal
import socket
import sys
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager

import msgspec
import uvicorn
import uvloop

from dragoman.catalog import Host
from dragoman.config import Settings
from dragoman.engines.interface import Engine
from dragoman.errors import ConfigError, DragomanError, ModelLoading, ModelNotFound
from dragoman.server.app import ONLY_ENGINES, App, Reread
from dragoman.server.connection import guarded

log = logging.getLogger("dragoman")

RETRY_SECONDS = 0.2
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")


def serve(*engines: Engine, host: str | None = None, port: int | None = None, settings: Settings | None = None) -> None:
    """Serve engines of your own until the process is told to stop. `host` and `port` win over the settings."""
    settings = settings or ONLY_ENGINES
    key = os.environ.get("DRAGOMAN_API_KEY")
    if key and not settings.api_keys:
        settings = msgspec.structs.replace(settings, api_keys=(key,))
    run(
        msgspec.structs.replace(settings, host=host or settings.host, port=settings.port if port is None else port),
        engines,
    )


def run(settings: Settings, engines: Sequence[Engine] = (), reread: Reread | None = None) -> None:
    """Serve until a signal says stop. A model without which nothing can be served is a ConfigError if it fails.

    `reread` gives the settings as they are written down now, for SIGHUP and `POST /admin/reload`.
    """
    check_exposure(settings)
    check_port(settings.host, settings.port)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
    app = App(with_hosts(settings), engines, None if reread is None else lambda: with_hosts(reread()))
    with asyncio.Runner(loop_factory=uvloop.Loop) as runner:
        runner.run(_serve(app))


def check_exposure(settings: Settings) -> None:
    if not settings.api_keys and not is_loopback(settings.host):
        raise ConfigError(
            f"{settings.host} can be reached from other machines, and no API key is set; "
            "give --api-key KEY or set DRAGOMAN_API_KEY"
        )


def check_port(host: str, port: int) -> None:
    try:
        places = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ConfigError(f"--host {host}: {error.strerror or error}") from error
    for family, kind, protocol, _, address in places:
        with socket.socket(family, kind, protocol) as probe:
            # What servers do on POSIX: a port whose last connections are just closing is not in use.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(address)
            except OSError as error:
                raise ConfigError(_bind_words(host, port, error)) from error


def _bind_words(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} on {host} is in use; stop what runs there or choose another with --port"
    if error.errno == errno.EACCES:
        return f"port {port} is not for ordinary users; choose one above 1023 with --port"
    return f"cannot listen on {host} port {port}: {error.strerror or error}"


def with_hosts(settings: Settings) -> Settings:
    """On loopback only its own names are answered: a web page cannot reach the server through a name of its own."""
    if settings.hosts is not None or not is_loopback(settings.host):
        return settings
    return msgspec.structs.replace(settings, hosts=(*LOOPBACK_NAMES, settings.host))


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class Server(uvicorn.Server):
    """Ends with exit code 0 when a signal asks it to; what is running then may finish, or is told that it cannot."""

    def __init__(self, app: App, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._app = app

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            names = ", ".join(model.name for model in self._app.catalog.models.values())
            host = f"[{self.config.host}]" if ":" in self.config.host else self.config.host
            log.info("serving %s on http://%s:%d/v1", names, host, self.config.port)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        log.info("stopping; running requests have %g s to finish", self._app.settings.grace_seconds)
        self._app.stop_requests()
        await super().shutdown(sockets)

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


def server_for(app: App) -> Server:
    settings = app.settings
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        http=guarded(settings.limits, app.log),
        ws="none",
        lifespan="on",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=math.ceil(settings.grace_seconds),
    )
    return Server(app, config)


async def _serve(app: App) -> None:
    server = server_for(app)
    preload = asyncio.create_task(_preload(app, server))
    reloads: set[asyncio.Task[None]] = set()

    def reload() -> None:
        task = asyncio.create_task(_reload(app))
        reloads.add(task)
        task.add_done_callback(reloads.discard)

    loop = asyncio.get_running_loop()
    # Without a configuration to read again the signal means what it always does.
    takes_signal = app.can_reload and threading.current_thread() is threading.main_thread()
    if takes_signal:
        loop.add_signal_handler(signal.SIGHUP, reload)
    try:
        await server.serve()
    finally:
        preload.cancel()
        if takes_signal:
            loop.remove_signal_handler(signal.SIGHUP)
    if preload.done() and not preload.cancelled() and (error := preload.exception()):
        raise error


async def _reload(app: App) -> None:
    try:
        told = await app.reload()
    except ConfigError as error:
        for mistake in error.mistakes:
            log.error("the configuration stays as it was: %s", mistake)
        return
    if told.restart_needed:
        log.warning("these hold only after a restart: %s", ", ".join(told.restart_needed))


async def _preload(app: App, server: Server) -> None:
    """Load the default model before anybody asks for it; where it is the only one, its failure is the server's."""
    try:
        host = (await app.catalog.find("")).host
    except ModelNotFound:
        log.info("there is no model yet; one that is put into the models folder is served")
        return
    try:
        await _loaded(host)
        _settle()
        log.info("ready")
    except DragomanError as error:
        if all(model.host is host for model in app.catalog.models.values()):
            server.should_exit = True
            raise ConfigError(host.failure or error.message) from error
        log.error("model %s: %s", host.key, host.failure)


def _settle() -> None:
    """What exists now will stay: the garbage collector need not look at it again, nor so often at what is new."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


async def _loaded(host: Host) -> None:
    """A request gives up waiting for a model after a while; the server does not."""
    while True:
        try:
            await host.ready()
            return
        except ModelLoading:
            await asyncio.sleep(RETRY_SECONDS)
