"""Sends requests to a running server, found by its URL or by the configuration."""

import argparse
import os
import ssl
import urllib.parse
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any

from dragoman.cli.common import load_config
from dragoman.config.sections import Tls
from dragoman.config.settings import Settings
from dragoman.core.errors import ConfigError
from dragoman.core.urls import ServerAddress, parse_address, remove_credentials
from dragoman.server.auth.admin_token import ADMIN_TOKEN_HEADER, find_admin_token, find_socket_admin_token

if TYPE_CHECKING:
    import httpx

TIMEOUT_SECONDS = 10
LOAD_TIMEOUT_SECONDS = 600
"""Loading a model may take minutes."""
UNIX = "unix:"
URL_VARIABLE = "DRAGOMAN_URL"
ADMIN = "/admin/"
OR_SAME_USER = ", or, if the server has no keys, run this as the user who runs the server"
API = "/v1"
"""The path prefix of the API on a Dragoman server."""


class AdminClient:
    """`address` names the server in error messages. `token` gives access to `/admin` on a server without keys that the
    same user runs. `is_at_socket`: it listens on a Unix socket, so `where` means nothing to other programs."""

    def __init__(
        self,
        address: str,
        where: ServerAddress,
        http: "httpx.Client",
        key: str | None,
        token: str | None,
        is_at_socket: bool,
    ) -> None:
        self.address = address
        self.where = where
        self.key = key
        self.is_at_socket = is_at_socket
        self._http = http
        self._token = token
        if login := where.login or (f"Bearer {key}" if key else None):
            http.headers["authorization"] = login

    def close(self) -> None:
        self._http.close()

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
        return self._request("POST", path, LOAD_TIMEOUT_SECONDS, json=body)

    def upload(self, path: str, fields: Mapping[str, str], name: str, content: IO[bytes]) -> Any:
        """Send a form with a file."""
        form = {"data": fields, "files": {"file": (name, content)}}
        return self._request("POST", path, LOAD_TIMEOUT_SECONDS, **form)

    def download(self, path: str, out: IO[bytes]) -> None:
        """Write the body of an answer to a file while it arrives."""
        from dragoman.client.http_settings import NO_RESPONSE, describe

        try:
            with self._http.stream("GET", self._url(path), timeout=TIMEOUT_SECONDS) as response:
                if not response.is_success:
                    response.read()
                    raise ConfigError(f"{self.address}: the server answered {_describe(response, path)}")
                for piece in response.iter_bytes():
                    out.write(piece)
        except NO_RESPONSE as error:
            raise ConfigError(f"{self.address}: no answer: {describe(error)}{_hint(error)}") from error

    @contextmanager
    def stream(self, path: str, body: bytes, headers: Mapping[str, str]) -> "Iterator[httpx.Response]":
        """Post a body, and read the answer while it arrives."""
        import httpx

        from dragoman.client.http_settings import describe

        try:
            url, timeout = self._url(path), LOAD_TIMEOUT_SECONDS
            with self._http.stream("POST", url, content=body, headers=headers, timeout=timeout) as response:
                yield response
        except httpx.ConnectError as error:
            raise ConfigError(f"{self.address}: no answer: {describe(error)}{_hint(error)}") from error

    def unexpected_answer(self, expected: str = "a list of models") -> ConfigError:
        return ConfigError(f"{self.address}: the answer is not {expected}")

    def _url(self, path: str) -> str:
        return self.where.api + path.removeprefix(API) if path.startswith(API) else self.where.root + path

    def _request(self, method: str, path: str, timeout: float, **content: Any) -> Any:
        headers = {ADMIN_TOKEN_HEADER: self._token} if self._token and path.startswith(ADMIN) else None
        # Imported here, like httpx below: `dragoman serve` starts much faster without it.
        from dragoman.client.http_settings import NO_RESPONSE, describe

        try:
            response = self._http.request(method, self._url(path), headers=headers, timeout=timeout, **content)
            if not response.is_success:
                raise ConfigError(f"{self.address}: the server answered {_describe(response, path)}")
            return response.json()
        except NO_RESPONSE as error:
            raise ConfigError(f"{self.address}: no answer: {describe(error)}{_hint(error)}") from error
        except ValueError as error:
            raise self.unexpected_answer() from error


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that select the server."""
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--config", metavar="FILE", help="a configuration file (YAML or JSON)")
    group.add_argument("--url", help=f"the address of a running server, or unix:PATH (${URL_VARIABLE})")
    parser.add_argument("--api-key", metavar="KEY", help="a key for that server")


def names_url(arguments: argparse.Namespace) -> bool:
    """Whether the server is named by its URL, in a flag or in the environment."""
    return arguments.url is not None or (arguments.config is None and bool(os.environ.get(URL_VARIABLE)))


def from_arguments(arguments: argparse.Namespace) -> AdminClient:
    if not names_url(arguments):
        return from_settings(load_config(arguments.config).settings, arguments.api_key)
    key = arguments.api_key or os.environ.get("DRAGOMAN_API_KEY")
    if arguments.url is not None:
        return from_url(arguments.url, key)
    return from_url(os.environ[URL_VARIABLE], key, f"${URL_VARIABLE}")


def from_url(url: str, key: str | None, name: str = "--url") -> AdminClient:
    """Accepts the address of the server, of its API, or `unix:PATH`. `name` says where it was given."""
    address = f"{name} {remove_credentials(url)}"
    if url.startswith(UNIX):
        path = url.removeprefix(UNIX)
        where, http = _local_server("http://localhost", None, path)
        return AdminClient(address, where, http, key, find_socket_admin_token(path), is_at_socket=True)
    try:
        where = parse_address(url)
    except ConfigError as error:
        raise ConfigError(f"{name} {error}, or {UNIX}PATH") from error
    port = urllib.parse.urlsplit(where.root).port
    token = find_admin_token(where.host, port) if where.is_loopback and port is not None else None
    import httpx

    # Loopback needs no proxy, and plain HTTP needs no certificates.
    verify = ssl.create_default_context() if where.is_tls else False
    http = httpx.Client(verify=verify, trust_env=not where.is_loopback)
    return AdminClient(address, where, http, key, token, is_at_socket=False)


def from_settings(settings: Settings, key: str | None) -> AdminClient:
    """The server on this machine that was started with these settings."""
    scheme = "https" if settings.tls else "http"
    if settings.socket is not None:
        address, token = f"{UNIX}{settings.socket}", find_socket_admin_token(settings.socket)
        where, http = _local_server(f"{scheme}://localhost", settings.tls, settings.socket)
    else:
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.host, settings.host)  # noqa: S104 (no bind)
        address = f"{scheme}://{f'[{host}]' if ':' in host else host}:{settings.port}"
        token = find_admin_token(host, settings.port)
        where, http = _local_server(address, settings.tls)
    if settings.hosts:
        http.headers["host"] = settings.hosts[0]
    key = key or next(iter(settings.api_keys), None)
    return AdminClient(f"the server at {address}", where, http, key, token, is_at_socket=settings.socket is not None)


def _local_server(address: str, tls: Tls | None, socket: str | None = None) -> tuple[ServerAddress, "httpx.Client"]:
    """A server on this machine, which is reached without a proxy."""
    import httpx

    verify = False if tls is None else _trust_only(tls)
    transport = httpx.HTTPTransport(verify=verify, uds=socket)
    return parse_address(address), httpx.Client(transport=transport, trust_env=False)


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


def _describe(response: "httpx.Response", path: str) -> str:
    """The status and the server's error message."""
    status = f"{response.status_code} {response.reason_phrase}"
    if response.status_code == 401:
        return f"{status}; give --api-key{OR_SAME_USER if path.startswith(ADMIN) else ''}"
    try:
        return f"{status}: {response.json()['error']['message']}"
    except (ValueError, KeyError, TypeError):
        return status


def _hint(error: Exception) -> str:
    if "CERTIFICATE_VERIFY_FAILED" in str(error):
        return "; to trust a self-signed certificate, set $SSL_CERT_FILE to its path"
    return ""
