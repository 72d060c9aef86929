"""Sections of the configuration: keys, budgets, prices, telemetry, compaction, CORS, TLS, trusted proxies, and `ray` of
one model.

budget := {principal: PATTERN | key: PATTERN, per: day | week | month, tokens: COUNT | cost: NUMBER [, action]}
ray := {replicas: COUNT}
     | {min_replicas, max_replicas, target_ongoing_requests, upscale_delay_s, downscale_delay_s,
        look_back_period_s, metrics_interval_s}
       and max_ongoing_requests, num_cpus, num_gpus, resources, graceful_shutdown_timeout_s
"""

import ipaddress
from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec

from dragoman.core.errors import ConfigError
from dragoman.core.request import Sampling
from dragoman.core.types import Count, Priority, RouteScope, Seconds, Word
from dragoman.pipeline.summary_writer import MAX_TOKENS, PROMPT, SummaryOptions

RESERVED_ROUTES: frozenset[RouteScope] = frozenset({"stats", "admin"})
"""Routes that a key may use only if its scopes name them."""


MAX_MONEY = 1e9
Money = Annotated[float, msgspec.Meta(ge=0, le=MAX_MONEY)]
"""An amount in the operator's currency."""
Period = Literal["day", "week", "month"]
BudgetAction = Literal["refuse", "warn"]


