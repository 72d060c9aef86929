"""One request and its response.

Rules
1. Every response carries `x-request-id`; a response is begun once and ended once. Whoever would write while its head
   is on its way waits for that.
2. When the client leaves, the task that answers is cancelled; so it is when it is overdue, as an error.
3. A body is read whole, within its size and its time, before anything is done with it.
"""

import asyncio
import logging
import math
import re
import time
from collections.abc import Awaitable, Callable, Iterable, MutableMapping, Sequence
from functools import lru_cache
from typing import Any, Protocol, TypeVar
from urllib.parse import parse_qsl

import msgspec

from dragoman.config.settings import Limits
from dragoman.core.errors import (
    BadRequest,
    DeadlineExceeded,
    DragomanError,
    EngineFailed,
    ModelFailed,
    RequestTimeout,
    TooLarge,
    UnsupportedMedia,
)
from dragoman.protocols.registry import OPENAI, Family
from dragoman.server.auth.quotas import Holding
from dragoman.server.auth.scopes import ANYBODY, Caller
from dragoman.server.http.bodies import decode_body
from dragoman.server.telemetry import RequestRecord
from dragoman.server.telemetry.meter import Meter
from dragoman.server.telemetry.record import CLIENT_LEFT

T = TypeVar("T")
Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Overdue = Callable[[float], DragomanError]
"""The error for something that did not come within so many seconds."""

log = logging.getLogger("dragoman.server")

JSON = b"application/json"
EVENT_STREAM = b"text/event-stream; charset=utf-8"
COMMENT = b": keep-alive\n\n"
LONGEST_LIST = 1000
"""Characters of a header that lists words."""
PLAIN = (
    "type",
    "http_version",
    "scheme",
    "method",
    "path",
    "raw_path",
    "query_string",
    "root_path",
    "headers",
    "client",
)
"""Parts of an ASGI scope that are values and nothing else."""
SINGLE_VALUED = frozenset(
    {
        *(b"host", b"authorization", b"x-api-key", b"content-length", b"content-type", b"content-encoding"),
        *(b"origin", b"x-real-ip", b"x-dragoman-timeout", b"x-dragoman-strict", b"traceparent"),
    }
)
"""Headers that may have one value only."""
DIRECT = "dragoman.direct"
"""An extension of the ASGI scope: the connection itself, which hands out the `Direct` of a scope."""
_HOST = re.compile(rb"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?")


