"""A running server, asked by a command: at an address that was given, or where the configuration has it listen."""

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

from dragoman.cli.settings import settings_of
from dragoman.config.sections import Tls
from dragoman.config.settings import Settings
from dragoman.core.errors import ConfigError
from dragoman.core.urls import Site, public, site
from dragoman.server.auth.admin_token import HEADER, find_socket_token, find_token

PATIENCE_SECONDS = 10
LOADING_SECONDS = 600
"""A model may take its time to be loaded."""
UNIX = "unix:"
LOCAL = "http://localhost"
ADMIN = "/admin/"
OR_SAME_USER = ", or, if the server has no keys, run this as the user who runs the server"
API = "/v1"
"""Where our own server has the routes that others may have elsewhere."""


class Server:
    """`place` is how its address is called in words."""

    def __init__(
        self,
        place: str,
        where: Site,
        opener: urllib.request.OpenerDirector,
        key: str | None = None,
        name: str | None = None,
        token: str | None = None,
    ) -> None:
        """`token` opens the `/admin` routes of a server without keys that the same user runs."""
        self.place = place
        self._where = where
        self._opener = opener
        login = where.login or (f"Bearer {key}" if key else None)
        self._headers = {} if login is None else {"authorization": login}
        if name is not None:
            self._headers["host"] = name
        self._admin_headers = {} if token is None else {HEADER: token}

    def is_there(self) -> bool:
        """Whether one of ours answers at all, whoever it lets in."""
        try:
            found = self._ask("GET", "/", PATIENCE_SECONDS)
        except ConfigError:
            return False
        return isinstance(found, dict) and found.get("name") == "dragoman"

    def get(self, path: str) -> Any:
        return self._ask("GET", path, PATIENCE_SECONDS)

    def post(self, path: str, body: object = None) -> Any:
        return self._ask("POST", path, LOADING_SECONDS, body)

    def strange(self) -> ConfigError:
        return ConfigError(f"{self.place}: what answers there is no list of models")

    def _ask(self, method: str, path: str, patience: float, body: object = None) -> Any:
        in_api = path.startswith(API)
        url = self._where.api + path.removeprefix(API) if in_api else self._where.root + path
        data = None if body is None else json.dumps(body).encode()
        headers = self._headers | (self._admin_headers if path.startswith(ADMIN) else {})
        headers |= {} if data is None else {"content-type": "application/json"}
        request = urllib.request.Request(url, data, headers, method=method)  # noqa: S310 (it is http or https)
        try:
            with self._opener.open(request, timeout=patience) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:
            raise ConfigError(f"{self.place}: the server answered {_words(error, path)}") from error
        except (OSError, HTTPException) as error:
            reason = error.reason if isinstance(error, urllib.error.URLError) else error
            raise ConfigError(f"{self.place}: no answer: {reason}{_way_out(reason)}") from error
        except ValueError as error:
            raise self.strange() from error


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Those that say which server is asked."""
    of = parser.add_mutually_exclusive_group()
    of.add_argument("--config", metavar="FILE", help="a configuration file (YAML or JSON)")
    of.add_argument("--url", help="the address of a running server, or unix:PATH")
    parser.add_argument("--api-key", metavar="KEY", help="a key for that server")


def named(arguments: argparse.Namespace) -> Server:
    """The server that these flags say."""
    if arguments.url is not None:
        return at(arguments.url, arguments.api_key or os.environ.get("DRAGOMAN_API_KEY"))
    return configured(settings_of(arguments.config), arguments.api_key)


def at(url: str, key: str | None) -> Server:
    """The server at an address, also where that of its API was given, or at `unix:PATH`."""
    place = f"--url {public(url)}"
    if url.startswith(UNIX):
        path = url.removeprefix(UNIX)
        return Server(place, site(LOCAL), _opener(path, None), key, token=find_socket_token(path))
    try:
        where = site(url)
    except ConfigError as error:
        raise ConfigError(f"--url {error}, or {UNIX}PATH") from error
    port = urllib.parse.urlsplit(where.root).port
    token = find_token(where.host, port) if where.is_loopback and port is not None else None
    return Server(place, where, urllib.request.build_opener(_NoRedirects()), key, token=token)


def configured(settings: Settings, key: str | None) -> Server:
    """The server that was started with these settings, on this machine."""
    key = key or next(iter(settings.api_keys), None)
    name = next(iter(settings.hosts or ()), None)
    if settings.socket is not None:
        opener = _opener(settings.socket, settings.tls)
        token = find_socket_token(settings.socket)
        return Server(f"the server at {UNIX}{settings.socket}", site(LOCAL), opener, key, name, token)
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.host, settings.host)  # noqa: S104 (it is only asked)
    shown = f"[{host}]" if ":" in host else host
    address = f"{'https' if settings.tls else 'http'}://{shown}:{settings.port}"
    token = find_token(host, settings.port)
    return Server(f"the server at {address}", site(address), _opener(None, settings.tls), key, name, token)


def _opener(path: str | None, tls: Tls | None) -> urllib.request.OpenerDirector:
    """Straight there: what is on this machine is not asked through a proxy."""
    straight = urllib.request.ProxyHandler({})
    context = None if tls is None else _only(tls)
    if path is not None:
        return urllib.request.build_opener(straight, _NoRedirects(), _UnixHandler(path, context))
    if context is None:
        return urllib.request.build_opener(straight, _NoRedirects())
    return urllib.request.build_opener(straight, _NoRedirects(), urllib.request.HTTPSHandler(context=context))


def _only(tls: Tls) -> ssl.SSLContext:
    """Believes the server's own certificate and no other, for whatever names it was made."""
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
            timeout: float = PATIENCE_SECONDS,
            source_address: tuple[str, int] | None = None,
            blocksize: int = 0,
        ) -> HTTPConnection:
            return _UnixConnection(self._path, self._context, timeout)

        return self.do_open(connection, req)


def _words(error: urllib.error.HTTPError, path: str) -> str:
    """The status, and the server's own words where it has some that help."""
    said = f"{error.code} {error.reason}"
    if error.code == 401:
        return f"{said}; give --api-key{OR_SAME_USER if path.startswith(ADMIN) else ''}"
    try:
        return f"{said}: {json.loads(error.read())['error']['message']}"
    except (ValueError, KeyError, TypeError, OSError):
        return said


def _way_out(reason: object) -> str:
    if isinstance(reason, ssl.SSLCertVerificationError):
        return "; a certificate of your own is believed if $SSL_CERT_FILE names it"
    return ""
