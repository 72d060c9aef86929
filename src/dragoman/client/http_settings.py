"""httpx, as both clients use it: how it is set up, and what its troubles mean."""

from collections.abc import Iterator, Mapping
from typing import Any

import httpx

from dragoman.client.call import Exchange
from dragoman.client.planner import Missed
from dragoman.core.errors import BadAnswer, ConfigError
from dragoman.core.events import Event
from dragoman.core.urls import Site

CONNECTIONS = 1000
KEPT_SECONDS = 2.0
"""Less than servers keep a connection: what is sent on one that is just being closed may or may not arrive."""
LINGER_SECONDS = 1.0
"""How long a server may take to end an answer that is complete: only then its connection can be used again."""


def settings(where: Site, timeout: float, connect_timeout: float) -> dict[str, Any]:
    return {
        "timeout": httpx.Timeout(timeout, connect=connect_timeout),
        "limits": httpx.Limits(
            max_connections=CONNECTIONS, max_keepalive_connections=CONNECTIONS, keepalive_expiry=KEPT_SECONDS
        ),
        "follow_redirects": False,
        # Nobody reaches this machine by a proxy, and where nothing is encrypted no certificates need to be read.
        "trust_env": not where.is_loopback,
        "verify": where.is_tls,
    }


def lower(headers: Mapping[str, str]) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items()}


def missed(error: httpx.HTTPError) -> Missed:
    """Why there is no answer."""
    if isinstance(error, httpx.UnsupportedProtocol | httpx.LocalProtocolError):
        raise ConfigError(f"this cannot be sent: {error}") from error
    unreached = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.PoolTimeout | httpx.ProxyError)
    return Missed("unreached" if unreached else "lost", words(error), isinstance(error, httpx.TimeoutException))


def broken(exchange: Exchange, error: httpx.HTTPError) -> Iterator[list[Event]]:
    """What an answer comes to whose body could not be read to its end."""
    if isinstance(error, httpx.DecodingError):
        raise BadAnswer(f"the answer cannot be decompressed: {words(error)}") from error
    return exchange.broken(words(error))


def words(error: httpx.HTTPError) -> str:
    if isinstance(error, httpx.ReadTimeout):
        return f"nothing came for {_seconds(error, 'read')}"
    if isinstance(error, httpx.ConnectTimeout):
        return f"no connection within {_seconds(error, 'connect')}"
    return str(error) or type(error).__name__


def _seconds(error: httpx.HTTPError, kind: str) -> str:
    limit = error.request.extensions.get("timeout", {}).get(kind)
    return f"{limit:g} s" if isinstance(limit, int | float) else "too long"