class Direct(Protocol):
    """The exchange on its connection. What can be done at once needs no coroutine; where it cannot, None or False."""

    @property
    def task(self) -> asyncio.Task[None]: ...

    def take_body(self) -> bytes | None: ...

    def reply(self, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> bool: ...

    def write(self, data: bytes) -> bool: ...


@lru_cache(maxsize=256)
def _host_name(host: bytes) -> bytes | None:
    """Without the port; None where it is not a name at all."""
    match = _HOST.fullmatch(host)
    return match[1].lower() if match else None


@lru_cache(maxsize=256)
def _media_type(content_type: bytes) -> bytes:
    return content_type.partition(b";")[0].strip().lower()


def _slow_body(seconds: float) -> DragomanError:
    return RequestTimeout(f"the body took longer than {seconds:g} s to arrive")


class Exchange:
    family: Family = OPENAI
    """In whose words errors are told."""
    begun = False
    gone = False
    is_relayed = False
    """Whether another process answers it, and writes it down."""
    streaming = False
    due = math.inf
    stopping: DragomanError | None = None
    """Why this request would be cancelled by the server itself."""
    caller: Caller = ANYBODY
    lease: Holding | None = None
    """What this request has of the limits of its key, if that has any."""
    meter: Meter | None = None
    deadline = math.inf
    weight = 0
    """Bytes of the body, and of what it refers to."""
    _body_read = False
    _ambiguous: bytes | None = None
    """A header that may be sent once and was sent more often."""
    _ignored: tuple[str, ...] = ()
    _warnings: tuple[str, ...] = ()
    _allowed = 0.0
    _overdue: Overdue | None = None
    _aborted: DragomanError | None = None
    _opening: asyncio.Event | None = None
    """There while the head of a stream is on its way."""
    _listener: asyncio.Task[None] | None = None
    _pinging: asyncio.Task[None] | None = None

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send
        connection = scope.get("extensions", {}).get(DIRECT)
        self._direct: Direct | None = None if connection is None else connection.response(scope)
        self.method: str = scope["method"]
        self.path: str = scope["path"].removeprefix(scope.get("root_path", ""))
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        if len(self.headers) != len(scope["headers"]):
            self.headers, self._ambiguous = merge_headers(scope["headers"])
        self.record = RequestRecord(id="", route=f"{self.method} {self.path[:100]}")
        self.extra_headers: list[tuple[bytes, bytes]] = []
        self.started = self.heard = self.written = time.monotonic()
        self._task = asyncio.current_task() if self._direct is None else self._direct.task

    def speak(self, family: Family) -> None:
        self.family = family
        if family.id_header is not None:
            self.extra_headers.append((family.id_header, self.record.id.encode()))

    def check_headers(self, allowed: frozenset[bytes] | None) -> None:
        """Refuse a request whose headers are ambiguous or name a host other than the allowed ones."""
        if self._ambiguous is not None:
            self.extra_headers.append((b"connection", b"close"))
            raise BadRequest(f"the header {self._ambiguous.decode('latin-1')} was sent more than once; send it once")
        name = _host_name(self.headers.get(b"host", b""))
        if name is None or (allowed is not None and name not in allowed):
            self.extra_headers.append((b"connection", b"close"))
            raise BadRequest("the Host header does not name this server; `hosts` in its configuration allows names")

    @property
    def peer(self) -> str | None:
        """The address at the other end of the connection; a Unix socket has none."""
        client = self._scope.get("client")
        return client[0] if client else None

    def plain_scope(self) -> dict[str, Any]:
        """What of the request's head another process needs to answer it."""
        return {name: self._scope[name] for name in PLAIN}

    def query(self) -> dict[str, str]:
        return dict(parse_qsl(self._scope["query_string"].decode("latin-1")))

    async def decoded(self, limits: Limits, decode: Callable[[bytes], T]) -> T:
        """The body as what `decode` makes of it; a large one in a thread, so that meanwhile others stream."""
        self._check_media()
        if int(self.headers.get(b"content-length", b"0")) > limits.body_bytes:
            raise self._too_large(limits)
        body = None if self._direct is None else self._direct.take_body()
        if body is None:
            body = await self._arriving_body(limits)
        elif len(body) > limits.body_bytes:
            raise self._too_large(limits)
        self._body_read = True
        self.weight = len(body)
        return await decode_body(body, limits.body_elements, decode)

    async def _arriving_body(self, limits: Limits) -> bytes:
        chunks: list[bytes] = []
        size = 0
        self.expect(limits.body_seconds, _slow_body)
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self.gone = True
                raise asyncio.CancelledError
            chunks.append(message.get("body", b""))
            size += len(chunks[-1])
            if size > limits.body_bytes:
                raise self._too_large(limits)
            if not message.get("more_body", False):
                break
        self.due = math.inf
        return b"".join(chunks)

    def _check_media(self) -> None:
        media = _media_type(self.headers.get(b"content-type", b""))
        # Without a type only programs can send a body; a web page of another origin must not.
        if media != JSON and (media or b"origin" in self.headers):
            raise UnsupportedMedia("send the body as JSON, with the header 'content-type: application/json'")
        encoding = self.headers.get(b"content-encoding")
        if encoding is not None and encoding.lower() != b"identity":
            raise UnsupportedMedia("compressed bodies are not accepted")

    def _too_large(self, limits: Limits) -> TooLarge:
        self.extra_headers.append((b"connection", b"close"))
        return TooLarge(f"the body is larger than {limits.body_bytes} bytes")

    def listen(self) -> None:
        """From now on, cancel the task that answers when the client leaves. Until the body is read it sees it."""
        if self._listener is None and self._body_read:
            self._listener = asyncio.create_task(self._until_gone())

    async def _until_gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.gone = True
        if self._task is not None:
            self._task.cancel()

    def told(self, error: Exception) -> DragomanError:
        """The error as the caller hears of it; one that nobody expected goes to the log with all it has."""
        if not isinstance(error, DragomanError):
            log.error("request %s failed", self.record.id, exc_info=error, extra={"request_id": self.record.id})
            error = EngineFailed("an internal error; the server's log says more")
        elif isinstance(error, ModelFailed):
            words = error.__cause__ or error
            named = {"request_id": self.record.id}
            log.error("request %s: model %s: %s", self.record.id, self.record.model, words, extra=named)
        self.record.error = error.code
        return error

    def expect(self, seconds: float, otherwise: Overdue) -> None:
        """What comes next must come within that time."""
        self._allowed = seconds
        self._overdue = otherwise
        self.note_progress()

    def note_progress(self) -> None:
        """Something came: the time allowed for the next thing begins anew."""
        self.heard = now = time.monotonic()
        self.due = now + self._allowed

    def note_running(self, count: int) -> None:
        """So many may say something; where all wait for their turn, nobody is silent."""
        self.note_progress()
        if not count:
            self.due = math.inf

    def limit_time(self, seconds: float) -> None:
        """From beginning to end it takes no longer than that; the caller may have asked for less."""
        asked = self.headers.get(b"x-dragoman-timeout")
        if asked is not None:
            seconds = min(seconds, _asked_seconds(asked))
        self.deadline = self.started + seconds

    def abort_late(self) -> None:
        self._abort(DeadlineExceeded(f"the request took longer than {self.deadline - self.started:g} s"))

    def abort_overdue(self) -> None:
        if self._overdue is not None:
            self._abort(self._overdue(self._allowed))

    def _abort(self, error: DragomanError) -> None:
        if self._aborted is None and self._task is not None:
            self._aborted = error
            if not self._body_read:
                # The rest of the body may go on coming for ever.
                self.extra_headers.append((b"connection", b"close"))
            self._task.cancel()

    def take_cancellation(self) -> DragomanError | None:
        """End the cancellation at hand and tell the error behind it; None leaves it as it is: nobody would hear."""
        error = self._aborted or self.stopping
        if error is None or self.gone or self._task is None:
            return None
        self._task.uncancel()
        return error

    def ignore(self, params: Iterable[str]) -> None:
        """The reply is not to say that these parameters were honoured."""
        self._ignored = tuple(dict.fromkeys((*self._ignored, *params)))

    def begin_again(self) -> None:
        """Another engine is asked: what the one before could not honour is not its business."""
        self._ignored = self._warnings = ()

    def warn(self, words: str) -> None:
        """Something is odd about the reply; the log says so, and a header where it has not been sent."""
        log.warning("request %s: %s", self.record.id, words, extra={"request_id": self.record.id})
        self.record.warnings += 1
        self._warnings = tuple(dict.fromkeys((*self._warnings, words)))

    def _head(self, status: int, content_type: bytes, length: int | None) -> list[tuple[bytes, bytes]]:
        self.begun = True
        self.record.status = status
        headers = [(b"content-type", content_type), (b"x-request-id", self.record.id.encode()), *self.extra_headers]
        if self._ignored:
            headers.append((b"x-dragoman-ignored", _listed(self._ignored)))
        if self._warnings:
            headers.append((b"x-dragoman-warning", _listed(self._warnings)))
        if self.lease is not None:
            headers += self.family.rate_headers(self.lease.rates())
        headers.append((b"cache-control", b"no-cache") if length is None else (b"content-length", b"%d" % length))
        return headers

    async def _begin_stream(self) -> None:
        """The first to write sends the head; who comes meanwhile waits until it has left."""
        if self._opening is not None:
            await self._opening.wait()
            return
        self._opening = sent = asyncio.Event()
        headers = self._head(200, EVENT_STREAM, None)
        try:
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        finally:
            self._opening = None
            sent.set()

    def reply_json(self, payload: object, status: int = 200) -> Awaitable[None]:
        return self.reply(msgspec.json.encode(payload), JSON, status)

    async def reply(self, body: bytes, content_type: bytes, status: int = 200) -> None:
        self.streaming = False
        self.due = self.deadline = math.inf
        headers = self._head(status, content_type, len(body))
        if self._direct is None or not self._direct.reply(status, headers, body):
            await self._send({"type": "http.response.start", "status": status, "headers": headers})
            await self._send({"type": "http.response.body", "body": body})

    async def pass_on(self, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
        """A whole response that somebody else has made."""
        self.begun = True
        if self._direct is None or not self._direct.reply(status, headers, body):
            await self._send({"type": "http.response.start", "status": status, "headers": headers})
            await self._send({"type": "http.response.body", "body": body})

    async def write(self, data: bytes) -> None:
        """More of a stream; the first piece begins it."""
        self.due = math.inf
        if not self.begun or self._opening is not None:
            await self._begin_stream()
        await self._send({"type": "http.response.body", "body": data, "more_body": True})
        # The client may have taken its time: neither that nor the silence meanwhile is the engine's.
        self.note_progress()
        self.written = self.heard

    def write_now(self, data: bytes) -> bool:
        """The same without waiting, where the connection offers it; False where it does not, now or ever."""
        if self._direct is None or not self.begun or not self._direct.write(data):
            return False
        self.written = self.heard
        return True

    def ping(self) -> None:
        if self._pinging is None or self._pinging.done():
            self._pinging = asyncio.create_task(self._comment())

    async def _comment(self) -> None:
        if self.streaming and (not self.begun or self._opening is not None):
            await self._begin_stream()
        if not self.streaming:
            # It has ended since this was planned.
            return
        self.written = time.monotonic()
        await self._send({"type": "http.response.body", "body": COMMENT, "more_body": True})

    async def end(self, data: bytes) -> None:
        self.streaming = False
        self.due = math.inf
        if self._opening is not None:
            await self._opening.wait()
        await self._send({"type": "http.response.body", "body": data})

    def close(self) -> None:
        """The request has ended, one way or the other."""
        for task in (self._listener, self._pinging):
            if task is not None:
                task.cancel()
        if self.meter is not None:
            self.meter.close()
        if self.lease is not None:
            self.lease.settle(self.record.spent_tokens)
        self.record.duration_us = int((time.monotonic() - self.started) * 1e6)
        if self.gone:
            self.record.status = CLIENT_LEFT


def merge_headers(lines: Iterable[tuple[bytes, bytes]]) -> tuple[dict[bytes, bytes], bytes | None]:
    """Headers by name: the values of repeated lines are joined in order. The second value is the name of an
    ambiguous header: Host if it is repeated, or another one of `SINGLE_VALUED` with different values."""
    headers: dict[bytes, bytes] = {}
    ambiguous = None
    for name, value in lines:
        if name not in headers:
            headers[name] = value
        elif name not in SINGLE_VALUED:
            headers[name] += b", " + value
        elif name == b"host" or headers[name] != value:
            ambiguous = name
    return headers, ambiguous


def _asked_seconds(value: bytes) -> float:
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise BadRequest("the header X-Dragoman-Timeout is a number of seconds, more than 0")
    return seconds


def _listed(words: Sequence[str]) -> bytes:
    """Words as the value of a header. A caller may have called a field anything, so that it needs care."""
    names = ", ".join(words)
    shown = names if len(names) <= LONGEST_LIST else names[:LONGEST_LIST] + "..."
    return re.sub(rb"[^ -~]", b"?", shown.encode("ascii", "replace"))
