"""Sends requests to a running server, found by its URL or by the configuration."""

import argparse
import json
import os
import socket
import ssl
import urllib.error
import urllib.parse
import urllib.request
from http.client import HTTPConnection, HTTPException, HTTPResponse
from typing import Any

from dragoman.cli.common import load_config
from dragoman.config.sections import Tls
from dragoman.config.settings import Settings
from dragoman.core.errors import ConfigError
from dragoman.core.urls import ServerAddress, parse_address, remove_credentials
from dragoman.server.auth.admin_token import ADMIN_TOKEN_HEADER, find_admin_token, find_socket_admin_token

TIMEOUT_SECONDS = 10
LOAD_TIMEOUT_SECONDS = 600
"""Loading a model may take minutes."""
UNIX = "unix:"
LOCAL = "http://localhost"
ADMIN = "/admin/"
OR_SAME_USER = ", or, if the server has no keys, run this as the user who runs the server"
API = "/v1"
"""The path prefix of the API on a Dragoman server."""


class AdminClient:
    """`address` names the server in error messages."""

    def __init__(
        self,
        address: str,
        where: ServerAddress,
        opener: urllib.request.OpenerDirector,
        key: str | None = None,
        name: str | None = None,
        token: str | None = None,
    ) -> None:
        """`token` gives access to `/admin` on a server without keys that the same user runs."""
        self.address = address
        self._where = where
        self._opener = opener
        login = where.login or (f"Bearer {key}" if key else None)
        self._headers = {} if login is None else {"authorization": login}
        if name is not None:
            self._headers["host"] = name
        self._admin_headers = {} if token is None else {ADMIN_TOKEN_HEADER: token}

    def is_running(self) -> bool:
        """Whether a Dragoman answers there, with or without access."""
        try:
            answer = self._request("GET", "/", TIMEOUT_SECONDS)
        except ConfigError:
            return False
        return isinstance(answer, dict) and answer.get("name") == "dragoman"

    def get(self, path: str) -> Any:
        return self._request("GET", path, TIMEOUT_SECONDS)

    def post(self, path: str, body: object = None) -> Any:
        return self._request("POST", path, LOAD_TIMEOUT_SECONDS, body)

    def unexpected_answer(self) -> ConfigError:
        return ConfigError(f"{self.address}: the answer is not a list of models")

    def _request(self, method: str, path: str, timeout: float, body: object = None) -> Any:
        in_api = path.startswith(API)
        url = self._where.api + path.removeprefix(API) if in_api else self._where.root + path
        data = None if body is None else json.dumps(body).encode()
        headers = self._headers | (self._admin_headers if path.startswith(ADMIN) else {})
        headers |= {} if data is None else {"content-type": "application/json"}
        request = urllib.request.Request(url, data, headers, method=method)  # noqa: S310 (http or https)
        try:
            with self._opener.open(request, timeout=timeout) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:
            raise ConfigError(f"{self.address}: the server answered {_describe(error, path)}") from error
        except (OSError, HTTPException) as error:
            reason = error.reason if isinstance(error, urllib.error.URLError) else error
            raise ConfigError(f"{self.address}: no answer: {reason}{_hint(reason)}") from error
        except ValueError as error:
            raise self.unexpected_answer() from error


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that select the server."""
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--config", metavar="FILE", help="a configuration file (YAML or JSON)")
    group.add_argument("--url", help="the address of a running server, or unix:PATH")
    parser.add_argument("--api-key", metavar="KEY", help="a key for that server")


def from_arguments(arguments: argparse.Namespace) -> AdminClient:
    if arguments.url is not None:
        return from_url(arguments.url, arguments.api_key or os.environ.get("DRAGOMAN_API_KEY"))
    return from_settings(load_config(arguments.config).settings, arguments.api_key)


def from_url(url: str, key: str | None) -> AdminClient:
    """Accepts the address of the server, of its API, or `unix:PATH`."""
    address = f"--url {remove_credentials(url)}"
    if url.startswith(UNIX):
        path = url.removeprefix(UNIX)
        return AdminClient(address, parse_address(LOCAL), _opener(path, None), key, token=find_socket_admin_token(path))
    try:
        where = parse_address(url)
    except ConfigError as error:
        raise ConfigError(f"--url {error}, or {UNIX}PATH") from error
    port = urllib.parse.urlsplit(where.root).port
    token = find_admin_token(where.host, port) if where.is_loopback and port is not None else None
    return AdminClient(address, where, urllib.request.build_opener(_NoRedirects()), key, token=token)


def from_settings(settings: Settings, key: str | None) -> AdminClient:
    """The server on this machine that was started with these settings."""
    key = key or next(iter(settings.api_keys), None)
    name = next(iter(settings.hosts or ()), None)
    if settings.socket is not None:
        opener = _opener(settings.socket, settings.tls)
        token = find_socket_admin_token(settings.socket)
        return AdminClient(f"the server at {UNIX}{settings.socket}", parse_address(LOCAL), opener, key, name, token)
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.host, settings.host)  # noqa: S104 (no bind)
    shown = f"[{host}]" if ":" in host else host
    address = f"{'https' if settings.tls else 'http'}://{shown}:{settings.port}"
    token = find_admin_token(host, settings.port)
    return AdminClient(
        f"the server at {address}", parse_address(address), _opener(None, settings.tls), key, name, token
    )


def _opener(path: str | None, tls: Tls | None) -> urllib.request.OpenerDirector:
    """An opener for a server on this machine, without a proxy."""
    no_proxy = urllib.request.ProxyHandler({})
    context = None if tls is None else _trust_only(tls)
    if path is not None:
        return urllib.request.build_opener(no_proxy, _NoRedirects(), _UnixHandler(path, context))
    if context is None:
        return urllib.request.build_opener(no_proxy, _NoRedirects())
    return urllib.request.build_opener(no_proxy, _NoRedirects(), urllib.request.HTTPSHandler(context=context))


def _trust_only(tls: Tls) -> ssl.SSLContext:
    """Trust only the server's own certificate, for any host name."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    try:
        context.load_verify_locations(tls.certificate)
    except OSError as error:
        raise ConfigError(f"tls: {tls.certificate} cannot be used: {error.strerror or error}") from error
    return context


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Refuses redirects: they would send the key and the token to another server."""

    def redirect_request(self, *_: object) -> None:
        return None


class _UnixConnection(HTTPConnection):
    def __init__(self, path: str, context: ssl.SSLContext | None, seconds: float | None) -> None:
        super().__init__("localhost", timeout=seconds)
        self._path = path
        self._context = context

    def connect(self) -> None:
        plain = socket.socket(socket.AF_UNIX)
        try:
            plain.settimeout(self.timeout)
            plain.connect(self._path)
            self.sock = plain if self._context is None else self._context.wrap_socket(plain)
        except BaseException:
            plain.close()
            raise


class _UnixHandler(urllib.request.HTTPHandler):
    def __init__(self, path: str, context: ssl.SSLContext | None) -> None:
        super().__init__()
        self._path = path
        self._context = context

    def http_open(self, req: urllib.request.Request) -> HTTPResponse:
        def connection(
            host: str,
            /,
            *,
            port: int | None = None,
            timeout: float = TIMEOUT_SECONDS,
            source_address: tuple[str, int] | None = None,
            blocksize: int = 0,
        ) -> HTTPConnection:
            return _UnixConnection(self._path, self._context, timeout)

        return self.do_open(connection, req)


def _describe(error: urllib.error.HTTPError, path: str) -> str:
    """The status and the server's error message."""
    status = f"{error.code} {error.reason}"
    if error.code == 401:
        return f"{status}; give --api-key{OR_SAME_USER if path.startswith(ADMIN) else ''}"
    try:
        return f"{status}: {json.loads(error.read())['error']['message']}"
    except (ValueError, KeyError, TypeError, OSError):
        return status


def _hint(reason: object) -> str:
    if isinstance(reason, ssl.SSLCertVerificationError):
        return "; to trust a self-signed certificate, set $SSL_CERT_FILE to its path"
    return ""
