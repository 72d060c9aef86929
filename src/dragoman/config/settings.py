"""The settings of a server, as the configuration file, the environment and the flags give them (see `loading`)."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from dragoman.config.model_spec import ModelSpec
from dragoman.config.sections import Cors, Keys, Telemetry, Tls
from dragoman.core.types import Count, Patience, Seconds, Word
from dragoman.files.sources import home


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    body_bytes: Count = 32 * 1024 * 1024
    body_elements: Count = 1_250_000
    """Of a JSON body: one for each comma and colon, five for each array and object (`protocols/json_elements`)."""
    header_bytes: Count = 32 * 1024
    body_seconds: Seconds = 30.0
    queue: Annotated[int, msgspec.Meta(ge=0)] = 64
    """Requests that may wait for one model."""
    queue_seconds: Seconds = 60.0
    load_seconds: Annotated[float, msgspec.Meta(ge=0)] = 60.0
    """How long a request waits for its model to be loaded; 0: it is told at once to come again."""
    request_seconds: Seconds = 3600.0
    """From a request's first byte to the last of its reply; a caller may ask for less."""
    stall_seconds: Seconds = 600.0
    """Silence of an engine after which a request is given up."""
    write_seconds: Seconds = 30.0
    """How long a client may leave what it was sent unread."""
    keepalive_seconds: Seconds = 10.0
    choices: Count = 128
    stop_strings: Count = 32
    kept_responses: Count = 1000
    """Responses that are kept for a while, so that a later request can go on from one."""
    kept_bytes: Count = 64 * 1024 * 1024
    kept_seconds: Seconds = 24 * 3600.0


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    models: tuple[ModelSpec, ...] = ()
    aliases: Mapping[str, str] = {}
    default: str | None = None
    models_dir: tuple[Word, ...] | None = None
    """Folders whose models are served without being named here; None: that of `dragoman pull`, unless an engine was
    brought along."""
    memory: Count | None = None
    """Bytes that all loaded models may take together; None: no limit."""
    keep_alive: Annotated[float, msgspec.Meta(ge=0)] = math.inf
    """Seconds for which a model stays loaded when nobody uses it."""
    turn_seconds: Seconds = 10.0
    """For how long a model may stay while others wait for its memory."""
    layout: Literal["auto", "as-is"] = "auto"
    """Whether llama may use another layout of a model's weights, where the model itself does not say."""
    host: Word = "127.0.0.1"
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 8000
    api_keys: tuple[Word, ...] = ()
    strict: bool = False
    event_log: Word | None = None
    hosts: tuple[Word, ...] | None = None
    """The names by which clients may call the server; None: decided by `host`."""
    limits: Limits = Limits()
    grace_seconds: Patience = 30.0
    drain_seconds: Patience = 0.0
    """How long new requests are still taken after the signal to stop, while `/ready` says no."""
    workers: Count | None = None
    """Processes that clients talk to; None: by how many CPUs there are."""
    socket: Word | None = None
    """The path of a Unix socket to listen on, instead of the address."""
    proxies: tuple[Word, ...] = ()
    """Addresses and networks whose X-Forwarded headers are believed; `unix`: whoever comes by the socket."""
    keys: Keys = Keys()
    telemetry: Telemetry = Telemetry()
    cors: Cors = Cors()
    tls: Tls | None = None

    @property
    def folders(self) -> tuple[Path, ...]:
        """Where models are looked for that are not named."""
        given = self.models_dir
        return (home() / "models",) if given is None else tuple(Path(folder).expanduser() for folder in given)
