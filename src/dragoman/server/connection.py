"""One HTTP connection, guarded: what uvicorn's own does not bound, this one does.

Rules
1. Headers that are too large get 431, headers that take too long 408, what is not HTTP 400; then the connection is
   closed. These replies look like all others and are in the event log like all others.
2. Requests are answered one after the other. What is wrong with the next one ends the connection without a word while
   one is being answered: nothing can be said in the middle of another response.
3. A head has its time while nothing is being answered; empty lines before it begin nothing.
4. A client that reads nothing for `write_seconds` while there is something to read is cut off.
5. A wish to speak another protocol (`Upgrade`) is not heard: the request is served as what it is.
6. Whole replies and pieces of a stream, the most frequent things there are, may be written with one plain call.
"""

import asyncio
import logging
from functools import lru_cache
from http import HTTPStatus
from itertools import chain
from urllib.parse import unquote

import httptools
import msgspec
from uvicorn._types import ASGI3Application, ASGIVersions, HTTPScope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from dragoman.config import Limits
from dragoman.errors import BadRequest, DragomanError, HeadersTooLarge, RequestTimeout
from dragoman.protocols import Family, family
from dragoman.server.exchange import DIRECT, Scope
from dragoman.server.respond import new_id
from dragoman.server.writing import Response
from dragoman.telemetry import Recorder, RequestRecord

log = logging.getLogger("dragoman.server")

ASGI: ASGIVersions = {"version": "3.0", "spec_version": "2.3"}
GOODBYE_SECONDS = 0.5
LOOKS = 4
"""How often, in the time that a client has for reading, it is looked whether it reads."""


def guarded(limits: Limits, telemetry: Recorder) -> type[HttpToolsProtocol]:
    """The connection class for these limits."""
    return type("GuardedConnection", (_Connection,), {"limits": limits, "telemetry": telemetry})


