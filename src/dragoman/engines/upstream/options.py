"""Configuration of a model that other servers run."""

import os
from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec

from dragoman.client.planner import ProtocolName
from dragoman.core.errors import ConfigError
from dragoman.core.types import Seconds, Word
from dragoman.core.urls import DEFAULT, parse_address, remove_credentials


class ServerOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One server. Missing values default to those of the model."""

    url: Word
    weight: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    rank: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Servers of a higher rank are used only when no server of a lower rank is available."""
    key_env: Word | None = None
    protocol: ProtocolName | None = None
    model: Word | None = None


class UpstreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    url: Word | None = None
    urls: tuple[Word | ServerOptions, ...] = ()
    protocol: ProtocolName = "auto"
    key_env: Word | None = None
    """The environment variable that contains the API key."""
    model: Word | None = None
    """The model's name on the server; defaults to its name here."""
    models: Literal["all"] | None = None
    """Serve all models of the server, each as NAME/MODEL."""
    format: str | None = None
    """The syntax of reasoning and tool calls, for a server that returns plain text."""
    context: Annotated[int, msgspec.Meta(ge=1)] | None = None
    slots: Annotated[int, msgspec.Meta(ge=1)] | None = None
    image_urls: bool = False
    """Whether image URLs are passed on for the server to fetch."""
    proxy: Word | None = None
    connect_seconds: Seconds = 10.0
    silence_seconds: Seconds = 600.0
    health_seconds: Annotated[float, msgspec.Meta(ge=0)] = 10.0
    """Seconds between two health probes of each server; 0 disables them."""

    def __post_init__(self) -> None:
        if not self._given_servers:
            raise ValueError("url is missing; set url to the server's address, or urls for several servers")
        if self.url and self.urls:
            raise ValueError("url and urls exclude each other; set url for one server or urls for several")
        if self.models is not None and self.model is not None:
            raise ValueError("model and models exclude each other; set model for one model or models for all")
        errors = [message for server in self._given_servers for message in _url_errors(server.url)]
        errors += [f"proxy: {message}" for message in _url_errors(self.proxy or DEFAULT)]
        if errors:
            raise ValueError("; ".join(errors))
        addresses = [parse_address(server.url).api for server in self._given_servers]
        if len(set(addresses)) < len(addresses):
            raise ValueError("urls contains the same address twice; use weight to send more requests to one server")

    @property
    def _given_servers(self) -> list[ServerOptions]:
        entries = [*([self.url] if self.url else []), *self.urls]
        return [ServerOptions(entry) if isinstance(entry, str) else entry for entry in entries]

    @property
    def servers(self) -> list[ServerOptions]:
        """The servers, with defaults filled in from the model."""
        return [
            msgspec.structs.replace(
                server,
                key_env=server.key_env or self.key_env,
                protocol=server.protocol or self.protocol,
                model=server.model or self.model,
            )
            for server in self._given_servers
        ]


def _url_errors(url: str) -> Sequence[str]:
    try:
        parse_address(url)
    except ConfigError as error:
        return error.messages
    return ()


def read_api_key(server: ServerOptions) -> str | None:
    """Read the API key of a server from the environment."""
    if (error := find_key_error(server)) is not None:
        raise ConfigError(error)
    return None if server.key_env is None else os.environ[server.key_env].strip()


def find_key_error(server: ServerOptions) -> str | None:
    if server.key_env is None or os.environ.get(server.key_env, "").strip():
        return None
    return f"the environment variable {server.key_env} has no key for {remove_credentials(server.url)}"
