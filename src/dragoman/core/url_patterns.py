"""Addresses that requests name, and the patterns that allow them.

    url     := ("http" | "https") "://" host [":" port] ["/" path] ["?" query]
    pattern := ("http" | "https") "://" ("*" | ["*."] host) [":" (port | "*")] ["/" path]

Rules
1. Only plain addresses are accepted: printable ASCII, no user or password, no fragment, no backslash, no `.` or `..` as
   a part of the path. Different parsers agree on these.
2. `*.` stands for one or more names before the host, `*` alone for every host. In a path, `*` stands for any text.
3. A pattern without a port allows the port of its scheme, one without a path every path. The query is never compared.
"""

import re
from typing import Self

import msgspec

from dragoman.core.errors import ConfigError

MAX_LENGTH = 2048
_HOST = r"(?:[A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]+)*\.?|\[[0-9A-Fa-f:.]+\])"
_PATH = r"""/(?:(?!["#<>\\^`{|}])[!-~])*"""
_URL = re.compile(rf"(?P<scheme>https?)://(?P<host>{_HOST})(?::(?P<port>\d{{1,5}}))?(?P<path>{_PATH})?")
_PATTERN = re.compile(
    rf"(?P<scheme>https?)://(?P<host>\*|(?:\*\.)?{_HOST})(?::(?P<port>\d{{1,5}}|\*))?(?!.*\?)(?P<path>{_PATH})?"
)
_DOTS = re.compile(r"(?:\.|%2e){1,2}", re.IGNORECASE)
_PORTS = {"http": 80, "https": 443}
ANY = "*"


class PlainUrl(msgspec.Struct, frozen=True):
    scheme: str
    host: str
    port: int
    path: str

    @classmethod
    def parse(cls, url: str) -> Self | None:
        """Return the parts of an address; None if it is not a plain one."""
        found = _URL.fullmatch(url) if len(url) <= MAX_LENGTH else None
        if found is None:
            return None
        port = _PORTS[found["scheme"]] if found["port"] is None else int(found["port"])
        path = (found["path"] or "/").partition("?")[0]
        if not 0 < port < 65536 or any(_DOTS.fullmatch(part) for part in path.split("/")):
            return None
        return cls(found["scheme"], found["host"].lower().rstrip("."), port, path)

    @property
    def origin(self) -> str:
        port = "" if self.port == _PORTS[self.scheme] else f":{self.port}"
        return f"{self.scheme}://{self.host}{port}"


class UrlPattern(msgspec.Struct, frozen=True):
    scheme: str
    host: str
    port: int | None
    """None means every port."""
    path: str | None
    """None means every path."""

    @classmethod
    def parse(cls, pattern: str) -> Self:
        found = _PATTERN.fullmatch(pattern)
        if found is None:
            raise ConfigError(f"{pattern!r:.200}: expected a pattern such as https://*.example.com/mcp or https://*")
        port = None if found["port"] == ANY else int(found["port"] or _PORTS[found["scheme"]])
        return cls(found["scheme"], found["host"].lower().rstrip("."), port, found["path"])

    def matches(self, url: PlainUrl) -> bool:
        if self.scheme != url.scheme or self.port not in (None, url.port):
            return False
        is_host = url.host.endswith(self.host[1:]) if self.host.startswith("*.") else self.host in (ANY, url.host)
        return is_host and (self.path is None or _matches_path(url.path, self.path))


def _matches_path(path: str, pattern: str) -> bool:
    return re.fullmatch(re.escape(pattern).replace(r"\*", ".*"), path) is not None
