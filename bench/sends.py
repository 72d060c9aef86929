"""The lower bound of the front-end benchmark: a plain loop over all streams, with one `send` for each frame.

Only the call and the kernel's work remain, so no server that sends every frame at once can be faster. Run by
bench/frontend.py with the arguments of bench/peer.py; the last two are ignored.
"""

import select
import socket
import sys

from bench.ceiling import Ceiling

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
READY = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
QUIET_SECONDS = 0.1
"""After this time without a new connection, all streams are open."""


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def play(streams: list[socket.socket], app: Ceiling) -> None:
    for stream in streams:
        stream.send(HEAD)
    for ready in app.turns:
        frames = chunk(app.frame * ready)
        for stream in streams:
            stream.sendall(frames)
    for stream in streams:
        stream.sendall(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
        stream.close()


def main() -> None:
    port, text, burst, _, _ = sys.argv[1:]
    app = Ceiling(text, int(burst))
    listener = socket.create_server(("127.0.0.1", int(port)), backlog=1000)
    streams: list[socket.socket] = []
    while True:
        if not select.select([listener], [], [], QUIET_SECONDS if streams else None)[0]:
            play(streams, app)
            streams.clear()
            continue
        stream, _ = listener.accept()
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if stream.recv(65536).startswith(b"POST"):
            streams.append(stream)
        else:
            stream.sendall(READY)
            stream.close()


if __name__ == "__main__":
    main()
