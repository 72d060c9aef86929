"""The settings of a server, after the file, the environment and the flags are merged (see `loading`)."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from dragoman.config.model_spec import ModelSpec
from dragoman.config.sections import Budget, CompactionSettings, Cors, Keys, Price, Storage, Telemetry, Tls
from dragoman.core.types import Count, ReasoningField, Seconds, SecondsOrZero, Word
from dragoman.files.sources import models_directory


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    body_bytes: Count = 32 * 1024 * 1024
    body_elements: Count = 1_250_000
    """Size of a JSON body: 1 per comma and colon, 5 per array and object (`protocols/json_body`)."""
    header_bytes: Count = 32 * 1024
    body_seconds: Seconds = 30.0
    queue: Annotated[int, msgspec.Meta(ge=0)] = 64
    """Requests that may wait for one model."""
    queue_seconds: Seconds = 60.0
    load_seconds: Annotated[float, msgspec.Meta(ge=0)] = 60.0
    """How long a request waits for its model to load; 0 means a 503 with Retry-After at once."""
    request_seconds: Seconds = 3600.0
    """From the first byte of a request to the last byte of its reply. A caller may set a shorter deadline."""
    stall_seconds: Seconds = 600.0
    """A request fails if its engine produces nothing for this long."""
    write_seconds: Seconds = 30.0
    """A connection is closed if the client reads nothing for this long."""
    keepalive_seconds: Seconds = 10.0
    choices: Count = 128
    stop_strings: Count = 32
    batch_lines: Count = 16
    """Lines of all batches that run or wait for a model at the same time."""
    kept_responses: Count = 1000
    """Stored responses. The three limits apply only to a database in memory."""
    kept_bytes: Count = 64 * 1024 * 1024
    kept_seconds: Seconds = 24 * 3600.0


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    models: tuple[ModelSpec, ...] = ()
    aliases: Mapping[str, str] = {}
    default: str | None = None
    models_yaml: Word | None = None
    """A file with more models, in the form of Lethean's `models.yaml`. The server reads it again after a change."""
    require_model: bool = False
    """Refuse requests without a model name."""
    errors: Literal["openai", "lethean"] = "openai"
    """`lethean`: the errors model_not_found and model_loading have their code as type too."""
    reasoning_fields: Annotated[tuple[ReasoningField, ...], msgspec.Meta(min_length=1)] = (
        "reasoning_content",
        "reasoning",
    )
    """Fields of chat replies that contain the reasoning."""
    models_dir: tuple[Word, ...] | None = None
    """Directories whose models are served without an entry in `models`; None means the directory of `dragoman pull`,
    or no directory if the caller passes its own engine."""
    memory: Count | None = None
    """Bytes that all loaded models may use together; None means no limit."""
    keep_alive: Annotated[float, msgspec.Meta(ge=0)] = math.inf
    """Seconds until an unused model is unloaded."""
    turn_seconds: Seconds = 10.0
    """How long a model may stay loaded while another model waits for its memory."""
    layout: Literal["auto", "as-is"] | None = None
    """`as-is` ignores what `dragoman tune` recorded; `auto` causes a warning. A model may override it."""
    host: Word = "127.0.0.1"
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 8000
    api_keys: tuple[Word, ...] = ()
    strict: bool = False
    event_log: Word | None = None
    record: Word | None = None
    """The file in which requests and replies are recorded, with prompts."""
    hosts: tuple[Word, ...] | None = None
    """Accepted values of the Host header; None means that `host` decides."""
    limits: Limits = Limits()
    grace_seconds: SecondsOrZero = 30.0
    drain_seconds: SecondsOrZero = 0.0
    """How long new requests are still accepted after the stop signal, while `/ready` already fails."""
    workers: Count | None = None
    """Front-end processes; None means that the number of CPUs decides."""
    socket: Word | None = None
    """The path of a Unix socket to listen on, instead of an address."""
    proxies: tuple[Word, ...] = ()
    """Addresses and networks whose X-Forwarded headers are trusted; `unix` means clients of the Unix socket."""
    protocols: tuple[Word, ...] = ()
    """Wire protocols of your own: names of entry points, or `module:Class`."""
    keys: Keys = Keys()
    budgets: tuple[Budget, ...] = ()
    prices: Mapping[Word, Price] = {}
    """By the name of a model, or by a pattern."""
    storage: Storage = Storage()
    telemetry: Telemetry = Telemetry()
    compaction: CompactionSettings = CompactionSettings()
    cors: Cors = Cors()
    tls: Tls | None = None

    @property
    def default_model(self) -> ModelSpec | None:
        """The configured model for requests without a model name; None if `models` is empty."""
        if self.default is None:
            return next(iter(self.models), None)
        name = self.default.lower()
        return next((spec for spec in self.models if spec.includes(name) or name in map(str.lower, spec.names)), None)

    @property
    def folders(self) -> tuple[Path, ...]:
        """The directories to search for models without an entry."""
        if self.models_dir is None:
            return (models_directory(),)
        return tuple(Path(name).expanduser() for name in self.models_dir)
