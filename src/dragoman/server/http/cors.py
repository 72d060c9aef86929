"""Web pages of other origins: which may call the server, and how their browsers are told.

    preflight := OPTIONS path, Origin, Access-Control-Request-Method [, -Headers] [, -Private-Network]

Rules
1. Only origins that the configuration names are told anything. For all others the server is as if there were no CORS:
   the browser then keeps the page from reading, and from sending JSON in the first place.
2. A preflight needs no key, and says only what the route table says.
3. There are no cookies here, so credentials in the browser's sense are never allowed.
"""

import re

from dragoman.config.sections import Cors
from dragoman.server.http_exchange import Exchange

EXPOSED = ", ".join(
    [
        *("x-request-id", "request-id", "x-dragoman-request-id", "x-dragoman-ignored", "x-dragoman-warning"),
        *("retry-after", "x-should-retry"),
        *(f"x-ratelimit-{name}-{what}" for what in ("requests", "tokens") for name in ("limit", "remaining", "reset")),
        *(
            f"anthropic-ratelimit-{what}-{name}"
            for what in ("requests", "tokens")
            for name in ("limit", "remaining", "reset")
        ),
    ]
).encode()
HEADER_NAMES = re.compile(rb"[A-Za-z0-9-]+(\s*,\s*[A-Za-z0-9-]+)*")
LONGEST = 1000


class Origins:
    def __init__(self, settings: Cors) -> None:
        self._any = "*" in settings.origins
        self._known = frozenset(origin.lower().rstrip("/").encode() for origin in settings.origins)
        self._age = str(settings.max_age_seconds).encode()

    def greet(self, exchange: Exchange) -> bool:
        """Whether the request comes from a page that may call; then its browser is told so, whatever the answer is."""
        if not self._known:
            return False
        exchange.extra_headers.append((b"vary", b"origin"))
        origin = exchange.headers.get(b"origin")
        if origin is None or not (self._any or origin.lower() in self._known):
            return False
        exchange.extra_headers += [
            (b"access-control-allow-origin", b"*" if self._any else origin),
            (b"access-control-expose-headers", EXPOSED),
        ]
        return True

    def allow(self, exchange: Exchange, methods: list[str]) -> None:
        """What the answer to a preflight says."""
        asked = exchange.headers.get(b"access-control-request-headers", b"")
        headers = [
            (b"access-control-allow-methods", ", ".join(methods).encode()),
            (b"access-control-max-age", self._age),
        ]
        if len(asked) <= LONGEST and HEADER_NAMES.fullmatch(asked.strip()):
            headers.append((b"access-control-allow-headers", asked.strip()))
        if exchange.headers.get(b"access-control-request-private-network") == b"true":
            headers.append((b"access-control-allow-private-network", b"true"))
        exchange.extra_headers += headers


def is_preflight(exchange: Exchange) -> bool:
    return exchange.method == "OPTIONS" and b"access-control-request-method" in exchange.headers
