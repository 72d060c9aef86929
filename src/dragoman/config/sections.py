"""What an operator may set beside models and limits: who is let in, what is written down, how clients connect.

Each class is a section of the configuration, and part of `config.Settings`. Paths in them are files of the operator's.
"""

import ipaddress
from typing import Annotated, Literal

import msgspec

from dragoman.core.errors import ConfigError
from dragoman.core.types import Count, Word

RouteScope = Literal[
    "chat", "completions", "messages", "responses", "embeddings", "rerank", "models", "tokens", "stats", "admin"
]
RESERVED: frozenset[RouteScope] = frozenset({"stats", "admin"})
"""Routes that a key opens only where it says so."""


class KeyLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What one key may do; None: as much as it likes."""

    concurrency: Count | None = None
    """Requests that run or wait at the same time."""
    requests_per_minute: Count | None = None
    tokens_per_minute: Count | None = None
    """Of prompts and replies together."""

    def over(self, others: "KeyLimits") -> "KeyLimits":
        """These, and those of the others where these say nothing."""
        return KeyLimits(
            concurrency=self.concurrency or others.concurrency,
            requests_per_minute=self.requests_per_minute or others.requests_per_minute,
            tokens_per_minute=self.tokens_per_minute or others.tokens_per_minute,
        )


class Jwt(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Signed tokens of somebody else's are taken as keys. The algorithm is this one, whatever a token says."""

    algorithm: Literal["HS256", "RS256"]
    key_file: Word
    """The shared secret, or the public key as PEM."""
    audience: Word | None = None
    issuer: Word | None = None
    leeway_seconds: Annotated[float, msgspec.Meta(ge=0, le=300)] = 0
    models: tuple[Word, ...] = ()
    """Names and patterns; empty: all. A token can only narrow it."""
    routes: tuple[RouteScope, ...] = ()
    limits: KeyLimits = KeyLimits()


class Keys(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    store: Word | None = None
    """Where `dragoman keys` keeps them; None: `keys.db` in Dragoman's home."""
    anonymous: bool = False
    """Whoever has no valid key is let in all the same, but for what only the operator may."""
    limits: KeyLimits = KeyLimits()
    """For every key, and for all anonymous callers together, where nothing else is said."""
    jwt: Jwt | None = None


class Traces(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    endpoint: Word
    """Where spans are sent by OTLP over HTTP, as `http://127.0.0.1:4318/v1/traces`."""
    service: Word = "dragoman"


class Telemetry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    metrics: Literal["keyed", "open", "off"] = "keyed"
    """Whether `/metrics` needs a key, where keys are needed."""
    log_format: Literal["text", "json"] = "text"
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_requests: bool = False
    """A line in the log for every request."""
    log_prompts: bool = False
    """What is asked goes to the log, word by word."""
    traces: Traces | None = None


class Cors(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    origins: tuple[Word, ...] = ()
    """Origins of web pages that may call the server; `*`: all."""
    max_age_seconds: Annotated[int, msgspec.Meta(ge=0)] = 600


class Tls(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    certificate: Word
    """The chain, as PEM."""
    key: Word


Network = ipaddress.IPv4Network | ipaddress.IPv6Network
UNIX = "unix"
"""Instead of a network: whoever comes by the Unix socket."""


def network(entry: object) -> Network | None:
    """An entry of `proxies`; None for the socket."""
    if entry == UNIX:
        return None
    try:
        return ipaddress.ip_network(str(entry), strict=False)
    except ValueError as error:
        raise ConfigError(f"{entry!r}: expected an address, a network such as 10.0.0.0/8, or unix") from error
