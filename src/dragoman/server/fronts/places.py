"""The sockets that front ends listen on. They belong to the parent and stay open while a front end is started again:
who connects meanwhile waits.

On Linux every front end has sockets of its own on the same port (SO_REUSEPORT), and the system spreads connections over
them evenly. A Unix socket, and a port elsewhere, is one socket that they all accept from.
"""

import socket
import sys
from pathlib import Path

from dragoman.config import Settings
from dragoman.errors import ConfigError
from dragoman.server.listening import bind_words, unix_socket

BACKLOG = 2048


def places(settings: Settings, count: int) -> list[list[socket.socket]]:
    """For each front end, what it listens on."""
    if settings.socket is not None:
        shared = [unix_socket(Path(settings.socket))]
    elif sys.platform == "linux":
        own = [_bound(settings.host, settings.port)]
        # The first may have been given any port that was free.
        port = own[0][0].getsockname()[1]
        own += [_bound(settings.host, port) for _ in range(count - 1)]
        return [_listening(sockets) for sockets in own]
    else:
        shared = _bound(settings.host, settings.port)
    return [_listening(shared)] * count


def _listening(sockets: list[socket.socket]) -> list[socket.socket]:
    for one in sockets:
        one.listen(BACKLOG)
    return sockets


def _bound(host: str, port: int) -> list[socket.socket]:
    """One for each address that the host has."""
    bound: list[socket.socket] = []
    addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    for family, kind, protocol, _, address in dict.fromkeys(addresses):
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if sys.platform == "linux":
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        if bound:
            # One port for all of them, also where any would do.
            address = (address[0], bound[0].getsockname()[1], *address[2:])
        try:
            listener.bind(address)
        except OSError as error:
            raise ConfigError(bind_words(host, port, error)) from error
        bound.append(listener)
    return bound
