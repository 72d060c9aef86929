"""Parses HTTP/1.1 request heads and bodies without I/O.

    request   := head body
    head      := request-line CRLF (field CRLF)* CRLF
    body      := empty | Content-Length bytes | chunk* last-chunk (field CRLF)* CRLF
    chunk     := size [extensions] CRLF bytes CRLF

Rules
1. A head ends at its first empty line. llhttp gets exactly the bytes of one head. It does not see the body or the next
   request, so its handling of upgrades has no effect.
2. Every `feed` consumes its input or returns the part after the end. No byte is parsed twice.
3. The head is bounded. Chunk extensions and trailers of one body together have the same bound. They are discarded: a
   trailer never becomes a header.
4. Bytes that carry nothing are bounded too: empty lines before a head, and small chunks of a body.
5. An absolute target (`GET http://host/path`) replaces the Host header, as RFC 9112 demands.
6. `chunked` is the only transfer coding. Another coding before it is a 501; anything else is a 400.
"""

import re
from functools import lru_cache
from urllib.parse import unquote

import httptools

from dragoman.core.errors import BadRequest, DragomanError, HeadersTooLarge, NotSupported

HEAD_END = b"\r\n\r\n"
FRAMING = frozenset({b"content-length", b"transfer-encoding", b"expect"})
VERSIONS = ("1.1", "1.0")
MAX_EMPTY_LINES = 4096
"""Bytes of empty lines before a head."""
SMALL_CHUNK = 64
MAX_SMALL_CHUNKS = 100_000
"""Chunks of at most `SMALL_CHUNK` bytes in one body. A million of them takes a second of processor time."""
MAX_SIZE_LINE = 20
"""Bytes of a chunk's size line that do not count as extensions: 16 digits, CRLF, and two spare."""
_SIZE_LINE = re.compile(rb"([0-9A-Fa-f]{1,16})(?:[ \t]*;[\t\x20-\x7e\x80-\xff]*)?\r\n")
_PLAIN_SIZE = re.compile(rb"([0-9A-Fa-f]{1,8})\r\n")
_TRAILER = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+:[\t\x20-\x7e\x80-\xff]*\r\n")


def headers_too_large(limit: int) -> DragomanError:
    return HeadersTooLarge(f"the headers are larger than {limit} bytes")


