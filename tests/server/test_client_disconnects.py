"""Clients that disconnect, and clients that do not read."""

import socket
import time
from pathlib import Path

import pytest

from tests.support.raw_http import STREAM_END, connect, head, read, request_bytes, sent
from tests.support.requests import (
    CHAT,
    COMPLETIONS,
    PATIENCE,
    SMALLEST,
    ask,
    eventually,
    recorded,
    talking,
    text_of,
    under_way,
)
from tests.support.server_process import Running

pytestmark = pytest.mark.usefixtures("served_afterwards")
ROUTES = pytest.mark.parametrize("path", [CHAT, COMPLETIONS])


class TestLeaving:
    """A disconnect stops the work within a second, and is recorded in the event log."""

    @pytest.mark.parametrize("model", ["slow", "in-worker"])
    @pytest.mark.parametrize("stream", [True, False])
    @ROUTES
    def test_while_it_is_answered(self, tight: Running, path: str, stream: bool, model: str) -> None:
        left = len(recorded(tight, 0, status=499, model=model))
        with sent(tight, path, model=model, stream=stream) as sock:
            if stream:
                sock.recv(1)
            else:
                under_way(tight, model)
        # The reply to the first request would take ten minutes, and there is one slot.
        with talking(tight) as client:
            assert text_of(ask(client, path, model=model, max_tokens=1)) == "tick"
        assert eventually(lambda: len(recorded(tight, 0, status=499, model=model)) == left + 1)

    @pytest.mark.parametrize("stream", [True, False])
    def test_before_the_first_token(self, tight: Running, stream: bool) -> None:
        left = len(recorded(tight, 0, status=499, model="slow-to-start"))
        with sent(tight, CHAT, model="slow-to-start", stream=stream):
            under_way(tight, "slow-to-start")
        # The first token would come after ten minutes.
        with talking(tight) as client:
            assert eventually(lambda: client.get("/stats").json()["models"]["slow-to-start"]["running"] == 0)
        assert eventually(lambda: len(recorded(tight, 0, status=499, model="slow-to-start")) == left + 1)

    def test_while_it_waits(self, tight: Running) -> None:
        left = len(recorded(tight, 0, status=499, model="slow"))
        with sent(tight, CHAT, model="slow", stream=True) as running:
            running.recv(1)
            with sent(tight, CHAT, model="slow"):
                under_way(tight, "slow", waiting=1)
            assert eventually(lambda: len(recorded(tight, 0, status=499, model="slow")) == left + 1)
            with sent(tight, CHAT, model="slow", max_tokens=1) as waiting:
                under_way(tight, "slow", waiting=1)
                running.close()
                assert read(waiting, 0).status == 200

    @pytest.mark.parametrize("apart", [False, True], ids=["in one packet", "apart"])
    @pytest.mark.parametrize("stream", [True, False])
    def test_with_another_request_behind(self, tight: Running, stream: bool, apart: bool) -> None:
        left = len(recorded(tight, 0, status=499, model="slow"))
        request = request_bytes(CHAT, SMALLEST[CHAT] | {"model": "slow", "stream": stream})
        with connect(tight) as sock:
            sock.sendall(request if apart else request + request)
            under_way(tight, "slow")
            if apart:
                sock.sendall(request)
        with talking(tight) as client:
            assert text_of(ask(client, CHAT, model="slow", max_tokens=1)) == "tick"
        assert eventually(lambda: len(recorded(tight, 0, status=499, model="slow")) == left + 1)

    def test_while_it_still_sends(self, tight: Running) -> None:
        left = len(recorded(tight, 0, status=499))
        with connect(tight) as sock:
            sock.sendall(head(CHAT, b"Host: localhost", b"Content-Length: 100") + b'{"mess')
        assert eventually(lambda: len(recorded(tight, 0, status=499)) == left + 1)


LARGE = {"prompt": "x" * 1_000_000, "n": 16}
"""Requests far more than two socket buffers hold."""


class TestNotReading:
    """Output for a client that does not read is bounded in size and time."""

    def connection(self, running: Running) -> socket.socket:
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.settimeout(PATIENCE)
        sock.connect(("127.0.0.1", running.port))
        return sock

    def is_held(self, running: Running, sock: socket.socket) -> bool:
        """Whether the server's end of the connection is still open."""
        here, there = f":{sock.getsockname()[1]:04X}", f":{running.port:04X}"
        rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        return any(row[1].endswith(there) and row[2].endswith(here) and row[3] == "01" for row in rows)

    def test_stream(self, impatient: Running) -> None:
        left = len(recorded(impatient, 0, status=499, model="echo"))
        with self.connection(impatient) as sock:
            begun = time.monotonic()
            sock.sendall(request_bytes(COMPLETIONS, LARGE | {"stream": True}))
            assert eventually(lambda: len(recorded(impatient, 0, status=499, model="echo")) == left + 1)
            assert time.monotonic() - begun > 0.9
            assert b"[DONE]" not in read(sock).body

    def test_whole_reply(self, impatient: Running) -> None:
        with self.connection(impatient) as sock:
            sock.sendall(request_bytes(COMPLETIONS, LARGE))
            assert eventually(lambda: not self.is_held(impatient, sock))
            answer = read(sock)
        assert answer.status == 200
        assert answer.closed
        assert len(answer.body) < int(answer.response.headers["content-length"])

    @pytest.mark.parametrize("stream", [True, False])
    def test_slow_reader_is_not_cut_off(self, impatient: Running, stream: bool) -> None:
        """The client reads continuously, for several times the write timeout."""
        with connect(impatient) as sock:
            begun = time.monotonic()
            sock.sendall(request_bytes(COMPLETIONS, LARGE | {"stream": stream}, "Connection: close"))
            size, last = 0, b""
            while piece := sock.recv(131072):
                size, last = size + len(piece), (last + piece)[-100:]
                time.sleep(len(piece) / 5_000_000)
        assert time.monotonic() - begun > 3
        assert size > 16_000_000
        assert last.endswith(STREAM_END if stream else b"}")

    def test_slow_reader_of_little_at_a_time(self, impatient: Running) -> None:
        with self.connection(impatient) as sock:
            sock.sendall(request_bytes(COMPLETIONS, {"prompt": "x" * 500_000, "stream": True}))
            received = b""
            while not received.endswith(STREAM_END):
                piece = sock.recv(32768)
                assert piece
                received = received[-100:] + piece
                time.sleep(0.02)