class _Connection(HttpToolsProtocol):
    limits: Limits
    telemetry: Recorder
    _answered: Response | None = None
    """The latest request to be answered; `cycle` is the latest to arrive, which may have to wait."""
    _is_too_large = False
    _in_head = False
    _head_bytes = 0
    _arrived = 0
    """Bytes since the head at hand began, or more."""
    _head_timer: asyncio.TimerHandle | None = None
    _idle_timer: asyncio.TimerHandle | None = None
    _heard_at = 0.0
    _write_timer: asyncio.TimerHandle | None = None
    _unread = 0
    _read_at = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_head_timer()
        self._cancel_write_timer()
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        # Those that wait have no task yet, and nobody to be told.
        self.pipeline.clear()
        if self._answered is not None and not self._answered.response_complete:
            self._answered.disconnected = True
            self._answered.message_event.set()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        super().shutdown()
        if self.scheme == "https":
            self.loop.call_later(GOODBYE_SECONDS, self._leave)

    def _leave(self) -> None:
        """A client that waits for nothing leaves TLS's goodbye unanswered: the server's end does not wait for it."""
        if not self.transport.is_closing() or self.transport.get_write_buffer_size():
            self.loop.call_later(GOODBYE_SECONDS, self._leave)
        else:
            self.transport.abort()

    def data_received(self, data: bytes) -> None:
        self._heard_at = self.loop.time()
        if not self._in_head:
            self._head_bytes = self._arrived = 0
        self._head_bytes += len(data)
        self._arrived += len(data)
        try:
            self._parse(data)
        except httptools.HttpParserError:
            self._refuse(self._too_large() if self._is_too_large else BadRequest("this is not a valid HTTP request"))
            return
        if self._in_head and self._head_bytes > self.limits.header_bytes:
            self._refuse(self._too_large())
        else:
            self._await_head()

    def _parse(self, data: bytes) -> None:
        while True:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                # The parser takes what follows such a head for another protocol; without that word it is a body.
                data = self._head_without_upgrade() + data[upgrade.args[0] :]
                self.parser = httptools.HttpRequestParser(self)
                # Where the client says that this request is its last, what follows is ignored, as in uvicorn's own.
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)

    def _head_without_upgrade(self) -> bytes:
        version = self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, version)]
        lines += [
            b"%b: %b" % (name, _staying(value) if name == b"connection" else value) for name, value in self.headers
        ]
        return b"\r\n".join(lines) + b"\r\n\r\n"

    def on_message_begin(self) -> None:
        self.url = b""
        self.headers = []
        self.expect_100_continue = False
        self._in_head = True

    def on_headers_complete(self) -> None:
        if self._arrived > self.limits.header_bytes and self._head_size() > self.limits.header_bytes:
            self._is_too_large = True
            raise httptools.HttpParserError
        if self.parser.should_upgrade():
            if self.parser.get_method() == b"CONNECT":
                raise httptools.HttpParserError
            return
        self._in_head = False
        self._cancel_head_timer()
        self.scope = self._scope()
        waits = self.cycle is not None and not self.cycle.response_complete
        self.cycle = response = self._response()
        if not waits:
            self._start_asgi_task(response, self.app)
            return
        if self.pipeline:
            # While nothing is read it is not seen that the client leaves. One request may wait, then nothing is read.
            self.flow.pause_reading()
        self.pipeline.appendleft((response, self.app))

    def _scope(self) -> HTTPScope:
        path, raw_path, query = _parsed(self.url)
        return {
            "type": "http",
            "asgi": ASGI,
            "http_version": self.parser.get_http_version(),
            "server": self.server,
            "client": self.client,
            "scheme": self.scheme or "http",
            "method": self.parser.get_method().decode("ascii"),
            "root_path": "",
            "path": path,
            "raw_path": raw_path,
            "query_string": query,
            "headers": self.headers,
            "extensions": {DIRECT: self},  # type: ignore[dict-item]
        }

    def _response(self) -> Response:
        return Response(
            self.scope,
            self.transport,
            self.flow,
            self.server_state.default_headers,
            self.expect_100_continue,
            self.scope["http_version"] != "1.0" and self.parser.should_keep_alive(),
            self.on_response_complete,
        )

    def on_message_complete(self) -> None:
        if self._in_head:
            # Of an upgrade, whose head comes again.
            return
        super().on_message_complete()
        # What of this packet belongs to the next head is not known: its size is seen when it is complete.
        self._head_bytes = 0

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        assert isinstance(cycle, Response)
        self._answered = cycle
        cycle.task = task = self.loop.create_task(self._answer(cycle, app))
        self.tasks.add(task)

    async def _answer(self, response: Response, app: ASGI3Application) -> None:
        """The app tells its errors itself; what it could not tell is told here."""
        try:
            await app(response.scope, response.receive, response.send)
        except BaseException:
            log.exception("a request was not answered")
        if not (response.response_complete or response.disconnected):
            response.give_up()
        response.on_response = _nothing
        # Not as a callback of the task: that costs every request one more call from the event loop.
        self.tasks.discard(response.task)

    def on_response_complete(self) -> None:
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
        elif self._in_head:
            self._await_head()
        self._heard_at = self.loop.time()
        if self._idle_timer is None:
            self._idle_timer = self.loop.call_later(self.timeout_keep_alive, self._look_for_idleness)

    def _look_for_idleness(self) -> None:
        """One timer for all requests of a connection: most of them come long before it."""
        self._idle_timer = None
        if self._in_head or (self._answered is not None and not self._answered.response_complete):
            return
        left = self._heard_at + self.timeout_keep_alive - self.loop.time()
        if left <= 0:
            self.transport.close()
        else:
            self._idle_timer = self.loop.call_later(left, self._look_for_idleness)

    def response(self, scope: Scope) -> Response | None:
        """The response for this scope, if it is its turn to be written."""
        answered = self._answered
        return answered if answered is not None and answered.scope is scope else None

    def _head_size(self) -> int:
        return len(self.url) + len(": \r\n") * len(self.headers) + sum(map(len, chain.from_iterable(self.headers)))

    def _too_large(self) -> HeadersTooLarge:
        return HeadersTooLarge(f"the headers are larger than {self.limits.header_bytes} bytes")

    def _await_head(self) -> None:
        if self._head_timer is None and (self._answered is None or self._answered.response_complete):
            self._head_timer = self.loop.call_later(self.limits.body_seconds, self._give_up_on_head)

    def _cancel_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _give_up_on_head(self) -> None:
        if not self._in_head:
            self.transport.close()
            return
        self._refuse(RequestTimeout(f"the headers took longer than {self.limits.body_seconds:g} s to arrive"))

    def _refuse(self, error: DragomanError) -> None:
        if self.transport.is_closing():
            return
        if self._may_refuse():
            record = RequestRecord(id=new_id("req-"), route="", status=error.status, error=error.code)
            self.transport.write(_response(error, record.id, family("", dict(self.headers or ()))))
            self.telemetry.request(record)
        self.transport.close()

    def _may_refuse(self) -> bool:
        """Whether the next response to be written is that to the request which is arriving."""
        cycle = self._answered
        return cycle is None or cycle.response_complete or (cycle.more_body and not cycle.response_started)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = self.transport.get_write_buffer_size()
        self._read_at = self.loop.time()
        self._look_again()

    def _look_again(self) -> None:
        self._write_timer = self.loop.call_later(self.limits.write_seconds / LOOKS, self._look_for_reading)

    def _look_for_reading(self) -> None:
        # Nothing is written meanwhile, so what is less has been taken.
        unread, now = self.transport.get_write_buffer_size(), self.loop.time()
        if unread < self._unread:
            self._unread, self._read_at = unread, now
        elif now - self._read_at >= self.limits.write_seconds:
            self.transport.abort()
            return
        self._look_again()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._cancel_write_timer()

    def _cancel_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None


def _nothing() -> None:
    """What is left to do for a response that is over."""


def _staying(connection: bytes) -> bytes:
    """What the Connection header says, but for the wish to leave HTTP; the Upgrade header says for what."""
    words = [word.strip() for word in connection.split(b",")]
    return b", ".join(word for word in words if word.lower() != b"upgrade")


@lru_cache(maxsize=256)
def _parsed(url: bytes) -> tuple[str, bytes, bytes]:
    """The path as text and as it came, and the query."""
    parsed = httptools.parse_url(url)
    path = parsed.path.decode("ascii")
    return unquote(path) if "%" in path else path, parsed.path, parsed.query or b""


def _response(error: DragomanError, request_id: str, spoken: Family) -> bytes:
    body = msgspec.json.encode(spoken.encode_error(error, request_id))
    own = () if spoken.id_header is None else (f"{spoken.id_header.decode()}: {request_id}",)
    lines = (
        f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}",
        "content-type: application/json",
        f"x-request-id: {request_id}",
        *own,
        f"content-length: {len(body)}",
        "connection: close",
    )
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body
