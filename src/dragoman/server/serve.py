"""Runs a server from start to clean stop, in one process or with several front ends."""

import asyncio
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import uvloop

from dragoman.config.diagnostics import Locations
from dragoman.config.loading import default_address
from dragoman.config.sections import MEMORY
from dragoman.config.settings import Settings
from dragoman.core.engine import Engine
from dragoman.core.errors import ConfigError, DragomanError, ModelLoading, ModelNotFound
from dragoman.core.logs import configure
from dragoman.engines.llama.hardware import cpus
from dragoman.models import ModelHost
from dragoman.protocols.wire_protocol import WireProtocol
from dragoman.server.app import App, SettingsLoader
from dragoman.server.auth.admin_token import TokenFile
from dragoman.server.frontends.supervisor import FrontEndSupervisor
from dragoman.server.hooks import Hooks
from dragoman.server.http.server import HttpServer, SocketFile, bind_listeners, tune_memory
from dragoman.server.preflight_checks import check_exposure, check_listen_address, find_diagnostics, with_hosts
from dragoman.server.routes import ENGINES_ONLY, build_app
from dragoman.storage.database import Database, StorageInUse, StorageNotWritable

log = logging.getLogger("dragoman")

RETRY_SECONDS = 0.2
WATCH_SECONDS = 1.0
MAX_WORKERS, CPUS_PER_WORKER = 4, 4
STORAGE_HINT = "choose another file with --storage PATH, or keep the state in memory with --storage memory"


def serve(
    *engines: Engine,
    host: str | None = None,
    port: int | None = None,
    settings: Settings | None = None,
    protocols: Sequence[WireProtocol] = (),
    hooks: Hooks | None = None,
) -> None:
    """Serve your own engines until a signal stops the process. `host` and `port` override the settings.

    With `protocols` or `hooks`, which exist in this process only, there are no front ends. Protocols that the settings
    name work with front ends too.
    """
    settings = settings or ENGINES_ONLY
    if protocols or hooks is not None:
        if (settings.workers or 1) > 1:
            raise ConfigError(
                "front ends cannot use protocol objects; name their classes in `protocols` of the settings"
                if protocols
                else "front ends cannot call hooks; set `workers: 1`"
            )
        settings = msgspec.structs.replace(settings, workers=1)
    key = os.environ.get("DRAGOMAN_API_KEY")
    if key and not settings.api_keys:
        settings = msgspec.structs.replace(settings, api_keys=(key,))
    settings = msgspec.structs.replace(
        settings, host=host or settings.host, port=settings.port if port is None else port
    )
    warnings = (found for found in find_diagnostics(settings) if found.level != "error")
    run(settings, engines, warnings=Locations().format(warnings), protocols=protocols, hooks=hooks)


def run(
    settings: Settings,
    engines: Sequence[Engine] = (),
    reload_settings: SettingsLoader | None = None,
    warnings: Sequence[str] = (),
    protocols: Sequence[WireProtocol] = (),
    hooks: Hooks | None = None,
) -> None:
    """Serve until a signal stops the process. If the only model fails to load, raise a ConfigError.

    `reload_settings` loads the settings again, for SIGHUP and `POST /admin/reload`. `warnings` are logged.
    """
    check_exposure(settings)
    check_listen_address(settings)
    configure(settings.telemetry.log_format, settings.telemetry.log_level)
    for warning in warnings:
        log.warning("%s", warning)
    configured_address = settings.storage.address
    settings = _with_usable_storage(settings)
    checked_reload = None
    if reload_settings is not None:
        checked_reload = _checked_reload(reload_settings, settings, configured_address)
    app = build_app(with_hosts(settings), engines, checked_reload, protocols=protocols)
    app.hooks = hooks
    with asyncio.Runner(loop_factory=uvloop.Loop) as runner:
        runner.run(_serve(app, settings.workers or default_workers(cpus())))


def _with_usable_storage(settings: Settings) -> Settings:
    """Open the storage once, so that the server does not start with one that it cannot use. If another server uses the
    default file, or it cannot be written, return settings with a storage in memory."""
    storage = settings.storage
    database = Database(storage.address)
    try:
        database.open()
    except (StorageInUse, StorageNotWritable) as error:
        hint = f"; {STORAGE_HINT}" if isinstance(error, StorageNotWritable) else ""
        if storage.address != default_address():
            raise ConfigError(f"{error}{hint}") from error
        log.warning("%s%s. This server keeps its state in memory.", error, hint)
        return msgspec.structs.replace(settings, storage=msgspec.structs.replace(storage, address=MEMORY))
    finally:
        database.close()
    return settings


