"""Checks before the server starts: exposure without keys, the listen address, files, and unusual settings."""

import ipaddress
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import msgspec

from dragoman.config.diagnostics import Diagnostic
from dragoman.config.sections import Keys, Tls
from dragoman.config.settings import Settings
from dragoman.core.errors import ConfigError
from dragoman.engines.llama.hardware import cpus
from dragoman.server.auth.jwt import KEY_FILE, JwtVerifier
from dragoman.server.http.server import bind_error, tls_context
from dragoman.storage.keys import KeyStore, store_path

WORKERS_PER_CPU, WORKER_MIB = 4, 32
"""Warn above this many workers per CPU; memory of an idle worker in MiB."""
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")


def check_exposure(settings: Settings) -> None:
    """Refuse to listen on a public address without keys."""
    if settings.socket is not None or is_loopback(settings.host):
        return
    if not (settings.keys.anonymous or _has_keys(settings)):
        raise ConfigError(
            f"{settings.host} can be reached from other machines, and no API key is set; "
            "give --api-key KEY, set DRAGOMAN_API_KEY, create one with `dragoman keys create`, "
            "or allow all callers with --anonymous"
        )


def preflight_warnings(settings: Settings) -> list[str]:
    """Warnings about valid but probably unintended settings."""
    return [*_unused_isolation(settings), *_too_many_workers(settings.workers or 1, cpus())]


def _too_many_workers(workers: int, cpus: int) -> list[str]:
    if workers <= WORKERS_PER_CPU * cpus:
        return []
    return [f"workers: {workers} processes are too many for {cpus} CPUs; each needs {WORKER_MIB} MiB or more"]


def _unused_isolation(settings: Settings) -> list[str]:
    isolated = [model.name for model in settings.models if model.options.get("isolate") is True]
    if not isolated or _has_keys(settings):
        return []
    return [
        f"model {name}: isolate has no effect without API keys: all callers share one identity" for name in isolated
    ]


def _has_keys(settings: Settings) -> bool:
    return bool(settings.api_keys or settings.keys.jwt or KeyStore(store_path(settings.keys)).all())


def check_listen_address(settings: Settings) -> None:
    """Check that the server can listen on its address with its TLS files."""
    if settings.tls is not None:
        tls_context(settings.tls)
    if settings.socket is not None:
        check_socket(Path(settings.socket))
    else:
        check_port(settings.host, settings.port)


def check_socket(path: Path) -> None:
    """Check that a Unix socket can be created. The stale socket of a killed server is removed."""
    if not path.parent.is_dir():
        raise ConfigError(f"socket {path}: there is no folder {path.parent}")
    if not path.exists():
        return
    if not path.is_socket():
        raise ConfigError(f"socket {path}: the path exists and is not a socket; remove it or choose another")
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
        except OSError as error:
            raise ConfigError(f"socket {path}: {error.strerror or error}") from error
        else:
            raise ConfigError(f"socket {path}: another server uses it; stop it or choose another path")


def check_port(host: str, port: int) -> None:
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ConfigError(f"--host {host}: {error.strerror or error}") from error
    for family, kind, protocol, _, address in addresses:
        with socket.socket(family, kind, protocol) as probe:
            # As POSIX servers do: closing connections of an earlier server do not block the port.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(address)
            except OSError as error:
                raise ConfigError(bind_error(host, port, error)) from error


def with_hosts(settings: Settings) -> Settings:
    """Allow only loopback names in the Host header of a loopback server. This prevents DNS rebinding."""
    if settings.hosts is not None or not (settings.socket or is_loopback(settings.host)):
        return settings
    return msgspec.structs.replace(settings, hosts=(*LOOPBACK_NAMES, settings.host))


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_files(settings: Settings) -> list[Diagnostic]:
    """Problems with the files and directories that the server needs."""
    problems = [*_check_keys(settings.keys)]
    if settings.tls is not None:
        problems += _check_tls(settings.tls)
    if settings.event_log is not None:
        problems += _check_event_log(Path(settings.event_log))
    if settings.socket is not None and not Path(settings.socket).parent.is_dir():
        problems.append(Diagnostic("socket", f"there is no folder {Path(settings.socket).parent}"))
    return problems


def _check_tls(tls: Tls) -> Iterator[Diagnostic]:
    missing = [
        (key, path) for key, path in (("certificate", tls.certificate), ("key", tls.key)) if not Path(path).is_file()
    ]
    for key, path in missing:
        yield Diagnostic(f"tls.{key}", f"there is no file {path}")
    if not missing:
        try:
            tls_context(tls)
        except ConfigError as error:
            yield Diagnostic("tls", str(error).removeprefix("tls: "))


def _check_keys(keys: Keys) -> Iterator[Diagnostic]:
    if keys.jwt is not None:
        try:
            JwtVerifier(keys.jwt, keys.limits)
        except ConfigError as error:
            yield Diagnostic(KEY_FILE, str(error).removeprefix(f"{KEY_FILE}: "))
    path = store_path(keys)
    if keys.store is not None and not path.parent.is_dir():
        yield Diagnostic("keys.store", f"there is no folder {path.parent}; `dragoman keys create NAME` makes it")
        return
    try:
        KeyStore(path).all()
    except ConfigError as error:
        yield Diagnostic("keys.store", str(error))


def _check_event_log(path: Path) -> Iterator[Diagnostic]:
    if path.is_dir():
        yield Diagnostic("event_log", f"{path} is a folder; expected a file")
    elif not path.parent.is_dir():
        yield Diagnostic("event_log", f"there is no folder {path.parent}")
    elif not os.access(path if path.exists() else path.parent, os.W_OK):
        yield Diagnostic("event_log", f"{path} cannot be written: permission denied")
