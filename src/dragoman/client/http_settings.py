"""Settings of httpx that both clients share, and the meaning of its errors."""

from collections.abc import Iterator
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