def default_workers(cpus: int) -> int:
    """Return one front end per CPUS_PER_WORKER CPUs, at least 1 and at most MAX_WORKERS."""
    return max(1, min(MAX_WORKERS, cpus // CPUS_PER_WORKER))


def _checked_reload(reload_settings: SettingsLoader, initial: Settings, storage_address: str) -> SettingsLoader:
    """Load the settings again, and check them for the address of the running server, which does not change.

    `storage_address` is the configured one. If the server keeps its state in memory instead, the configuration has not
    changed.
    """

    def load() -> Settings:
        settings = reload_settings()
        if settings.storage.address == storage_address:
            storage = msgspec.structs.replace(settings.storage, address=initial.storage.address)
            settings = msgspec.structs.replace(settings, storage=storage)
        actual = msgspec.structs.replace(settings, host=initial.host, port=initial.port, socket=initial.socket)
        check_exposure(actual)
        return msgspec.structs.replace(settings, hosts=with_hosts(actual).hosts)

    return load


def _log_address(app: App, port: int) -> None:
    settings = app.settings
    names = ", ".join(model.name for model in app.catalog.models.values()) or "the models folder"
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    url = f"{'https' if settings.tls else 'http'}://{host}:{port}/v1"
    log.info("serving %s on %s", names, url if settings.socket is None else f"the Unix socket {settings.socket}")


def _port(sockets: Sequence[socket.socket]) -> int:
    """The actual port; 0 for a Unix socket."""
    name = sockets[0].getsockname()
    return name[1] if isinstance(name, tuple) else 0


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
    log.info("stopping; running requests have %g s to finish", settings.grace_seconds)


async def _serve(app: App, count: int) -> None:
    """Serve in one process, or as the parent of front ends: it has all state, and they have the connections."""
    settings = app.settings
    sockets = bind_listeners(settings, count)
    port = _port(sockets[0])
    file = SocketFile(settings.socket)
    stopping, forced = asyncio.Event(), asyncio.Event()
    app.start()
    server: HttpServer | FrontEndSupervisor
    server = HttpServer(app, sockets[0]) if count == 1 else FrontEndSupervisor(app, sockets)
    token_file = TokenFile(app.admin_token, settings.host, port, settings.socket)
    preload = asyncio.create_task(_preload(app, stopping.set))
    watcher = asyncio.create_task(_watch_models(app))
    with _signals(app, stopping, forced, server):
        try:
            # Damaged files are reported before the server says that it serves.
            await app.catalog.scan()
            await server.run(stopping, lambda: _log_address(app, port))
            app.stop_requests()
            server.announce_stop()
            if _failure(preload) is None:
                await _drain(app.settings, forced)
            file.remove()
            grace = settings.grace_seconds
            await asyncio.gather(server.stop(grace), app.finish_jobs(grace, forced))
        finally:
            file.remove()
            token_file.remove()
            preload.cancel()
            watcher.cancel()
            await server.end()
            await app.stop()
    if error := _failure(preload):
        raise error


def _failure(preload: "asyncio.Task[None]") -> BaseException | None:
    return preload.exception() if preload.done() and not preload.cancelled() else None


@contextmanager
def _signals(
    app: App, stopping: asyncio.Event, forced: asyncio.Event, server: HttpServer | FrontEndSupervisor
) -> Generator[None, None, None]:
    """The first SIGINT or SIGTERM stops cleanly, a second Ctrl-C forces the stop, a third stops at once.

    Supervisors and shells may send SIGTERM twice, to the process and to its group, so it never forces a stop. SIGHUP
    reloads the configuration; without a configuration file it keeps its default effect.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    reloads: set[asyncio.Task[None]] = set()

    def interrupt() -> None:
        if forced.is_set():
            server.kill()
        elif stopping.is_set():
            forced.set()
            server.force_stop()
        stopping.set()

    def reload() -> None:
        task = loop.create_task(_reload(app))
        reloads.add(task)
        task.add_done_callback(reloads.discard)

    handlers = {signal.SIGINT: interrupt, signal.SIGTERM: stopping.set}
    if app.can_reload:
        handlers[signal.SIGHUP] = reload
    for number, handler in handlers.items():
        loop.add_signal_handler(number, handler)
    try:
        yield
    finally:
        for number in handlers:
            loop.remove_signal_handler(number)


async def _reload(app: App) -> None:
    try:
        result = await app.reload()
    except ConfigError as error:
        for mistake in error.messages:
            log.error("configuration not reloaded: %s", mistake)
        return
    if result.restart_needed:
        log.warning("these settings change only after a restart: %s", ", ".join(result.restart_needed))


async def _watch_models(app: App) -> None:
    """Reload after `models.yaml` has changed, once it stays the same from one look to the next."""
    applied = seen = await asyncio.to_thread(_file_version, app.settings.models_yaml)
    while app.can_reload:
        await asyncio.sleep(WATCH_SECONDS)
        path = app.settings.models_yaml
        if path is None:
            continue
        version = await asyncio.to_thread(_file_version, path)
        if version == seen != applied:
            applied = version
            log.info("%s has changed", path)
            await _reload(app)
        seen = version


def _file_version(path: str | None) -> tuple[int, int, int] | None:
    """The version of a file; None if it cannot be read."""
    try:
        status = Path(path or "").stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


async def _preload(app: App, stop: Callable[[], None]) -> None:
    """Load the default model before the first request. If it is the only one and fails, stop the server."""
    try:
        host = (await app.catalog.find("")).host
    except ModelNotFound as error:
        if app.catalog.default is None:
            log.info("no models found; models added to the models folder are served")
        else:
            log.error("the default model is missing: %s", error.message)
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
    """Wait for the model without a time limit. `host.ready` raises ModelLoading after the time limit of a request."""
    while True:
        try:
            await host.ready()
            return
        except ModelLoading:
            await asyncio.sleep(RETRY_SECONDS)
