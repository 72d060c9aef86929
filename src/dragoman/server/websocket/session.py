"""One WebSocket of `/v1/responses`: reads its messages and runs its requests.

    message := response.create | response.cancel | response.steer
    stream  := the requests with one `stream_id`, or those without one

Rules
1. The requests of a stream run one after the other, in the order in which they were sent. Streams run at the same time,
   but at most `MAX_RUNNING` requests of a connection do; the others wait.
2. At most `MAX_WAITING` requests wait, with as many bytes as a body may have. A connection has at most `MAX_STREAMS`
   names of streams.
3. A message that cannot be used gets an `error` event. The connection stays.
4. When the client disconnects, its requests are cancelled.
5. When the server stops, no further requests are taken. The connection ends with 1001 when those that it has have
   ended, at the latest after the grace time: then they fail.
6. A connection without requests ends after `IDLE_SECONDS` (1001).
"""

import asyncio
import logging
from collections import deque
from typing import Protocol

from dragoman.config.settings import Settings
from dragoman.core.errors import BadRequest, DragomanError, QueueFull, StreamLimitReached, TooLarge, quote
from dragoman.protocols.json_body import LARGE_BODY
from dragoman.protocols.responses import websocket as wire
from dragoman.server.http.bodies import run_in_body_thread
from dragoman.server.http.response import Message, Receive, Scope, Send
from dragoman.server.http.websocket import STOPPING
from dragoman.server.request_timer import stopping_error
from dragoman.server.websocket.response_cache import ConnectionResponseCache, ProcessResponseCache
from dragoman.server.websocket.turn import Turn, describe_error

log = logging.getLogger("dragoman.server")

MAX_STREAMS = 32
MAX_RUNNING = 16
MAX_WAITING = 64
IDLE_SECONDS = 3600.0
GOING_AWAY, INTERNAL_ERROR = 1001, 1011
"""Codes of close frames."""


class SocketApp(Protocol):
    settings: Settings
    response_cache: ProcessResponseCache

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None: ...


class _Stream:
    def __init__(self, stream_id: str | None) -> None:
        self.id = stream_id
        self.waiting: deque[bytes] = deque()
        self.turn: Turn | None = None
        """The request that runs."""
        self.task: asyncio.Task[None] | None = None
        """Runs the requests, if there are any."""