class RequestHead:
    __slots__ = (
        *("_codings", "_empty", "_expect", "_limit", "_parser", "_size", "_tail"),
        *("content_length", "headers", "is_complete", "keep_alive", "method", "url", "version"),
    )

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._parser = httptools.HttpRequestParser(self)
        self._size = 0
        self._empty = 0
        """Bytes of empty lines so far."""
        self._tail = b""
        self._codings: list[bytes] = []
        self.url = b""
        self.headers: list[tuple[bytes, bytes]] = []
        self.content_length = 0
        self._expect = b""
        self.is_complete = False
        self.keep_alive = False
        self.method = ""
        self.version = ""

    @property
    def is_started(self) -> bool:
        return self._size > 0

    @property
    def is_chunked(self) -> bool:
        return bool(self._codings)

    @property
    def expects_continue(self) -> bool:
        return self._expect == b"100-continue" and self.version == "1.1"

    @property
    def path(self) -> str:
        return self.url.partition(b"?")[0].decode("latin-1")

    def feed(self, data: bytes) -> bytes:
        """Parse more data, and return what follows the head if it is complete now."""
        if not self._size:
            # A few empty lines before a request are ignored.
            stripped = data.lstrip(b"\r\n")
            self._empty += len(data) - len(stripped)
            if self._empty > MAX_EMPTY_LINES:
                raise BadRequest("too many empty lines before the request")
            data = stripped
        joined = self._tail + data
        found = joined.find(HEAD_END)
        end = len(data) if found < 0 else found + len(HEAD_END) - len(self._tail)
        self._tail = joined[-len(HEAD_END) + 1 :]
        self._size += end
        self._parse(data[:end])
        if self._size > self._limit:
            # Parsed before refused: path and headers determine the error format.
            raise headers_too_large(self._limit)
        if self.is_complete != (found >= 0):
            raise BadRequest("malformed HTTP request")
        if self.is_complete:
            self._check()
        return data[end:]

    def _parse(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            # The head is complete. `Upgrade` is ignored.
            pass
        except httptools.HttpParserError as error:
            raise BadRequest("malformed HTTP request") from error

    def _check(self) -> None:
        if self.method == "CONNECT" or self.version not in VERSIONS:
            raise BadRequest("this is not a valid HTTP/1.1 request")
        codings = self._codings
        if not codings:
            return
        if codings[-1] != b"chunked" or b"chunked" in codings[:-1] or self.version == "1.0":
            raise BadRequest("Transfer-Encoding must be exactly 'chunked', and only in HTTP/1.1")
        if len(codings) > 1:
            raise NotSupported("compressed transfer codings are not supported; send 'Transfer-Encoding: chunked'")

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name in FRAMING:
            self._note_framing(name, value)
        self.headers.append((name, value))

    def _note_framing(self, name: bytes, value: bytes) -> None:
        if name == b"content-length":
            self.content_length = int(value)
        elif name == b"expect":
            self._expect = value.lower()
        else:
            self._codings += [coding.strip().lower() for coding in value.split(b",")]

    def on_headers_complete(self) -> None:
        self.is_complete = True
        self.method = self._parser.get_method().decode("ascii")
        self.version = self._parser.get_http_version()
        self.keep_alive = self.version == "1.1" and self._parser.should_keep_alive()


@lru_cache(maxsize=256)
def parse_target(url: bytes) -> tuple[str, bytes, bytes, bytes | None]:
    """The decoded path, the path as sent, the query, and host and port if the target is absolute."""
    try:
        parsed = httptools.parse_url(url)
    except httptools.HttpParserError as error:
        raise BadRequest("the request target is not a valid URL") from error
    raw = parsed.path or b"/"
    path = raw.decode("ascii")
    host = None if parsed.host is None else url.partition(b"//")[2].partition(b"/")[0].partition(b"?")[0]
    return unquote(path) if "%" in path else path, raw, parsed.query or b"", host


class FixedBody:
    __slots__ = ("left",)

    def __init__(self, length: int) -> None:
        self.left = length

    def feed(self, data: bytes) -> tuple[bytes, bytes | None]:
        """The content, and what follows the body; None while the body is incomplete."""
        size = len(data)
        if size < self.left:
            self.left -= size
            return data, None
        left, self.left = self.left, 0
        return data[:left], data[left:]


class ChunkedBody:
    __slots__ = ("_ends_chunk", "_extra", "_in_trailers", "_limit", "_line", "_size", "_small_chunks")

    left = None
    """The length is unknown."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._line = b""
        """The part of a line that has arrived."""
        self._size = 0
        """Bytes of the chunk that have not arrived."""
        self._ends_chunk = False
        self._in_trailers = False
        self._extra = 0
        """Bytes of extensions and trailers."""
        self._small_chunks = 0

    def feed(self, data: bytes) -> tuple[bytes, bytes | None]:
        """The content, and what follows the body; None while the body is incomplete."""
        pieces: list[bytes] = []
        at, end = 0, len(data)
        while at < end:
            if self._size:
                piece = data[at : at + self._size]
                pieces.append(piece)
                self._size -= len(piece)
                self._ends_chunk = True
                at += len(piece)
                continue
            whole = None if self._line or self._ends_chunk or self._in_trailers else _PLAIN_SIZE.match(data, at)
            if whole is not None:
                # The common case: no extensions, and the whole chunk has arrived.
                start = whole.end()
                stop = start + int(whole[1], 16)
                if start < stop < end - 1 and data.startswith(b"\r\n", stop):
                    self._count_chunk(stop - start)
                    pieces.append(data[start:stop])
                    at = stop + 2
                    continue
            line_end = data.find(b"\n", at) + 1
            line = self._line + data[at : line_end or end]
            if len(line) + self._extra > self._limit + MAX_SIZE_LINE:
                raise headers_too_large(self._limit)
            if not line_end:
                self._line = line
                break
            self._line = b""
            at = line_end
            if self._process_line(line):
                return b"".join(pieces), data[at:]
        return b"".join(pieces), None

    def _count_chunk(self, size: int) -> None:
        if size <= SMALL_CHUNK:
            self._small_chunks += 1
            if self._small_chunks > MAX_SMALL_CHUNKS:
                raise BadRequest("the body has too many small chunks; send larger ones, or a Content-Length")

    def _process_line(self, line: bytes) -> bool:
        """Process a size line, the end of a chunk, or a trailer. True if the body ends here."""
        if self._ends_chunk:
            if line != b"\r\n":
                raise BadRequest("a chunk of the body is longer than its size")
            self._ends_chunk = False
        elif not self._in_trailers:
            match = _SIZE_LINE.fullmatch(line)
            if match is None:
                raise BadRequest("the size of a chunk of the body is not valid")
            self._size = int(match[1], 16)
            self._count_chunk(self._size)
            self._extra += max(0, len(line) - MAX_SIZE_LINE)
            self._in_trailers = not self._size
        elif line == b"\r\n":
            return True
        elif _TRAILER.fullmatch(line) is None:
            raise BadRequest("a trailer of the body is not valid")
        else:
            self._extra += len(line)
        return False
