"""Parses the addresses of servers, and removes secrets from messages.

    url := ("http" | "https") "://" [user [":" password] "@"] host [":" port] [path]

Rules
1. The API is below `/v1`, unless the path contains a version (`/v1`, `/api/v4`, `/v1beta/openai`). Then the path is
   that of the API.
2. A query or a fragment is rejected: it would have to be part of every route, and it may be a secret.
3. A user and a password in an address are sent to that server in a header, and never shown.
"""

import base64
import ipaddress
import json
import re
from collections.abc import Iterable, Mapping
from urllib.parse import SplitResult, unquote, unquote_plus, urlsplit

import msgspec

from dragoman.core.errors import ConfigError, truncate

DEFAULT = "http://127.0.0.1:8000"
REDACTED = "***"
"""What messages have in place of a secret."""
_VERSION = re.compile(r"/v\d+[a-z0-9]*(/|$)")
MIN_SECRET_LENGTH = 8
"""Characters. A shorter value is a placeholder such as `none`, or occurs in other texts by chance."""
_LOGIN = re.compile(r"(?<=://)[^/?#\s]*@")


class ServerAddress(msgspec.Struct, frozen=True):
    """`api` is the address of the API, `root` that of the server, `login` the value of the Authorization header."""

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


def parse_address(url: str) -> ServerAddress:
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        host = None
    if host is None or parts.scheme not in ("http", "https"):
        raise ConfigError(f"{remove_credentials(url)!r:.200}: expected an address such as {DEFAULT}")
    if parts.query or parts.fragment:
        shown = re.split("[?#]", remove_credentials(url))[0]
        raise ConfigError(f"{shown!r:.200}: an address must not contain ? or #; remove it and what follows")
    base = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path.rstrip('/')}"
    api = base if _VERSION.search(parts.path) else f"{base}/v1"
    return ServerAddress(
        api, base.removesuffix("/v1"), host.lower(), parts.scheme == "https", basic_authorization(parts)
    )


def basic_authorization(parts: SplitResult) -> str | None:
    """Return the `Authorization` header for the user and password of an address."""
    if parts.username is None:
        return None
    credentials = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
    return f"Basic {base64.b64encode(credentials.encode()).decode()}"


def find_secrets(url: str, key: str | None) -> tuple[str, ...]:
    """Return the key and password of a server in every form that a message might contain. Short ones are left out."""
    password = urlsplit(url).password or ""
    secrets = (key, (parse_address(url).login or "").removeprefix("Basic "), password, unquote(password))
    return tuple(secret for secret in secrets if secret and len(secret) >= MIN_SECRET_LENGTH)


def secret_forms(secret: str) -> tuple[str, ...]:
    """Return a secret as it is, and as JSON writes it. Some clients write `/` as `\\/`."""
    forms = (secret, json.dumps(secret, ensure_ascii=False)[1:-1], json.dumps(secret)[1:-1])
    return tuple(dict.fromkeys((*forms, *(form.replace("/", r"\/") for form in forms))))


def redact_secrets(text: str, secrets: Iterable[str]) -> str:
    """Replace each secret by `REDACTED`."""
    for secret in secrets:
        text = text.replace(secret, REDACTED)
    return text


def remove_credentials(text: str) -> str:
    """Replace the users and passwords of all addresses in a text by `REDACTED`."""
    return _LOGIN.sub(f"{REDACTED}@", text)


def display_source(source: str) -> str:
    """Return the source of a model for messages: an address without its login and query."""
    if "://" not in source:
        return truncate(source)
    address = re.split("[?#]", remove_credentials(source))[0]
    return truncate(f"{address}?..." if "?" in source else address)


def find_server_secrets(url: str | None, headers: Mapping[str, str]) -> tuple[str, ...]:
    """Return the values that no output may contain: headers, whole and word by word, and the login and query of the
    address, as they are written and decoded. Short ones are left out. The address need not be valid."""
    address, *queries = re.split("[?#]", url or "")
    login = address.partition("://")[2].partition("/")[0].rpartition("@")[0]
    values = [login, login.partition(":")[2], *headers.values()]
    for pair in "&".join(queries).split("&"):
        name, mark, value = pair.partition("=")
        values.append(value if mark else name)
    parts = [part for value in values for part in (value, unquote(value), unquote_plus(value), *value.split())]
    return tuple(dict.fromkeys(part for part in parts if len(part) >= MIN_SECRET_LENGTH))
