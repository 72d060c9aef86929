"""The ASGI app with all state: models, quotas, stored responses, telemetry."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence

import msgspec

from dragoman.config.settings import Settings
from dragoman.core.engine import Engine
from dragoman.core.errors import NotSupported, StorageUnavailable, Unauthorized
from dragoman.models import Catalog, MakeOf, Model
from dragoman.protocols.admin import Reloaded
from dragoman.server.auth.admin_token import new_token
from dragoman.server.auth.quotas import Lease
from dragoman.server.auth.scopes import Caller
from dragoman.server.base_app import Door
from dragoman.server.http_exchange import Exchange
from dragoman.server.model_lease import Engagement, find_model
from dragoman.server.routing import Route, RouteTable
from dragoman.server.telemetry import TelemetryRecorder
from dragoman.server.telemetry.eventlog import describe_run
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
"""Settings that change only with a restart."""


def _changed_fixed_settings(before: Settings, after: Settings) -> tuple[str, ...]:
    sections: tuple[tuple[str, tuple[str, ...], msgspec.Struct, msgspec.Struct], ...] = (
        ("", FIXED, before, after),
        ("telemetry.", FIXED_TELEMETRY, before.telemetry, after.telemetry),
        ("limits.", FIXED_LIMITS, before.limits, after.limits),
    )
    return tuple(
        f"{section}{name}"
        for section, names, old, new in sections
        for name in names
        if getattr(old, name) != getattr(new, name)
    )


def _keep_fixed_settings(settings: Settings, initial: Settings) -> Settings:
    """The new settings, with the initial values of those that change only with a restart."""
    replace = msgspec.structs.replace
    return replace(
        settings,
        telemetry=replace(settings.telemetry, **{name: getattr(initial.telemetry, name) for name in FIXED_TELEMETRY}),
        limits=replace(settings.limits, **{name: getattr(initial.limits, name) for name in FIXED_LIMITS}),
        **{name: getattr(initial, name) for name in FIXED},
    )


class App(Door):
    telemetry: TelemetryRecorder
    responses: ResponseStore

    def __init__(
        self,
        routes: RouteTable,
        settings: Settings,
        engines: Sequence[Engine] = (),
        reread: Reread | None = None,
        make_of: MakeOf | None = None,
    ) -> None:
        """`reread` loads the settings again; `make_of` makes engines that run elsewhere."""
        self.catalog = Catalog(settings, engines, make_of)
        super().__init__(routes, settings, TelemetryRecorder(settings.telemetry, settings.event_log))
        limits = settings.limits
        self.responses = MemoryResponses(
            count=limits.kept_responses, size=limits.kept_bytes, seconds=limits.kept_seconds
        )
        self.created = int(time.time())
        self.started = time.monotonic()
        self.admin_token = new_token()
        """If no keys are configured, `/admin` requires it in the header X-Dragoman-Admin-Token."""
        self._is_stopped = False
        self._settings_loader = reread
        self._reloading = asyncio.Lock()
        self._initial_settings = settings
        self.followers: list[Callable[[Settings], Awaitable[None]]] = []
        """Called with new settings; `reload` waits for them."""

    @property
    def can_reload(self) -> bool:
        return self._settings_loader is not None

    async def reload(self) -> Reloaded:
        """Load and apply the configuration again. A ConfigError leaves everything as it was."""
        if self._settings_loader is None:
            raise NotSupported("this server was started without a configuration file, so it cannot reload one")
        async with self._reloading:
            # Log rotation sends the same signal, so this happens even if the configuration is invalid.
            self.telemetry.events.reopen()
            loaded = await asyncio.to_thread(self._settings_loader)
            settings = _keep_fixed_settings(loaded, self._initial_settings)
            before = {name: spec for spec in self.settings.models for name in spec.names}
            after = {name: spec for spec in settings.models for name in spec.names}
            self._adopt(settings)
            await asyncio.gather(*(follow(settings) for follow in self.followers))
            result = Reloaded(
                models=tuple(after),
                added=tuple(name for name in after if name not in before),
                changed=tuple(
                    name for name in after if name in before and not before[name].same_but_for_place(after[name])
                ),
                removed=tuple(name for name in before if name not in after),
                restart_needed=_changed_fixed_settings(self._initial_settings, loaded),
            )
            log.info("the configuration was read again; models: %s", ", ".join(after) or "none")
        return result

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
        """A lease on the quota of the caller with these headers; None if it has no quota. Nothing is reserved yet."""
        quota = self._access.caller(headers).quota
        return None if quota is None else Lease(quota, self.telemetry.metrics.limited)

    def lease_of(self, exchange: Exchange) -> Lease | None:
        lease = exchange.lease
        assert lease is None or isinstance(lease, Lease)
        return lease

    def valid_caller(self, exchange: Exchange) -> Caller | None:
        """The caller of an open route; None if a key is required and the request has no valid one."""
        try:
            return self._access.caller(exchange.headers)
        except (Unauthorized, StorageUnavailable):
            return None

    async def model(self, exchange: Exchange, name: str) -> Model:
        """Find the model with this name, and check that the caller may use it."""
        model = await find_model(self.catalog, exchange.caller, name)
        exchange.record.model = model.label
        exchange.caller.check_model(model.name)
        return model

    def start(self) -> None:
        self._started = True
        names = [model.name for model in self.catalog.models.values()]
        self.telemetry.start(describe_run(self.settings, names))

    async def stop(self) -> None:
        if self._is_stopped:
            return
        self._is_stopped = True
        await self.catalog.stop()
        self._access.close()
        self.telemetry.close()
