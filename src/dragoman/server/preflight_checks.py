"""What is looked at before a server listens: who could reach it, what is in its way, what is hardly meant so."""

import ipaddress
import socket
from pathlib import Path

import msgspec

from dragoman.config.settings import Settings
from dragoman.core.errors import ConfigError
from dragoman.engines.llama.hardware import cpus
from dragoman.server.http.server import bind_words, tls_context
from dragoman.storage.keys import KeyStore, store_path

WORKERS_PER_CPU, WORKER_MIB = 4, 32
"""More than so many are hardly meant; what one takes that has nothing to do yet."""
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")


def check_exposure(settings: Settings) -> None:
    if settings.socket is not None or is_loopback(settings.host):
        return
    if not (settings.keys.anonymous or _wants_keys(settings)):
        raise ConfigError(
            f"{settings.host} can be reached from other machines, and no API key is set; "
            "give --api-key KEY, set DRAGOMAN_API_KEY, make one with `dragoman keys create`, "
            "or let everybody in with --anonymous"
        )


def remarks(settings: Settings) -> list[str]:
    """What is allowed, and hardly what was meant."""
    return [*_idle_isolation(settings), *_too_many(settings.workers or 1, cpus())]


def _too_many(workers: int, cpus: int) -> list[str]:
    if workers <= WORKERS_PER_CPU * cpus:
        return []
    return [f"workers: {workers} processes for {cpus} CPUs, each of {WORKER_MIB} MiB or more, are hardly meant"]


def _idle_isolation(settings: Settings) -> list[str]:
    isolated = [model.name for model in settings.models if model.options.get("isolate") is True]
    if not isolated or _wants_keys(settings):
        return []
    return [
        f"model {name}: isolate does nothing where no API key is asked for: all callers are one" for name in isolated
    ]


def _wants_keys(settings: Settings) -> bool:
    return bool(settings.api_keys or settings.keys.jwt or KeyStore(store_path(settings.keys)).all())


def check_place(settings: Settings) -> None:
    """Whether there is nothing in the way of listening there."""
    if settings.tls is not None:
        tls_context(settings.tls)
    if settings.socket is not None:
        check_socket(Path(settings.socket))
    else:
        check_port(settings.host, settings.port)


def check_socket(path: Path) -> None:
    """A socket that nobody listens on was left behind by somebody who was killed, and is in nobody's way."""
    if not path.parent.is_dir():
        raise ConfigError(f"socket {path}: there is no folder {path.parent}")
    if not path.exists():
        return
    if not path.is_socket():
        raise ConfigError(f"socket {path}: something else has this name; remove it or choose another")
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
        except OSError as error:
            raise ConfigError(f"socket {path}: {error.strerror or error}") from error
        else:
            raise ConfigError(f"socket {path}: another server listens there; stop it or choose another")


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
                raise ConfigError(bind_words(host, port, error)) from error


def with_hosts(settings: Settings) -> Settings:
    """On loopback only its own names are answered: a web page cannot reach the server through a name of its own."""
    if settings.hosts is not None or not (settings.socket or is_loopback(settings.host)):
        return settings
    return msgspec.structs.replace(settings, hosts=(*LOOPBACK_NAMES, settings.host))


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
