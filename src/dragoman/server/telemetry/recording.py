"""Records exchanges in a file of JSON lines, if `record` is set (see `recordings.recorded_exchange`).

Rules
1. Every process that answers requests appends to the file itself. A line is one write under a lock of the file: lines
   are never interleaved, and a line that does not fit on the disk is removed completely.
2. A thread writes, so no request waits for the disk. Above `MAX_QUEUED` bytes, exchanges are left out.
3. Of each body, at most `MAX_BODY` bytes are recorded.
4. The file belongs to its owner only. After it was moved away, the next line begins a new one.
5. A problem is logged once, until a line was written again.
6. Credentials are hidden: the keys of this server, fields such as `api_key`, and the secrets of MCP servers
   (see `core.urls.find_server_secrets`), wherever they occur.
"""

import errno
import fcntl
import logging
import os
import queue
import re
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import msgspec

from dragoman.core.errors import DECODE_ERRORS, ConfigError
from dragoman.core.urls import REDACTED, find_server_secrets, redact_secrets, secret_forms
from dragoman.recordings.recorded_exchange import HEADERS, NOTHING, RecordedExchange, TokenCounts, encode_body
from dragoman.server.telemetry.metrics import RequestRecord

log = logging.getLogger("dragoman.server.telemetry")

MAX_BODY = 8 * 1024 * 1024
MAX_QUEUED = 64 * 1024 * 1024
END_SECONDS = 5.0
"""How long the end of the process waits for the last lines."""
MODE = 0o600
CREDENTIAL = re.compile(
    r'("(?:x-)?(?:api[_-]?key|authorization(?:_token)?|(?:access|auth|bearer)_token)"\s*:\s*")(?:[^"\\]|\\.)+',
    re.IGNORECASE,
)
MCP_LISTS = ("tools", "mcp_servers")
"""Fields of a request that may contain MCP servers."""
MCP_ADDRESSES = ("server_url", "url")
MCP_TOKENS = ("authorization", "authorization_token")
Redact = Callable[[str], str]


class ExchangeRecording:
    """What is recorded of an open exchange."""

    status = 0
    _size = 0

    def __init__(self, started: float, job: Literal["background", "batch"] | None = None) -> None:
        """`started` is a monotonic time."""
        self.began = time.time() - (time.monotonic() - started)
        self.job = job
        self.request = b""
        self.reply = b""
        self.pieces: list[tuple[float, bytes]] = []
        self.cut: list[Literal["request", "reply"]] = []
        self._started = started

    def note_request(self, body: bytes) -> None:
        self.request = body[:MAX_BODY]
        if len(body) > MAX_BODY:
            self.cut.append("request")

    def note_reply(self, status: int, body: bytes) -> None:
        self.status = status
        self.reply = body[:MAX_BODY]
        if len(body) > MAX_BODY:
            self.cut.append("reply")

    def note_piece(self, data: bytes) -> None:
        """Note a piece of a stream."""
        self.status = 200
        self._size += len(data)
        if self._size <= MAX_BODY:
            self.pieces.append((round(time.monotonic() - self._started, 6), data))
        elif "reply" not in self.cut:
            self.cut.append("reply")

    @property
    def size(self) -> int:
        return len(self.request) + len(self.reply) + min(self._size, MAX_BODY)

    def complete(
        self, record: RequestRecord, headers: Mapping[bytes, bytes], is_disconnected: bool, redact: Redact
    ) -> RecordedExchange:
        redact = _with_secrets(redact, self.request)
        kept = {name: headers[name.encode()].decode("latin-1") for name in sorted(HEADERS) if name.encode() in headers}
        method, _, path = record.route.partition(" ")
        counts = (record.prompt_tokens, record.completion_tokens, record.cached_tokens, record.reasoning_tokens)
        return RecordedExchange(
            time=round(self.began, 6),
            id=record.id,
            method=method,
            path=path,
            headers={name: redact(value) for name, value in kept.items()},
            request=_encode(self.request, redact),
            status=self.status or record.status,
            model=record.model,
            reply=_encode(self.reply, redact),
            stream=tuple([(at, redact(data.decode("utf-8", "replace"))) for at, data in self.pieces]),
            usage=TokenCounts(*counts) if any(counts) else None,
            duration=record.duration_us / 1e6,
            job=self.job,
            disconnected=is_disconnected,
            cut=tuple(self.cut),
        )


def _encode(body: bytes, redact: Redact) -> msgspec.Raw:
    text = body.decode("utf-8", "replace")
    redacted = redact(text)
    return encode_body(body if redacted == text else redacted.encode()) if body else NOTHING


