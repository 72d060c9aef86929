"""Runs one `response.create` as a POST to the app, and sends its events.

    stream of the POST    one message for each frame
    error of the POST     one `error` event, with its status

Rules
1. The request has the headers of the handshake. So it is authenticated again, and has a quota and a deadline of its
   own.
2. A cancelled response ends with `response.incomplete`. Its `status` is `cancelled`, and it has the items that are
   complete. If it has no event yet, it ends with an `error` event.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from dragoman.core.errors import DragomanError, ResponseCancelled
from dragoman.protocols.errors import encode_openai_error
from dragoman.protocols.responses import websocket as wire
from dragoman.protocols.responses.frames import FRAME_END, ITEM_DONE, end_early
from dragoman.server.app_calls import AppReply, call_app
from dragoman.server.http.response import Scope
from dragoman.server.websocket.response_cache import RESPONSE_CACHE, ConnectionResponseCache, RequestResponseCache

SendText = Callable[[str], Awaitable[None]]
HANDSHAKE_HEADERS = frozenset({b"connection", b"upgrade", b"content-type", b"content-length", b"content-encoding"})
"""Headers that belong to the handshake only, besides those that begin with `sec-websocket-`."""
SHOWN_HEADERS = (b"retry-after", b"x-")
"""How the headers of a refused request begin that its error event shows."""
LAST_EVENTS = (b"event: response.completed\n", b"event: response.incomplete\n", b"event: response.failed\n")


def turn_scope(scope: Scope, response_cache: RequestResponseCache) -> Scope:
    """The scope of a POST with the headers of the handshake."""
    headers = [
        (name, value)
        for name, value in scope["headers"]
        if name not in HANDSHAKE_HEADERS and not name.startswith(b"sec-websocket-")
    ]
    headers.append((b"content-type", b"application/json"))
    return {
        **scope,
        "type": "http",
        "method": "POST",
        "headers": headers,
        "extensions": {RESPONSE_CACHE: response_cache},
    }


def describe_error(error: DragomanError, stream_id: str | None = None) -> str:
    """The event for an error that no response has."""
    headers = {} if error.retry_after is None else {"retry-after": f"{error.retry_after:g}"}
    return wire.encode_error(error.status, encode_openai_error(error)["error"], headers, stream_id)


class Turn:
    def __init__(
        self, app: Any, scope: Scope, response_cache: ConnectionResponseCache, stream_id: str | None, send: SendText
    ) -> None:
        self._app = app
        self._response_cache = RequestResponseCache(response_cache, stream_id)
        self._scope = turn_scope(scope, self._response_cache)
        self._stream_id = stream_id
        self._send = send
        self._disconnected = asyncio.Event()
        self._is_cancelled = self._has_ended = False
        self._count = 0
        """The number of events so far."""
        self._first = b""
        """The first event."""
        self._items: list[bytes] = []
        """The events of complete items."""

    @property
    def response_id(self) -> str | None:
        """None before the first event."""
        return self._decode_response()["id"] if self._first else None

    def _decode_response(self) -> dict[str, Any]:
        response: dict[str, Any] = msgspec.json.decode(self._first)["response"]
        return response

    def disconnect(self) -> None:
        """End the request as if its client had gone."""
        self._disconnected.set()

    def cancel(self) -> None:
        self._is_cancelled = True
        self._disconnected.set()

    async def run(self, message: bytes) -> None:
        reply = await call_app(self._app, self._scope, message, self._disconnected, self._send_frames)
        if self._disconnected.is_set():
            # There is no reply.
            if self._is_cancelled and not self._has_ended:
                await self._send_cancelled()
        elif reply.status != 200:
            self._response_cache.forget_continued()
            await self._send(self._describe_refusal(reply))

    async def _send_frames(self, part: bytes) -> None:
        for frame in wire.split_frames(part):
            if not self._count:
                self._first = frame.partition(wire.DATA)[2]
            elif frame.startswith(ITEM_DONE):
                self._items.append(frame)
            elif frame.startswith(LAST_EVENTS):
                self._has_ended = True
                if frame.startswith(LAST_EVENTS[-1]):
                    self._response_cache.forget_continued()
            self._count += 1
            await self._send(wire.encode_event(frame, self._stream_id))

    async def _send_cancelled(self) -> None:
        if not self._first:
            error = ResponseCancelled("the response was cancelled before it began")
            await self._send(describe_error(error, self._stream_id))
            return
        body = msgspec.json.encode(self._decode_response())
        _, frame = end_early(body, FRAME_END.join(self._items), self._count, "cancelled", "", "")
        await self._send(wire.encode_event(frame.removesuffix(FRAME_END), self._stream_id))

    def _describe_refusal(self, reply: AppReply) -> str:
        shown = {
            name.decode("latin-1"): value.decode("latin-1")
            for name, value in reply.headers
            if name.startswith(SHOWN_HEADERS)
        }
        return wire.encode_error(reply.status, msgspec.json.decode(reply.body)["error"], shown, self._stream_id)
