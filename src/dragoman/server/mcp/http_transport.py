"""HTTP for connections to MCP servers.

Rules
1. The address of a server that a request names is checked before every connection, also after a redirect, and the
   connection goes to exactly that address. Proxies are not used. Redirects to another origin are not followed.
2. A response has a maximum size, and must not be compressed.
3. A failure is returned as a response with a JSON-RPC error, so that it ends only the call that it belongs to.
"""

import ssl
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import msgspec
from mcp.client.streamable_http import streamable_http_client

from dragoman.config.sections import Network
from dragoman.server.mcp.addresses import AddressRefused, Resolver

CONNECT_SECONDS = 10.0
FAILED_STATUS = 502
OTHER_ERROR = -32050
"""A JSON-RPC code that MCP does not define."""
CONNECTION_BROKEN_MESSAGE = "the server broke the connection"
STATUS = "status"
"""The key of an HTTP status in the data of a JSON-RPC error."""
IDENTITY = ("", "identity")
JSON = {"content-type": "application/json"}
SESSION_UNKNOWN = 404


class ServerMisbehaved(httpx2.StreamError):
    """The message can be shown to callers. The package `mcp` expects this kind of error while it reads a response."""


@asynccontextmanager
async def http_transport(
    url: str, headers: Mapping[str, str], transport: "GuardedTransport", on_end: Callable[[], None]
) -> AsyncIterator[Any]:
    """Connect to a server. Calls have their own time limit, so reading has none. `on_end` is not called."""
    timeout = httpx2.Timeout(None, connect=CONNECT_SECONDS)
    fields = {"accept-encoding": "identity", **headers}
    async with (
        httpx2.AsyncClient(transport=transport, headers=fields, timeout=timeout, trust_env=False) as client,
        streamable_http_client(url, http_client=client, max_sse_event_size=transport.max_bytes) as streams,
    ):
        yield streams


class GuardedTransport(httpx2.AsyncBaseTransport):
    """`allowed` are the private networks that the server may be in; None means that its address is not checked."""

    def __init__(
        self, resolver: Resolver, allowed: Sequence[Network] | None, context: ssl.SSLContext, max_bytes: int
    ) -> None:
        self.max_bytes = max_bytes
        self._resolver = resolver
        self._allowed = allowed
        self._inner = httpx2.AsyncHTTPTransport(verify=context, trust_env=False)

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        try:
            response = await self._inner.handle_async_request(await self._pin(request))
        except AddressRefused as error:
            return _failure(str(error))
        except httpx2.ConnectTimeout:
            return _failure(f"the server did not accept a connection within {CONNECT_SECONDS:g} s")
        except httpx2.ConnectError:
            return _failure("cannot connect to the server")
        except httpx2.TransportError:
            return _failure(CONNECTION_BROKEN_MESSAGE)
        assert isinstance(response.stream, httpx2.AsyncByteStream)
        if response.headers.get("content-encoding", "").strip().lower() not in IDENTITY:
            await response.stream.aclose()
            return _failure("the server compressed its response, which it was asked not to do")
        stream = LimitedStream(response.stream, self.max_bytes)
        if response.status_code >= 400:
            return await _read_error(response.status_code, stream)
        return httpx2.Response(
            response.status_code, headers=response.headers, stream=stream, extensions=response.extensions
        )

    async def _pin(self, request: httpx2.Request) -> httpx2.Request:
        """Return the request to an address that was checked. Its Host header and its TLS name stay those of the URL."""
        if self._allowed is None:
            return request
        url = request.url
        port = url.port or (443 if url.scheme == "https" else 80)
        address = await self._resolver.resolve(url.host, port, self._allowed)
        return httpx2.Request(
            request.method,
            url.copy_with(host=address),
            headers=request.headers,
            stream=request.stream,
            extensions={**request.extensions, "sni_hostname": url.host},
        )

    async def aclose(self) -> None:
        await self._inner.aclose()


class LimitedStream(httpx2.AsyncByteStream):
    """A body that ends with an error if it is too large, or if its connection breaks."""

    def __init__(self, stream: httpx2.AsyncByteStream, limit: int) -> None:
        self._stream = stream
        self._limit = limit

    async def __aiter__(self) -> AsyncIterator[bytes]:
        left = self._limit
        try:
            async for piece in self._stream:
                left -= len(piece)
                if left < 0:
                    raise ServerMisbehaved(f"the server sent more than {self._limit} bytes")
                yield piece
        except httpx2.TransportError:
            raise ServerMisbehaved(CONNECTION_BROKEN_MESSAGE) from None

    async def aclose(self) -> None:
        await self._stream.aclose()


async def _read_error(status: int, stream: LimitedStream) -> httpx2.Response:
    """Return the JSON-RPC error of a response, or one that names its status. 404 means that the session is unknown."""
    try:
        body = b"".join([piece async for piece in stream])
    except ServerMisbehaved:
        body = b""
    finally:
        await stream.aclose()
    if status == SESSION_UNKNOWN or b'"jsonrpc"' not in body:
        return _failure(f"the server answered with HTTP status {status}", status)
    return httpx2.Response(status, headers=JSON, content=body)


def _failure(message: str, status: int = FAILED_STATUS) -> httpx2.Response:
    error = {"code": OTHER_ERROR, "message": message, "data": {STATUS: status}}
    body = msgspec.json.encode({"jsonrpc": "2.0", "id": None, "error": error})
    return httpx2.Response(status, headers=JSON, content=body)
