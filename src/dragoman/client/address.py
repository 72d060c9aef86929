"""Where a server is, and who it is told that we are.

    url := scheme "://" host [path]

The API lies below `/v1`, unless the path names a version of its own (`/v1`, `/api/v1`, `/v1beta/openai`): then the path
is that of the API. Redirects are not followed: nobody is asked but who was named.
"""

import ipaddress
import re
from collections.abc import Mapping
from urllib.parse import urlsplit

import msgspec

from dragoman import __version__
from dragoman.errors import ConfigError

DEFAULT = "http://127.0.0.1:8000"
_VERSION = re.compile(r"/v\d+[a-z0-9]*(/|$)")
ANTHROPIC_VERSION = "2023-06-01"


class Site(msgspec.Struct, frozen=True):
    """`api` is the address of the API, `root` that of the server."""

    api: str
    root: str
    host: str
    is_tls: bool

    @property
    def is_loopback(self) -> bool:
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def is_at(self, domain: str) -> bool:
        return self.host == domain or self.host.endswith(f".{domain}")


def site(url: str) -> Site:
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        host = None
    if host is None or parts.scheme not in ("http", "https"):
        raise ConfigError(f"{url!r:.200}: expected an address such as {DEFAULT}")
    given = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"
    versioned = _VERSION.search(parts.path)
    root = given.removesuffix("/v1")
    return Site(given if versioned else f"{given}/v1", root, host.lower(), parts.scheme == "https")


def headers(where: Site, key: str | None, protocol: str) -> dict[str, str]:
    """Anthropic's own servers take the key in one place only; others that speak as they do look in either."""
    told: dict[str, str] = {"content-type": "application/json", "user-agent": f"dragoman/{__version__}"}
    speaks_messages = protocol == "messages"
    if speaks_messages:
        told["anthropic-version"] = ANTHROPIC_VERSION
    if key is not None and (speaks_messages or where.is_at("anthropic.com")):
        told["x-api-key"] = key
    if key is not None and not where.is_at("anthropic.com"):
        told["authorization"] = f"Bearer {key}"
    return told


def adapted(where: Site, body: Mapping[str, object]) -> dict[str, object]:
    """The body, in the one word that OpenAI's own newer models want otherwise than all others know it."""
    changed = dict(body)
    if "max_tokens" in body and "messages" in body and (where.is_at("openai.com") or where.is_at("azure.com")):
        changed["max_completion_tokens"] = changed.pop("max_tokens")
    return changed
