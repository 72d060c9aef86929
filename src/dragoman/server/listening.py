"""How clients are listened to, in whichever process it is done."""

import errno
import gc
import math
import os
import socket
import ssl
from pathlib import Path

import uvicorn

from dragoman.errors import ConfigError
from dragoman.operation import Tls
from dragoman.server.connection import guarded
from dragoman.server.door import Door


def tls_context(tls: Tls) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(tls.certificate, tls.key)
    except OSError as error:
        words = error.strerror or str(error)
        raise ConfigError(f"tls: {tls.certificate} and {tls.key} cannot be used: {words}") from error
    return context


def unix_socket(path: Path) -> socket.socket:
    """For the owner and the group; nobody else, not even for a moment."""
    listener = socket.socket(socket.AF_UNIX)
    before = os.umask(0o117)
    try:
        listener.bind(str(path))
    except OSError as error:
        raise ConfigError(f"socket {path}: {error.strerror or error}") from error
    finally:
        os.umask(before)
    return listener


def bind_words(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} on {host} is in use; stop what runs there or choose another with --port"
    if error.errno == errno.EACCES:
        return f"port {port} is not for ordinary users; choose one above 1023 with --port"
    return f"cannot listen on {host} port {port}: {error.strerror or error}"


def uvicorn_config(door: Door) -> uvicorn.Config:
    settings = door.settings
    tls = settings.tls
    return uvicorn.Config(
        door,
        host=settings.host,
        port=settings.port,
        http=guarded(settings.limits, door.telemetry),
        ws="none",
        lifespan="on",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=math.ceil(settings.grace_seconds),
        ssl_context_factory=None if tls is None else lambda config, default: tls_context(tls),
    )


def settle() -> None:
    """What exists now will stay: the garbage collector need not look at it again, nor so often at what is new."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)
