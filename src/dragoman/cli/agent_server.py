"""The server for an agent: one that runs already, or one that is started for it.

Rules
1. The server is that of --url or $DRAGOMAN_URL; otherwise the one at the address of the configuration, if it answers
   and `--model` is not a file.
2. Otherwise a server is started with the configuration, on a free port. Its log is in a file. It ends with the block,
   and with this process, however that ends.
3. `--model` names a model of the server. For a server that is started, it may be a source too, as in `dragoman serve`.
"""

import argparse
import asyncio
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dragoman.agents.setup import NO_KEY, Endpoint
from dragoman.cli import admin_client
from dragoman.cli.admin_client import AdminClient
from dragoman.cli.common import load_config, print_progress
from dragoman.config.loading import Flags, load
from dragoman.config.settings import Settings
from dragoman.core.errors import ConfigError, ModelNotFound
from dragoman.models import Catalog, ServedModel

HOST = "127.0.0.1"
STOP_SECONDS = 10.0
POLL_SECONDS = 0.1
SERVE = """\
import sys
from dragoman.ipc.parent_death import kill_with_parent
kill_with_parent(int(sys.argv[1]))
from dragoman.cli import main
sys.exit(main(sys.argv[2:]))
"""
"""`dragoman serve`, which ends with the process that started it."""


@contextmanager
def open_endpoint(arguments: argparse.Namespace) -> Iterator[Endpoint]:
    """Find the server and the model, or start a server until the end of the block."""
    endpoint = find_endpoint(arguments)
    if endpoint is not None:
        yield endpoint
        return
    with _started_server(arguments) as endpoint:
        yield endpoint


def find_endpoint(arguments: argparse.Namespace) -> Endpoint | None:
    """Return the model of a running server; None if a server has to be started."""
    if admin_client.names_url(arguments):
        return _read_endpoint(admin_client.from_arguments(arguments), arguments.model)
    settings = load_config(arguments.config).settings
    server = admin_client.from_settings(settings, arguments.api_key)
    if _is_file(arguments.model) or not server.is_running():
        return None
    if settings.tls is not None:
        raise ConfigError(f"{server.address}: give --url with the name in its certificate, which agents check")
    return _read_endpoint(server, arguments.model or _default_name(settings))


def _is_file(model: str | None) -> bool:
    """Whether `--model` is a file or NAME=FILE, which a running server does not serve."""
    return model is not None and model.lower().endswith(".gguf")


def configured_endpoint(arguments: argparse.Namespace) -> Endpoint:
    """Return the model as it would be at the address of the configuration."""
    settings = load_config(arguments.config).settings
    server = admin_client.from_settings(settings, arguments.api_key)
    name = arguments.model or _default_name(settings)
    model = None if name is None else _find_configured(settings, name)
    if model is None:
        raise ConfigError(f"the configuration has no model {name!r}" if name else "choose a model with --model")
    info = asyncio.run(model.static_info())
    where = server.where
    return Endpoint(where.root, where.api, server.key or NO_KEY, model.name, info.context, info.format)


def _default_name(settings: Settings) -> str | None:
    default = settings.default_model
    return None if default is None else default.name


def _find_configured(settings: Settings, name: str) -> ServedModel | None:
    async def find() -> ServedModel | None:
        catalog = Catalog(settings)
        await catalog.scan()
        try:
            return await catalog.find(name)
        except ModelNotFound:
            return None

    return asyncio.run(find())


def _read_endpoint(server: AdminClient, name: str | None) -> Endpoint:
    where = server.where
    if server.is_at_socket:
        raise ConfigError(f"{server.address}: agents cannot connect to a Unix socket; serve at an address")
    if where.login is not None:
        raise ConfigError(f"{server.address}: agents cannot send a user and a password; give --api-key")
    try:
        entry = _find_model(server, name)
        return Endpoint(
            root_url=where.root,
            api_url=where.api,
            key=server.key or NO_KEY,
            model=str(entry["id"]),
            context=entry.get("max_model_len"),
            format=entry.get("format"),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise server.unexpected_answer() from error


def _find_model(server: AdminClient, name: str | None) -> dict[str, Any]:
    """Return the entry of a model, or of the first model."""
    if name is not None:
        entry: dict[str, Any] = server.get(f"/v1/models/{urllib.parse.quote(name)}")
        return entry
    entries: list[dict[str, Any]] = server.get("/v1/models")["data"]
    if not entries:
        raise ConfigError(f"{server.address}: the server has no models")
    return entries[0]


@contextmanager
def _started_server(arguments: argparse.Namespace) -> Iterator[Endpoint]:
    """Start a server and load the model."""
    settings = load_config(arguments.config).settings
    if settings.socket is not None or settings.tls is not None or settings.hosts is not None:
        keys = "`socket`, `tls` or `hosts`"
        raise ConfigError(f"a server with {keys} is not started for an agent; start it, and give --url")
    source, name = _find_source(arguments, settings)
    port = _free_port()
    flags = ["--host", HOST, "--port", str(port), *([] if arguments.config is None else ["--config", arguments.config])]
    with tempfile.NamedTemporaryFile("wb", prefix="dragoman-", suffix=".log", delete=False) as log:
        process = subprocess.Popen(  # noqa: S603 (our own program)
            [sys.executable, "-c", SERVE, str(os.getpid()), "serve", *source, *flags],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    print_progress(f"starting a server on http://{HOST}:{port}; its log is {log.name}")
    try:
        server = _wait_until_running(process, port, arguments.api_key or next(iter(settings.api_keys), None), log.name)
        if name is not None:
            _load_model(server, name)
        yield _read_endpoint(server, name)
    finally:
        _stop(process)


def _find_source(arguments: argparse.Namespace, settings: Settings) -> tuple[list[str], str | None]:
    """Return the argument of `dragoman serve` for a model that is not configured, and the name of the model."""
    name = arguments.model or _default_name(settings)
    if name is None or _find_configured(settings, name) is not None:
        return [], name
    added = load(arguments.config, Flags(models=[name]), os.environ).settings
    known = {spec.name for spec in settings.models}
    return [name], next(spec.name for spec in added.models if spec.name not in known)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
    return port


def _wait_until_running(process: "subprocess.Popen[bytes]", port: int, key: str | None, log: str) -> AdminClient:
    while process.poll() is None:
        # The token of a server without keys exists only after the start.
        server = admin_client.from_url(f"http://{HOST}:{port}", key, "the server at")
        if server.is_running():
            return server
        time.sleep(POLL_SECONDS)
    lines = Path(log).read_text(errors="replace").splitlines()
    raise ConfigError(f"the server did not start: {lines[-1].removeprefix('dragoman: ') if lines else 'no output'}")


def _load_model(server: AdminClient, name: str) -> None:
    print_progress(f"loading {name} ...")
    while True:
        status = server.post(f"/admin/models/{urllib.parse.quote(name, safe='')}/load")
        if status["state"] != "loading":
            return
        time.sleep(POLL_SECONDS)


def _stop(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
