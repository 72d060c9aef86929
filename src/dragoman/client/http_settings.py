"""What both clients share about httpx: its settings, the meaning of its errors, and decompression.

httpx decompresses each received chunk as a whole, a thousandfold for gzip, and a chunk may have a megabyte. So bodies
are decompressed here:

1. No piece has more than MAX_PIECE_BYTES, so the reader can stop at its own limit.
2. Only what was requested (`planner.ACCEPT_ENCODING`) is decompressed. An unknown encoding is passed on unchanged: some
   servers name what is not a compression.
3. A body that is compressed twice is an error.
"""

import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import httpx

from dragoman.client.call import ClientCall
from dragoman.client.planner import FailedAttempt
from dragoman.core.errors import BadAnswer, ConfigError
from dragoman.core.events import Event
from dragoman.core.urls import ServerAddress

MAX_CONNECTIONS = 1000
KEEPALIVE_SECONDS = 2.0
"""Keep idle connections for less time than servers do: a request on a connection that is being closed may be lost."""
DRAIN_SECONDS = 1.0
"""How long a server may take to end the response of a complete reply. The connection is reused only after that."""
NO_RESPONSE = (httpx.HTTPError, httpx.InvalidURL)
"""What httpx raises if a request gets no complete response."""
ENCODINGS = ("gzip", "x-gzip", "deflate")
MAX_PIECE_BYTES = 16 * 1024
GZIP_OR_ZLIB = zlib.MAX_WBITS | 32

Decompress = Callable[[bytes], Iterator[bytes]]


def client_settings(site: ServerAddress, timeout: float, connect_timeout: float) -> dict[str, Any]:
    return {
        "timeout": httpx.Timeout(timeout, connect=connect_timeout),
        "limits": httpx.Limits(
            max_connections=MAX_CONNECTIONS,
            max_keepalive_connections=MAX_CONNECTIONS,
            keepalive_expiry=KEEPALIVE_SECONDS,
        ),
        "follow_redirects": False,
        # Loopback needs no proxy, and plain HTTP needs no certificates.
        "trust_env": not site.is_loopback,
        "verify": site.is_tls,
    }


def failed_attempt(error: httpx.HTTPError) -> FailedAttempt:
    if isinstance(error, httpx.UnsupportedProtocol | httpx.LocalProtocolError):
        raise ConfigError(f"the request cannot be sent: {error}") from error
    unreached = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.PoolTimeout | httpx.ProxyError)
    timed_out = isinstance(error, httpx.TimeoutException)
    return FailedAttempt("unreached" if unreached else "lost", describe(error), timed_out)


def end_interrupted(client_call: ClientCall, error: httpx.HTTPError) -> Iterator[list[Event]]:
    """Finish a call whose response could not be read to its end."""
    if isinstance(error, httpx.DecodingError):
        raise BadAnswer(f"the response cannot be decompressed: {describe(error)}") from error
    return client_call.broken(describe(error))


def describe(error: httpx.HTTPError | httpx.InvalidURL) -> str:
    if isinstance(error, httpx.ReadTimeout):
        return f"no data for {_timeout(error, 'read')}"
    if isinstance(error, httpx.ConnectTimeout):
        return f"no connection within {_timeout(error, 'connect')}"
    return str(error) or type(error).__name__


def _timeout(error: httpx.HTTPError, kind: str) -> str:
    limit = error.request.extensions.get("timeout", {}).get(kind)
    return f"{limit:g} s" if isinstance(limit, int | float) else "too long"


def decompressor(headers: Mapping[str, str]) -> Decompress | None:
    """Return a function for the chunks of a body, or None if the body is not compressed."""
    encodings = headers.get("content-encoding", "").lower().split(",")
    layers = sum(name.strip() in ENCODINGS for name in encodings)
    return _Decompressor(layers).feed if layers else None


class _Decompressor:
    def __init__(self, layers: int) -> None:
        self._layers = layers
        self._zlib = zlib.decompressobj(GZIP_OR_ZLIB)
        self._is_at_start = True

    def feed(self, data: bytes) -> Iterator[bytes]:
        if self._layers > 1:
            raise httpx.DecodingError("the body is compressed more than once")
        while data and not self._zlib.eof:
            try:
                piece = self._zlib.decompress(data, MAX_PIECE_BYTES)
            except zlib.error as error:
                if not self._is_at_start:
                    raise httpx.DecodingError(str(error)) from error
                # Some servers send deflate without the header of zlib.
                self._zlib = zlib.decompressobj(-zlib.MAX_WBITS)
                piece = b""
            else:
                data = self._zlib.unconsumed_tail
            self._is_at_start = False
            if piece:
                yield piece