def _with_secrets(redact: Redact, request: bytes) -> Redact:
    """Hide the credentials of the request too, wherever they occur."""
    secrets = _mcp_secrets(request) if b'"mcp' in request else ()
    # The longest first: one may contain another.
    forms = sorted({form for secret in secrets for form in secret_forms(secret)}, key=len, reverse=True)
    return lambda text: CREDENTIAL.sub(rf"\g<1>{REDACTED}", redact_secrets(redact(text), forms))


def _mcp_secrets(request: bytes) -> Iterator[str]:
    """The secrets of the MCP servers that the request describes, in its own fields or in those of its items."""
    try:
        body: Any = msgspec.json.decode(request)
    except DECODE_ERRORS:
        return
    items = body.get("input") if isinstance(body, dict) else None
    for holder in (body, *(items if isinstance(items, list) else ())):
        lists = [holder.get(name) for name in MCP_LISTS] if isinstance(holder, dict) else []
        for entry in (entry for entries in lists if isinstance(entries, list) for entry in entries):
            if isinstance(entry, dict):
                yield from _server_secrets(entry)


def _server_secrets(entry: dict[str, Any]) -> Iterator[str]:
    headers = entry.get("headers")
    values = dict(headers) if isinstance(headers, dict) else {}
    values |= {name: entry.get(name) for name in MCP_TOKENS}
    texts = {name: value for name, value in values.items() if isinstance(value, str)}
    for name in MCP_ADDRESSES:
        url = entry.get(name)
        yield from find_server_secrets(url if isinstance(url, str) else None, texts)


class RecordingFile:
    """The file of a recording. Raises a ConfigError if it cannot be opened."""

    def __init__(self, path: str) -> None:
        self._path = path
        try:
            self._descriptor = _open(path)
        except OSError as error:
            raise ConfigError(f"the recording {path} cannot be written: {error.strerror}") from error
        self._has_failed = False
        self._is_behind = False
        self._queue: queue.SimpleQueue[tuple[int, Callable[[], RecordedExchange]] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._queued = 0
        """Bytes."""
        self._thread = threading.Thread(target=self._run, name="dragoman-recording", daemon=True)
        self._thread.start()

    def write(self, size: int, complete: Callable[[], RecordedExchange]) -> None:
        """Write an exchange of about this size later. `complete` is called in the thread."""
        with self._lock:
            is_full = self._queued > 0 and self._queued + size > MAX_QUEUED
            if not is_full:
                self._queued += size
        if not is_full:
            self._queue.put((size, complete))
        elif not self._is_behind:
            log.error("the recording %s is written too slowly; exchanges are missing from it", self._path)
        self._is_behind = is_full

    def close(self) -> None:
        """Write the last lines. Further calls do nothing."""
        self._queue.put(None)
        self._thread.join(END_SECONDS)

    def _run(self) -> None:
        while (entry := self._queue.get()) is not None:
            size, complete = entry
            try:
                self._append(msgspec.json.encode(complete()) + b"\n")
                self._has_failed = False
            except OSError as error:
                self._report(error.strerror or str(error))
            except Exception as error:  # noqa: BLE001 (logged; the next exchange is recorded)
                self._report(repr(error))
            with self._lock:
                self._queued -= size
        os.close(self._descriptor)

    def _report(self, reason: str) -> None:
        if not self._has_failed:
            log.error("cannot write the recording %s: %s; exchanges are missing from it", self._path, reason)
        self._has_failed = True

    def _append(self, line: bytes) -> None:
        self._follow_path()
        if not stat.S_ISREG(os.fstat(self._descriptor).st_mode):
            os.write(self._descriptor, line)
            return
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        try:
            before = os.fstat(self._descriptor).st_size
            if os.write(self._descriptor, line) < len(line):
                # On a full disk the system writes a part, without an error.
                os.ftruncate(self._descriptor, before)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def _follow_path(self) -> None:
        """Open the path again if another file is there, or none."""
        own = os.fstat(self._descriptor)
        try:
            found = os.stat(self._path)  # noqa: PTH116 (a path may be a device)
            is_same = (own.st_dev, own.st_ino) == (found.st_dev, found.st_ino)
        except FileNotFoundError:
            is_same = False
        if is_same:
            return
        new = _open(self._path)
        os.close(self._descriptor)
        self._descriptor = new


def _open(path: str) -> int:
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, MODE)
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
        os.fchmod(descriptor, MODE)
    return descriptor
