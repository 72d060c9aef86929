"""A running server, asked by a command."""

import json
import urllib.error
import urllib.parse
import urllib.request
from http.client import HTTPException
from typing import Any

from dragoman.errors import ConfigError

PATIENCE_SECONDS = 10
LOADING_SECONDS = 600
"""A model may take its time to be loaded."""


class Server:
    def __init__(self, url: str, key: str | None = None) -> None:
        self.url = url
        self._address = _address(url)
        self._headers = {"authorization": f"Bearer {key}"} if key else {}

    def is_there(self) -> bool:
        """Whether one of ours answers at all, whoever it lets in."""
        try:
            found = self._ask("GET", "/", PATIENCE_SECONDS)
        except ConfigError:
            return False
        return isinstance(found, dict) and found.get("name") == "dragoman"

    def get(self, path: str) -> Any:
        return self._ask("GET", path, PATIENCE_SECONDS)

    def post(self, path: str) -> Any:
        return self._ask("POST", path, LOADING_SECONDS)

    def strange(self) -> ConfigError:
        return ConfigError(f"--url {self.url}: what answers there is no list of models")

    def _ask(self, method: str, path: str, patience: float) -> Any:
        request = urllib.request.Request(  # noqa: S310 (it is http or https)
            f"{self._address}{path}", headers=self._headers, method=method
        )
        try:
            with urllib.request.urlopen(request, timeout=patience) as response:  # noqa: S310
                return json.load(response)
        except urllib.error.HTTPError as error:
            raise ConfigError(f"--url {self.url}: the server answered {_words(error)}") from error
        except (OSError, HTTPException) as error:
            reason = error.reason if isinstance(error, urllib.error.URLError) else error
            raise ConfigError(f"--url {self.url}: no answer: {reason}") from error
        except ValueError as error:
            raise self.strange() from error


def _words(error: urllib.error.HTTPError) -> str:
    """The status, and the server's own words where it has some that help."""
    said = f"{error.code} {error.reason}"
    if error.code == 401:
        return f"{said}; give --api-key"
    try:
        return f"{said}: {json.loads(error.read())['error']['message']}"
    except (ValueError, KeyError, TypeError, OSError):
        return said


def _address(url: str) -> str:
    """The server's own, also where that of its API was given."""
    try:
        parts = urllib.parse.urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname)
    except ValueError:
        usable = False
    if not usable:
        raise ConfigError(f"--url {url}: expected an address such as http://127.0.0.1:8000")
    return url.rstrip("/").removesuffix("/v1")
