"""An upstream server that repeats the credentials it was sent, in every form of error.

The last message of a request selects the answer:

    "status N"   an error of that status, whose message has the request's credentials in it
    "stream"     a stream that begins well and then has such an error
    "garbage"    a reply that is not JSON, with the credentials in it
    "redirect"   a redirect to an address with the credentials in it
    other        a reply without credentials

It also collects traces: it keeps what is sent to /v1/traces.
"""

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class EchoUpstream(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.credentials: list[str] = []
        """The credentials in the headers of requests."""
        self.traces = bytearray()

    @property
    def port(self) -> int:
        port: int = self.server_address[1]
        return port


@contextmanager
def echo_upstream() -> Iterator[EchoUpstream]:
    server = EchoUpstream()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: EchoUpstream
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._reply(200, {"object": "list", "data": [{"id": "echo", "object": "model"}]})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        if self.path == "/v1/traces":
            self.server.traces += body
            self._send(200, b"", "application/x-protobuf")
            return
        asked = json.loads(body)["messages"][-1]["content"]
        words = asked if isinstance(asked, str) else asked[-1].get("text", "")
        self._answer(words)

    def _answer(self, words: str) -> None:
        secrets = self._credentials()
        match words.split():
            case ["status", status]:
                self._reply(
                    int(status), {"error": {"message": f"bad header: {secrets}", "type": secrets, "code": secrets}}
                )
            case ["stream"]:
                piece = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": "one"}}]}
                failure = {"error": {"message": f"bad header: {secrets}", "code": 400}}
                frames = [f"data: {json.dumps(part)}\n\n" for part in (piece, failure)]
                self._send(200, "".join(frames).encode(), "text/event-stream")
            case ["garbage"]:
                self._send(200, f"<html>{secrets}</html>".encode(), "text/html")
            case ["redirect"]:
                self._send(302, b"", "text/html", location=f"http://127.0.0.1:{self.server.port}/{secrets}")
            case _:
                message = {"role": "assistant", "content": "fine"}
                self._reply(200, {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})

    def _credentials(self) -> str:
        """The credentials as sent, and decoded."""
        given = [value for name, value in self.headers.items() if name.lower() in ("authorization", "x-api-key")]
        logins = [value.removeprefix("Basic ") for value in given if value.startswith("Basic ")]
        plain = [base64.b64decode(login).decode() for login in logins]
        self.server.credentials += given + plain
        return " ".join(given + plain)

    def _reply(self, status: int, payload: Any) -> None:
        self._send(status, json.dumps(payload).encode(), "application/json")

    def _send(self, status: int, body: bytes, media: str, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": media, "Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Log nothing: the tests print failures."""
