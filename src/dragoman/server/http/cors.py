"""Cross-origin resource sharing (CORS): which web pages may call the server.

    preflight := OPTIONS path, Origin, Access-Control-Request-Method [, -Headers] [, -Private-Network]

Rules
1. Only configured origins get CORS headers. For all others the browser blocks reading replies and sending JSON.
2. A preflight needs no key. Its reply contains only the methods of the route table.
3. The server uses no cookies, so browser credentials are never allowed.
"""

import re

from dragoman.config.sections import Cors
from dragoman.server.http_exchange import HttpExchange

EXPOSED = ", ".join(
    [
        *("x-request-id", "request-id", "x-dragoman-request-id", "x-dragoman-ignored", "x-dragoman-warning"),
        *("retry-after", "x-should-retry"),
        *(
            header
            for unit in ("requests", "tokens")
            for field in ("limit", "remaining", "reset")
            for header in (f"x-ratelimit-{field}-{unit}", f"anthropic-ratelimit-{unit}-{field}")
        ),
    ]
).encode()
HEADER_NAMES = re.compile(rb"[A-Za-z0-9-]+(\s*,\s*[A-Za-z0-9-]+)*")
MAX_REQUESTED_HEADERS = 1000


class CorsPolicy:
    def __init__(self, settings: Cors) -> None:
        self._any = "*" in settings.origins
        self._known = frozenset(origin.lower().rstrip("/").encode() for origin in settings.origins)
        self._age = str(settings.max_age_seconds).encode()

    def add_headers(self, exchange: HttpExchange) -> bool:
        """Add the CORS headers of any reply. True if the request comes from an allowed origin."""
        if not self._known:
            return False
        exchange.response.extra_headers.append((b"vary", b"origin"))
        origin = exchange.headers.get(b"origin")
        if origin is None or not (self._any or origin.lower() in self._known):
            return False
        exchange.response.extra_headers += [
            (b"access-control-allow-origin", b"*" if self._any else origin),
            (b"access-control-expose-headers", EXPOSED),
        ]
        return True

    def add_preflight_headers(self, exchange: HttpExchange, methods: list[str]) -> None:
        requested = exchange.headers.get(b"access-control-request-headers", b"")
        headers = [
            (b"access-control-allow-methods", ", ".join(methods).encode()),
            (b"access-control-max-age", self._age),
        ]
        if len(requested) <= MAX_REQUESTED_HEADERS and HEADER_NAMES.fullmatch(requested.strip()):
            headers.append((b"access-control-allow-headers", requested.strip()))
        if exchange.headers.get(b"access-control-request-private-network") == b"true":
            headers.append((b"access-control-allow-private-network", b"true"))
        exchange.response.extra_headers += headers


def is_preflight(exchange: HttpExchange) -> bool:
    return exchange.method == "OPTIONS" and b"access-control-request-method" in exchange.headers
