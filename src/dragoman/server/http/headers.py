"""What request headers decide: their validity, the host, cross-origin access (CORS), and the client behind proxies.

    preflight         := OPTIONS path, Origin, Access-Control-Request-Method [, -Headers] [, -Private-Network]
    X-Forwarded-For   := address ("," address)*      the nearest proxy adds the last one
    X-Forwarded-Proto := scheme ("," scheme)*

Rules
1. Repeated header lines form one list, in order. A header of `SINGLE_VALUED` may have one value only.
2. Only configured origins get CORS headers. For all others the browser blocks reading replies and sending JSON.
3. A preflight needs no key. Its reply contains only the methods of the route table.
4. The server uses no cookies, so browser credentials are never allowed.
5. Forwarded addresses are read from the right while the sender is a trusted proxy. The first address that is not a
   trusted proxy is the client. Reading stops at a value that is not an address.
"""

import ipaddress
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

from dragoman.config.sections import UNIX, Cors, parse_network
from dragoman.core.errors import UnsupportedMedia

RawHeaders = list[tuple[bytes, bytes]]
Headers = Mapping[bytes, bytes]

SINGLE_VALUED = frozenset(
    {
        *(b"host", b"authorization", b"x-api-key", b"content-length", b"content-type"),
        *(b"origin", b"x-real-ip", b"x-dragoman-timeout", b"x-dragoman-strict", b"traceparent"),
    }
)
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
MAX_HEADER = 1000
"""Bytes of a header that are read, where clients may send more."""
_HOST = re.compile(rb"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?")


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


@lru_cache(maxsize=256)
def host_name(host: bytes) -> bytes | None:
    """The host without its port; None if it is malformed."""
    match = _HOST.fullmatch(host)
    return match[1].lower() if match else None


@lru_cache(maxsize=256)
def check_media_type(content_type: bytes, has_origin: bool) -> None:
    """Refuse a body that is not JSON."""
    media = content_type.partition(b";")[0].strip().lower()
    # A web page of another origin must not send a body without a type; other programs may.
    if media != b"application/json" and (media or has_origin):
        raise UnsupportedMedia("send the body as JSON, with the header 'content-type: application/json'")


class CorsPolicy:
    def __init__(self, settings: Cors) -> None:
        self._any = "*" in settings.origins
        self._known = frozenset(origin.lower().rstrip("/").encode() for origin in settings.origins)
        self._age = str(settings.max_age_seconds).encode()
        self.is_empty = not settings.origins

    def allows(self, headers: Headers) -> bool:
        origin = headers.get(b"origin")
        return origin is not None and (self._any or origin.lower() in self._known)

    def allows_page(self, headers: Headers) -> bool:
        """Whether a form or a WebSocket may be accepted. A page of another origin can send a form and open a WebSocket
        without a preflight, but not with a key."""
        origin, host = headers.get(b"origin"), headers.get(b"host")
        has_key = headers.get(b"authorization", b"")[:7].lower() == b"bearer " or b"x-api-key" in headers
        return origin is None or has_key or self.allows(headers) or origin.partition(b"://")[2] == host

    def reply_headers(self, headers: Headers) -> RawHeaders:
        """The CORS headers of any reply."""
        vary = (b"vary", b"origin")
        if not self.allows(headers):
            return [vary]
        allowed = (b"access-control-allow-origin", b"*" if self._any else headers[b"origin"])
        return [vary, allowed, (b"access-control-expose-headers", EXPOSED)]

    def preflight_headers(self, headers: Headers, methods: Iterable[str]) -> RawHeaders:
        requested = headers.get(b"access-control-request-headers", b"")
        reply = [
            (b"access-control-allow-methods", ", ".join(methods).encode()),
            (b"access-control-max-age", self._age),
        ]
        if len(requested) <= MAX_HEADER and HEADER_NAMES.fullmatch(requested.strip()):
            reply.append((b"access-control-allow-headers", requested.strip()))
        if headers.get(b"access-control-request-private-network") == b"true":
            reply.append((b"access-control-allow-private-network", b"true"))
        return reply


class TrustedProxies:
    def __init__(self, trusted: Sequence[str]) -> None:
        self._unix = UNIX in trusted
        self._networks = [known for entry in trusted if (known := parse_network(entry)) is not None]
        self.is_empty = not trusted

    def client(self, peer: str | None, headers: Headers) -> str | None:
        """The address of the client; None for a Unix socket without a forwarded address."""
        client = peer
        forwarded = headers.get(b"x-forwarded-for", b"")
        hops = forwarded[-MAX_HEADER:].decode("latin-1").split(",")
        if len(forwarded) > MAX_HEADER:
            # The first value may be truncated.
            hops[0] = ""
        while hops and self._trusts(client):
            hop = _address(hops.pop())
            if hop is None:
                break
            client = hop
        return client

    def scheme(self, peer: str | None, headers: Headers) -> str | None:
        """The scheme of the connection to the nearest proxy; None if the peer is not trusted or sends none."""
        forwarded = headers.get(b"x-forwarded-proto", b"").decode("latin-1").rpartition(",")[2].strip().lower()
        return forwarded if forwarded in ("http", "https") and self._trusts(peer) else None

    def _trusts(self, peer: str | None) -> bool:
        if peer is None:
            return self._unix
        try:
            address = ipaddress.ip_address(peer)
        except ValueError:
            return False
        return any(address in network for network in self._networks)


def _address(hop: str) -> str | None:
    """The address without the port that some proxies add; None if it is invalid."""
    text = hop.strip()
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        return None