class BudgetLimit(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How much may be used in each period: so many tokens, or so much money."""

    per: Period
    tokens: Count | None = None
    """Prompt and reply tokens together."""
    cost: Annotated[float, msgspec.Meta(gt=0, le=MAX_MONEY)] | None = None
    action: BudgetAction = "refuse"
    """`warn`: requests above the limit run, with a header and a line in the log."""

    def __post_init__(self) -> None:
        if (self.tokens is None) == (self.cost is None):
            raise ValueError("tokens: give either tokens or cost")


class Budget(BudgetLimit, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A limit for each principal, or each key, that matches a name or a pattern."""

    principal: Word | None = None
    key: Word | None = None
    """The id of a stored key, or the principal of a key of the configuration."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.principal is None) == (self.key is None):
            raise ValueError("principal: give either principal or key")


class Price(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The cost of a million tokens. `input` and `output` are what OpenAI calls the prompt and the reply."""

    input: Money
    output: Money = 0.0
    cached_input: Money | None = None
    """Prompt tokens that were in the prefix cache; None means the price of the others."""


class KeyLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Limits of one key; None means no limit."""

    concurrency: Count | None = None
    """Requests that run or wait at the same time."""
    requests_per_minute: Count | None = None
    tokens_per_minute: Count | None = None
    """Prompt and reply tokens together."""
    budgets: tuple[BudgetLimit, ...] = ()
    priority: Priority | None = None
    """`batch`: its requests use only what interactive requests leave free. None means interactive."""

    @property
    def has_rates(self) -> bool:
        """Whether there is a limit of requests or tokens for some time."""
        return any((self.concurrency, self.requests_per_minute, self.tokens_per_minute))

    def over(self, others: "KeyLimits") -> "KeyLimits":
        """Return these limits, with those of `others` where these are None."""
        return KeyLimits(
            concurrency=self.concurrency or others.concurrency,
            requests_per_minute=self.requests_per_minute or others.requests_per_minute,
            tokens_per_minute=self.tokens_per_minute or others.tokens_per_minute,
            budgets=self.budgets or others.budgets,
            priority=self.priority or others.priority,
        )


class Jwt(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Accept signed tokens of another issuer as keys. The `alg` field of a token is ignored."""

    algorithm: Literal["HS256", "RS256"]
    key_file: Word
    """The shared secret, or the public key as PEM."""
    audience: Word | None = None
    issuer: Word | None = None
    leeway_seconds: Annotated[float, msgspec.Meta(ge=0, le=300)] = 0
    models: tuple[Word, ...] = ()
    """Names and patterns; empty means all. A token can only restrict the set further."""
    routes: tuple[RouteScope, ...] = ()
    limits: KeyLimits = KeyLimits()


class Keys(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    store: Word | None = None
    """The database of `dragoman keys`; None means `keys.db` in Dragoman's home directory."""
    anonymous: bool = False
    """Serve callers without a valid key too, except on the reserved routes."""
    limits: KeyLimits = KeyLimits()
    """The default for each key, and for all anonymous callers together."""
    jwt: Jwt | None = None


MEMORY = "memory"
POSTGRES = "postgresql://"


class Keep(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How long the storage keeps things, in seconds."""

    responses: Seconds = 30 * 86400.0
    usage: Seconds = 366 * 86400.0
    """The ledger's entries. The sums of each day are kept forever."""
    files: Seconds = 30 * 86400.0
    batches: Seconds = 30 * 86400.0


class Storage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where state is stored that outlives the process."""

    address: Word = MEMORY
    """`memory`, the path of an SQLite file, or postgresql://USER:PASSWORD@HOST:PORT/NAME."""
    blobs: Word | None = None
    """The directory of files and large bodies; None means one beside the database. Servers that share a database must
    share it too; other databases must not use it."""
    file_bytes: Count = 512 * 1024 * 1024
    """The largest file that may be uploaded."""
    principal_bytes: Count = 16 * 1024 * 1024 * 1024
    """What one principal may store: files, batches, responses and conversations together."""
    keep: Keep = Keep()


class CompactionSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How conversations that have become too long are summarised."""

    prompt: Word | None = None
    """What the model is told before it reads the conversation; None means the built-in text."""
    max_tokens: Count = MAX_TOKENS
    """Of a summary; at most a quarter of the model's context."""

    def options(self, sampling: Sampling) -> SummaryOptions:
        return SummaryOptions(self.prompt or PROMPT, self.max_tokens, sampling)


class Traces(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    endpoint: Word
    """The OTLP/HTTP address for spans, such as `http://127.0.0.1:4318/v1/traces`."""
    service: Word = "dragoman"


class Telemetry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    metrics: Literal["keyed", "open", "off"] = "keyed"
    """`keyed`: `/metrics` needs a key if the API does."""
    metrics_by_principal: bool = False
    """Count requests and tokens of each principal too."""
    log_format: Literal["text", "json"] = "text"
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_requests: bool = False
    """Log one line per request."""
    log_prompts: bool = False
    """Log the full text of prompts."""
    traces: Traces | None = None


class Cors(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    origins: tuple[Word, ...] = ()
    """Origins of web pages that may call the server; `*` means all."""
    max_age_seconds: Annotated[int, msgspec.Meta(ge=0)] = 600


class Tls(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    certificate: Word
    """The certificate chain, as PEM."""
    key: Word


Network = ipaddress.IPv4Network | ipaddress.IPv6Network
UNIX = "unix"
"""The entry of `proxies` for clients of the Unix socket."""


def parse_network(entry: object) -> Network | None:
    """Parse an entry of `proxies`; None means the Unix socket."""
    if entry == UNIX:
        return None
    try:
        return ipaddress.ip_network(str(entry), strict=False)
    except ValueError as error:
        raise ConfigError(f"{entry!r}: expected an address, a network such as 10.0.0.0/8, or unix") from error


NonNegative = Annotated[float, msgspec.Meta(ge=0)]


class ReplicaSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Replicas of a model under Ray Serve, with Ray Serve's own names. Only `dragoman.ray` uses them."""

    replicas: Count | None = None
    """A fixed number; None means autoscaling."""
    min_replicas: Annotated[int, msgspec.Meta(ge=0)] = 1
    max_replicas: Count = 1
    target_ongoing_requests: Annotated[float, msgspec.Meta(gt=0)] = 2.0
    """Per replica; above it, replicas are added."""
    upscale_delay_s: NonNegative = 10.0
    downscale_delay_s: NonNegative = 300.0
    look_back_period_s: Seconds = 30.0
    """The load is averaged over this time."""
    metrics_interval_s: Seconds = 10.0
    """How often the load is reported."""
    max_ongoing_requests: Count | None = None
    """Concurrent requests per replica; None means the model's `slots`, or 16."""
    num_cpus: NonNegative = 1.0
    num_gpus: NonNegative = 0.0
    resources: Mapping[Word, NonNegative] = {}
    graceful_shutdown_timeout_s: Seconds = 600.0
    """For requests that still run in a replica that is removed."""

    def __post_init__(self) -> None:
        if self.replicas is not None and (self.min_replicas, self.max_replicas) != (1, 1):
            raise ValueError("replicas cannot be combined with min_replicas and max_replicas")
        if self.min_replicas > self.max_replicas:
            raise ValueError(f"min_replicas ({self.min_replicas}) is more than max_replicas ({self.max_replicas})")

    @property
    def most(self) -> int:
        return self.replicas or self.max_replicas
