"""The ASGI app: everything that has state, in one process."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence

import msgspec

from dragoman.config.settings import Limits, Settings
from dragoman.core.engine import Engine
from dragoman.core.errors import NotSupported, StorageUnavailable, Unauthorized
from dragoman.models import Catalog, MakeOf, Model
from dragoman.protocols.admin import Reloaded
from dragoman.server.auth.admin_token import new_token
from dragoman.server.auth.quotas import Lease
from dragoman.server.auth.scopes import Caller
from dragoman.server.base_app import Door
from dragoman.server.http_exchange import Exchange
from dragoman.server.model_lease import Engagement, named
from dragoman.server.routing import Route, RouteTable
from dragoman.server.run_description import describe_run
from dragoman.server.telemetry import Telemetry
from dragoman.storage.base import ResponseStore
from dragoman.storage.memory import MemoryResponses

log = logging.getLogger("dragoman")

Reread = Callable[[], Settings]

FIXED = ("host", "port", "socket", "tls", "event_log", "grace_seconds", "workers")
FIXED_TELEMETRY = ("log_format", "log_level", "log_requests", "traces")
FIXED_LIMITS = (
    *("header_bytes", "body_seconds", "write_seconds", "keepalive_seconds", "stall_seconds"),
    *("kept_responses", "kept_bytes", "kept_seconds"),
)
"""Settings that stay as they were when the server started."""


def fixed_differences(before: Settings, after: Settings) -> tuple[str, ...]:
    sections: tuple[tuple[str, tuple[str, ...], msgspec.Struct, msgspec.Struct], ...] = (
        ("", FIXED, before, after),
        ("telemetry.", FIXED_TELEMETRY, before.telemetry, after.telemetry),
        ("limits.", FIXED_LIMITS, before.limits, after.limits),
    )
    return tuple(
        f"{section}{name}"
        for section, names, was, is_now in sections
        for name in names
        if getattr(was, name) != getattr(is_now, name)
    )


def with_fixed(settings: Settings, begun: Settings) -> Settings:
    """What a running server can take over of new settings: some of a kind must not be old and others new."""
    replace = msgspec.structs.replace
    return replace(
        settings,
        telemetry=replace(settings.telemetry, **{name: getattr(begun.telemetry, name) for name in FIXED_TELEMETRY}),
        limits=replace(settings.limits, **{name: getattr(begun.limits, name) for name in FIXED_LIMITS}),
        **{name: getattr(begun, name) for name in FIXED},
    )


class App(Door):
    telemetry: Telemetry
    responses: ResponseStore

    def __init__(
        self,
        routes: RouteTable,
        settings: Settings,
        engines: Sequence[Engine] = (),
        reread: Reread | None = None,
        make_of: MakeOf | None = None,
    ) -> None:
        """`reread` gives the settings as they are written down now; `make_of` engines that are not made here."""
        self.catalog = Catalog(settings, engines, make_of)
        super().__init__(routes, settings, Telemetry(settings.telemetry, settings.event_log))
        self.responses = _response_store(settings.limits)
        self.created = int(time.time())
        self.started = time.monotonic()
        self.admin_token = new_token()
        """`/admin` requires it in the header X-Dragoman-Admin-Token where no keys are configured."""
        self._stopped = False
        self._reread = reread
        self._reloading = asyncio.Lock()
        self._begun_with = settings
        self.followers: list[Callable[[Settings], Awaitable[None]]] = []
        """Who else has to hear of a new configuration before it holds."""

    @property
    def can_reload(self) -> bool:
        return self._reread is not None

    async def reload(self) -> Reloaded:
        """Take the configuration over as it is now; where it has a mistake, a ConfigError, and all stays as it was."""
        if self._reread is None:
            raise NotSupported("this server was started without a configuration that could be read again")
        async with self._reloading:
            # Whoever moved the event log away sends the same signal, whatever has become of the configuration.
            self.telemetry.events.reopen()
            read = await asyncio.to_thread(self._reread)
            settings = with_fixed(read, self._begun_with)
            before = {name: spec for spec in self.settings.models for name in spec.names}
            after = {name: spec for spec in settings.models for name in spec.names}
            self._adopt(settings)
            await asyncio.gather(*(follow(settings) for follow in self.followers))
            told = Reloaded(
                models=tuple(after),
                added=tuple(name for name in after if name not in before),
                changed=tuple(
                    name for name in after if name in before and not before[name].same_but_for_place(after[name])
                ),
                removed=tuple(name for name in before if name not in after),
                restart_needed=fixed_differences(self._begun_with, read),
            )
            log.info("the configuration was read again; models: %s", ", ".join(after) or "none")
        return told

    def _reconfigure(self, settings: Settings) -> None:
        self.catalog.reconfigure(settings)

    def _take_lease(self, exchange: Exchange, route: Route | None) -> None:
        quota = exchange.caller.quota
        if quota is not None and exchange.method == "POST":
            exchange.lease = lease = Lease(quota, self.telemetry.metrics.limited)
            lease.enter()

    def _answer(self, exchange: Exchange, route: Route) -> Awaitable[None]:
        return route.handler(self, exchange)

    def engagement(self, exchange: Exchange) -> Engagement:
        return self.engagement_of(exchange.caller, self.lease_of(exchange))

    def engagement_of(self, caller: Caller, lease: Lease | None) -> Engagement:
        return Engagement(self.catalog, caller, lease)

    def lease_for(self, headers: Mapping[bytes, bytes]) -> Lease | None:
        """Of the quota of whoever has these headers, if it has one; nothing is taken of it yet."""
        quota = self._access.caller(headers).quota
        return None if quota is None else Lease(quota, self.telemetry.metrics.limited)

    def lease_of(self, exchange: Exchange) -> Lease | None:
        lease = exchange.lease
        assert lease is None or isinstance(lease, Lease)
        return lease

    def valid_caller(self, exchange: Exchange) -> Caller | None:
        """The caller of an open route; None if keys are needed and the request has no valid key."""
        try:
            return self._access.caller(exchange.headers)
        except (Unauthorized, StorageUnavailable):
            return None

    async def model(self, exchange: Exchange, name: str) -> Model:
        """The model of this name, if the caller may ask it."""
        model = await named(self.catalog, exchange.caller, name)
        exchange.record.model = model.label
        exchange.caller.check_model(model.name)
        return model

    def start(self) -> None:
        self._started = True
        names = [model.name for model in self.catalog.models.values()]
        self.telemetry.start(describe_run(self.settings, names))

    async def stop(self) -> None:
        if self._stopped:
            return
        self._stopped = True
        await self.catalog.stop()
        self._access.close()
        self.telemetry.close()


def _response_store(limits: Limits) -> ResponseStore:
    return MemoryResponses(count=limits.kept_responses, size=limits.kept_bytes, seconds=limits.kept_seconds)
