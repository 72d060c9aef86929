"""ASGI types, and the extension that lets the app call its connection directly."""

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Protocol

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
RawHeaders = list[tuple[bytes, bytes]]

DIRECT = "dragoman.direct"
"""ASGI scope extension. Its value is the connection; `connection.response(scope)` returns a `DirectResponse`."""


class DirectResponse(Protocol):
    """Plain calls in place of `receive` and `send`. They return None or False if the caller has to wait."""

    @property
    def task(self) -> asyncio.Task[None]: ...

    def take_body(self) -> bytes | None: ...

    def reply(self, status: int, headers: RawHeaders, body: bytes) -> bool: ...

    def write(self, data: bytes) -> bool: ...
