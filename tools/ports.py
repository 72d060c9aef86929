"""Ports for servers of tests, tools and benchmarks, which may run side by side.

A port that the system calls free may be taken before the server that it is meant for has started. So a port is chosen
below those that outgoing connections get, and is reserved by a UDP socket of the same number until this process ends.
"""

import random
import socket

FIRST_PORT, LAST_PORT = 15_000, 31_999


def free_port() -> int:
    while True:
        port = random.randint(FIRST_PORT, LAST_PORT)
        reservation = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            reservation.bind(("127.0.0.1", port))
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(("127.0.0.1", port))
        except OSError:
            reservation.close()
            continue
        # The descriptor stays open until the process ends.
        reservation.detach()
        return port