class WebSocketSession:
    def __init__(self, app: SocketApp, scope: Scope, receive: Receive, send: Send) -> None:
        self._app = app
        self._scope = scope
        self._receive = receive
        self._asgi_send = send
        self._response_cache = ConnectionResponseCache(app.response_cache)
        self._stopping: asyncio.Event = scope.get("extensions", {}).get(STOPPING) or asyncio.Event()
        self._streams: dict[str | None, _Stream] = {}
        self._turns: set[asyncio.Task[None]] = set()
        self._slots = asyncio.Semaphore(MAX_RUNNING)
        self._waiting_bytes = 0
        self._loop = asyncio.get_running_loop()
        self._active_at = self._loop.time()
        self._change = asyncio.Event()
        """Set when a request has ended."""
        self._is_closed = False

    async def run(self) -> None:
        """Serve the connection until it ends."""
        watcher = self._loop.create_task(self._watch())
        try:
            while (message := await self._receive())["type"] != "websocket.disconnect":
                self._active_at = self._loop.time()
                await self._handle(message)
        except asyncio.CancelledError:
            # The server stops, and the grace time is over. The requests send their errors.
            await self._fail_turns()
            await self._close(GOING_AWAY, "the server is stopping")
        finally:
            self._is_closed = True
            watcher.cancel()
            await self._end()

    async def _watch(self) -> None:
        """Close the connection when the server stops, or after it was idle for too long."""
        while not self._stopping.is_set():
            left = self._active_at + IDLE_SECONDS - self._loop.time()
            if left <= 0 and not self._is_busy:
                await self._close(GOING_AWAY, f"no request for {IDLE_SECONDS:g} s")
                return
            try:
                async with asyncio.timeout(left if left > 0 else IDLE_SECONDS):
                    await self._stopping.wait()
            except TimeoutError:
                continue
        while self._is_busy:
            self._change.clear()
            await self._change.wait()
        await self._close(GOING_AWAY, "the server is stopping")

    @property
    def _is_busy(self) -> bool:
        return any(stream.task is not None for stream in self._streams.values())

    # Messages

    async def _handle(self, message: Message) -> None:
        stream_id = None
        try:
            body = self._read_text(message)
            client_message = await self._decode(body)
            stream_id = wire.read_stream_id(client_message)
            if client_message.type == "response.create":
                self._create(stream_id, body)
            elif client_message.type == "response.cancel":
                self._cancel(stream_id, client_message.response_id)
            elif client_message.type == "response.steer":
                await self._send(wire.refuse_steering(body))
            else:
                known = "response.create, response.cancel or response.steer"
                raise BadRequest(f"type: expected {known}, not {quote(client_message.type)}", param="type")
        except DragomanError as error:
            await self._send(describe_error(error, stream_id))

    def _read_text(self, message: Message) -> bytes:
        text = message.get("text")
        if text is None:
            raise BadRequest("the message is binary; send JSON as text")
        body: bytes = text.encode()
        limit = self._app.settings.limits.body_bytes
        if len(body) > limit:
            raise TooLarge(f"the message is larger than {limit} bytes")
        return body

    async def _decode(self, body: bytes) -> wire.ClientMessage:
        if len(body) > LARGE_BODY:
            return await run_in_body_thread(lambda: wire.decode_message(body))
        return wire.decode_message(body)

    def _create(self, stream_id: str | None, body: bytes) -> None:
        if self._stopping.is_set():
            raise stopping_error()
        stream = self._streams.get(stream_id)
        if stream is None:
            if stream_id is not None and len(self._streams.keys() - {None}) >= MAX_STREAMS:
                message = f"stream_id: a connection has at most {MAX_STREAMS} streams; use one again, or open another"
                raise StreamLimitReached(message, param="stream_id")
            stream = self._streams[stream_id] = _Stream(stream_id)
        count = sum(len(other.waiting) for other in self._streams.values())
        limit = self._app.settings.limits.body_bytes
        if count and (count >= MAX_WAITING or self._waiting_bytes + len(body) > limit):
            message = f"{count} requests of this connection are waiting, {self._waiting_bytes} bytes of them"
            raise QueueFull(f"{message}; wait until a response has ended")
        stream.waiting.append(body)
        self._waiting_bytes += len(body)
        if stream.task is None:
            stream.task = self._loop.create_task(self._run_stream(stream))

    def _cancel(self, stream_id: str | None, response_id: str | None) -> None:
        """Cancel a response by its id, or the one that runs in a stream. One that has ended stays as it is."""
        for stream in self._streams.values():
            if stream.turn is not None and (
                stream.id == stream_id if response_id is None else stream.turn.response_id == response_id
            ):
                stream.turn.cancel()

    # Requests

    async def _run_stream(self, stream: _Stream) -> None:
        while stream.waiting:
            async with self._slots:
                if not stream.waiting:
                    # The client has disconnected meanwhile.
                    break
                body = stream.waiting.popleft()
                self._waiting_bytes -= len(body)
                stream.turn = turn = Turn(self._app, self._scope, self._response_cache, stream.id, self._send)
                # A request that is late cancels its task, so it has one of its own.
                task = self._loop.create_task(turn.run(body))
                del body
                self._turns.add(task)
                await asyncio.wait((task,))
                self._turns.discard(task)
                stream.turn = None
                if not task.cancelled() and (error := task.exception()) is not None:
                    log.error("a request of a WebSocket failed", exc_info=error)
                    await self._close(INTERNAL_ERROR)
        stream.task = None
        self._active_at = self._loop.time()
        self._change.set()

    async def _fail_turns(self) -> None:
        """Cancel the requests that run, and wait until they have sent the error."""
        for stream in self._streams.values():
            stream.waiting.clear()
        for task in list(self._turns):
            task.cancel()
        await self._wait_for_streams()

    async def _end(self) -> None:
        for stream in self._streams.values():
            stream.waiting.clear()
            if stream.turn is not None:
                stream.turn.disconnect()
        await self._wait_for_streams()
        self._response_cache.close()

    async def _wait_for_streams(self) -> None:
        running = [stream.task for stream in self._streams.values() if stream.task is not None]
        if running:
            await asyncio.wait(running)

    async def _send(self, text: str) -> None:
        await self._send_message({"type": "websocket.send", "text": text})

    async def _close(self, code: int, reason: str = "") -> None:
        await self._send_message({"type": "websocket.close", "code": code, "reason": reason})
        self._is_closed = True

    async def _send_message(self, message: Message) -> None:
        if self._is_closed:
            return
        try:
            await self._asgi_send(message)
        except OSError:
            # As ASGI servers report that the client has disconnected. `websocket.disconnect` follows.
            self._is_closed = True
