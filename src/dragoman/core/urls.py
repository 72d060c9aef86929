"""Where a server is.

    url := ("http" | "https") "://" [user [":" password] "@"] host [":" port] [path]

Rules
1. The API lies below `/v1`, unless the path names a version of its own (`/v1`, `/api/v4`, `/v1beta/openai`): then the
   path is that of the API.
2. There is no query and no fragment: every route of the API would have to have it, and it may be a secret.
3. A user and a password in an address are told to that server in a header, and are shown to nobody.
"""

import base64
import ipaddress
import re
from collections.abc import Iterable
from urllib.parse import SplitResult, unquote, urlsplit

import msgspec

from dragoman.core.errors import ConfigError

DEFAULT = "http://127.0.0.1:8000"
_VERSION = re.compile(r"/v\d+[a-z0-9]*(/|$)")
MIN_SECRET_LENGTH = 8
"""Characters. A shorter value is a placeholder such as `none`, or occurs in other texts by chance."""
_LOGIN = re.compile(r"(?<=://)[^/?#\s]*@")


class Site(msgspec.Struct, frozen=True):
    """`api` is the address of the API, `root` that of the server; `login` what its authorization header says."""

    api: str
    root: str
    host: str
    is_tls: bool
    login: str | None = None

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
        raise ConfigError(f"{public(url)!r:.200}: expected an address such as {DEFAULT}")
    if parts.query or parts.fragment:
        shown = re.split("[?#]", public(url))[0]
        raise ConfigError(f"{shown!r:.200}: what follows a ? or # in an address cannot be sent; leave it out")
    given = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path.rstrip('/')}"
    api = given if _VERSION.search(parts.path) else f"{given}/v1"
    return Site(api, given.removesuffix("/v1"), host.lower(), parts.scheme == "https", basic_authorization(parts))


def basic_authorization(parts: SplitResult) -> str | None:
    """The `Authorization` header for the user and password of an address."""
    if parts.username is None:
        return None
    told = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
    return f"Basic {base64.b64encode(told.encode()).decode()}"


def find_secrets(url: str, key: str | None) -> tuple[str, ...]:
    """The key and password of a server, in every form that a message might repeat. Short values are left out."""
    password = urlsplit(url).password or ""
    every = (key, (site(url).login or "").removeprefix("Basic "), password, unquote(password))
    return tuple(secret for secret in every if secret and len(secret) >= MIN_SECRET_LENGTH)


def redact_secrets(text: str, secrets: Iterable[str]) -> str:
    """The text with `***` for each secret."""
    for secret in secrets:
        text = text.replace(secret, "***")
    return text


def public(text: str) -> str:
    """An address, or words that have some, without the users and passwords in them."""
    return _LOGIN.sub("***@", text)
