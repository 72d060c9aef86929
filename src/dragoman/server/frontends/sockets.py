"""The sockets that front ends listen on. They belong to the parent and stay open while a front end is started again:
who connects meanwhile waits.

On Linux every front end has sockets of its own on the same port (SO_REUSEPORT), and the system spreads connections over
them evenly. A Unix socket, and a port elsewhere, is one socket that they all accept from.
"""

import socket
import sys
from pathlib import Path

from dragoman.config.settings import Settings
from dragoman.server.http.acceptor import BACKLOG
from dragoman.server.http.server import bind_sockets, unix_socket


def places(settings: Settings, count: int) -> list[list[socket.socket]]:
    """For each front end, what it listens on."""
    if settings.socket is not None:
        shared = [unix_socket(Path(settings.socket))]
    elif sys.platform == "linux":
        own = [bind_sockets(settings.host, settings.port, is_shared=True)]
        # The first may have been given any port that was free.
        port = own[0][0].getsockname()[1]
        own += [bind_sockets(settings.host, port, is_shared=True) for _ in range(count - 1)]
        return [_listening(sockets) for sockets in own]
    else:
        shared = bind_sockets(settings.host, settings.port, is_shared=True)
    return [_listening(shared)] * count


def _listening(sockets: list[socket.socket]) -> list[socket.socket]:
    for one in sockets:
        one.listen(BACKLOG)
    return sockets
