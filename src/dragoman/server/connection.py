"""One HTTP connection, guarded: what uvicorn's own does not bound, this one does.

Rules
1. Headers that are too large get 431, headers that take too long 408, what is not HTTP 400; then the connection is
   closed. These replies look like all others and are in the event log like all others.
2. A client that does not read for `write_seconds` while there is something to read is cut off.
3. The head of a response leaves in one write with the beginning of its body.
4. Pieces of a stream, the most frequent thing there is, may be written with one plain call (`write_directly`).
"""

import asyncio
from http import HTTPStatus
from typing import cast

import httptools
import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from dragoman.config import Limits
from dragoman.errors import BadRequest, DragomanError, HeadersTooLarge, RequestTimeout
from dragoman.protocols import openai
from dragoman.server.exchange import DIRECT, Scope
from dragoman.server.respond import new_id
from dragoman.telemetry import EventLog, RequestRecord


def guarded(limits: Limits, log: EventLog) -> type[HttpToolsProtocol]:
    """The connection class for these limits."""
    return type("GuardedConnection", (_Connection,), {"limits": limits, "log": log})


class _Connection(HttpToolsProtocol):
    limits: Limits
    log: EventLog
    _is_too_large = False
    _in_head = True
    _head_bytes = 0
    _head_timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_head_timer()
        if self._write_timer is not None:
            self._write_timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._head_bytes:
            self._await_rest_of_head()

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._cancel_head_timer()
        # What has arrived may include some of the body: only where it could be too much are the headers counted.
        if self._head_bytes > self.limits.header_bytes and self._head_size() > self.limits.header_bytes:
            self._is_too_large = True
            raise httptools.HttpParserError
        self.scope["extensions"] = {DIRECT: self}  # type: ignore[dict-item]
        super().on_headers_complete()
        if self.scope["method"] != "HEAD":
            # The response to HEAD has no body to wait for.
            self.cycle.transport = cast("asyncio.Transport", _HeadHeldBack(self.transport))

    def write_directly(self, scope: Scope, data: bytes) -> bool:
        """A piece of the response that is being streamed for this scope, if it can be written at once."""
        cycle = self.cycle
        if cycle.scope is not scope or not cycle.chunked_encoding or cycle.disconnected or self.flow.write_paused:
            return False
        cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return True

    def _head_size(self) -> int:
        return len(self.url) + sum(len(name) + len(value) + len(": \r\n") for name, value in self.headers)

    def _too_large(self) -> HeadersTooLarge:
        return HeadersTooLarge(f"the headers are larger than {self.limits.header_bytes} bytes")

    def send_400_response(self, msg: str) -> None:
        self._refuse(self._too_large() if self._is_too_large else BadRequest("this is not a valid HTTP request"))

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._in_head = True
        self._head_bytes = 0

    def _await_rest_of_head(self) -> None:
        if self._head_bytes > self.limits.header_bytes:
            self._refuse(self._too_large())
        elif self._head_timer is None:
            self._await_head()

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(self.limits.body_seconds, self._give_up_on_head)

    def _cancel_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _give_up_on_head(self) -> None:
        if not self._head_bytes:
            self.transport.close()
            return
        self._refuse(RequestTimeout(f"the headers took longer than {self.limits.body_seconds:g} s to arrive"))

    def _refuse(self, error: DragomanError) -> None:
        if self.transport.is_closing():
            return
        # In the middle of another response nothing can be said any more.
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            record = RequestRecord(id=new_id("req-"), route="", status=error.status, error=error.code)
            self.transport.write(_response(error, record.id))
            self.log.request(record)
        self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_timer = self.loop.call_later(self.limits.write_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None


class _HeadHeldBack:
    """A transport for one response: its head leaves together with the first piece of its body."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._head: bytes | None = None
        self.is_closing = transport.is_closing

    def write(self, data: bytes) -> None:
        if self._head is None and data.startswith(b"HTTP/1.1 ") and not data.startswith(b"HTTP/1.1 100"):
            self._head = data
        elif self._head:
            self._transport.write(self._head + data)
            self._head = b""
        else:
            self._transport.write(data)

    def close(self) -> None:
        if self._head:
            self._transport.write(self._head)
        self._transport.close()


def _response(error: DragomanError, request_id: str) -> bytes:
    body = msgspec.json.encode(openai.encode_error(error))
    lines = (
        f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}",
        "content-type: application/json",
        f"x-request-id: {request_id}",
        f"content-length: {len(body)}",
        "connection: close",
    )
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body
