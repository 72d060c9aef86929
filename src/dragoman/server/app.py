"""The ASGI app with all state: models, quotas, stored responses, telemetry."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence

import msgspec

from dragoman.config.settings import Settings
from dragoman.core.engine import Engine
from dragoman.core.errors import NotSupported, StorageUnavailable, Unauthorized
from dragoman.models import Catalog, EngineFactory, ServedModel
from dragoman.protocols.admin_fields import ReloadResult
from dragoman.server.auth.admin_token import new_token
from dragoman.server.auth.quotas import QuotaLease
from dragoman.server.auth.scopes import Caller
from dragoman.server.base_app import BaseApp
from dragoman.server.http_exchange import HttpExchange
from dragoman.server.model_lease import ModelLease, find_model
from dragoman.server.routing import Route, RouteTable
from dragoman.server.telemetry import TelemetryRecorder
from dragoman.server.telemetry.eventlog import describe_run
from dragoman.storage.base import ResponseStore
from dragoman.storage.memory import MemoryResponseStore

log = logging.getLogger("dragoman")

SettingsLoader = Callable[[], Settings]

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


class App(BaseApp):
    telemetry: TelemetryRecorder
    responses: ResponseStore

    def __init__(
        self,
        routes: RouteTable,
        settings: Settings,
        engines: Sequence[Engine] = (),
        reload_settings: SettingsLoader | None = None,
        engine_factory: EngineFactory | None = None,
    ) -> None:
        """`reload_settings` loads the settings again; `engine_factory` makes engines that run elsewhere."""
        self.catalog = Catalog(settings, engines, engine_factory)
        super().__init__(routes, settings, TelemetryRecorder(settings.telemetry, settings.event_log))
        limits = settings.limits
        self.responses = MemoryResponseStore(
            count=limits.kept_responses, size=limits.kept_bytes, seconds=limits.kept_seconds
        )
        self.created = int(time.time())
        self.started = time.monotonic()
        self.admin_token = new_token()
        """If no keys are configured, `/admin` requires it in the header X-Dragoman-Admin-Token."""
        self._is_stopped = False
        self._settings_loader = reload_settings
        self._reloading = asyncio.Lock()
        self._initial_settings = settings
        self.settings_listeners: list[Callable[[Settings], Awaitable[None]]] = []
        """Called with new settings; `reload` waits for them."""

    @property
    def can_reload(self) -> bool:
        return self._settings_loader is not None

    async def reload(self) -> ReloadResult:
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
            self._apply_reloaded(settings)
            await asyncio.gather(*(follow(settings) for follow in self.settings_listeners))
            result = ReloadResult(
                models=tuple(after),
                added=tuple(name for name in after if name not in before),
                changed=tuple(
                    name for name in after if name in before and not before[name].equals_except_location(after[name])
                ),
                removed=tuple(name for name in before if name not in after),
                restart_needed=_changed_fixed_settings(self._initial_settings, loaded),
            )
            log.info("the configuration was read again; models: %s", ", ".join(after) or "none")
        return result

    def _reconfigure(self, settings: Settings) -> None:
        self.catalog.reconfigure(settings)

    def _enter_quota(self, exchange: HttpExchange, route: Route | None) -> None:
        quota = exchange.caller.quota
        if quota is not None and exchange.method == "POST":
            exchange.quota_lease = lease = QuotaLease(quota, self.telemetry.metrics.limited)
            lease.enter()

    def _answer(self, exchange: HttpExchange, route: Route) -> Awaitable[None]:
        return route.handler(self, exchange)

    def model_lease(self, exchange: HttpExchange) -> ModelLease:
        return self.make_model_lease(exchange.caller, self.quota_lease_of(exchange))

    def make_model_lease(self, caller: Caller, lease: QuotaLease | None) -> ModelLease:
        return ModelLease(self.catalog, caller, lease)

    def quota_lease_for(self, headers: Mapping[bytes, bytes]) -> QuotaLease | None:
        """A lease on the quota of the caller with these headers; None if it has no quota. Nothing is reserved yet."""
        quota = self._access.caller(headers).quota
        return None if quota is None else QuotaLease(quota, self.telemetry.metrics.limited)

    def quota_lease_of(self, exchange: HttpExchange) -> QuotaLease | None:
        lease = exchange.quota_lease
        assert lease is None or isinstance(lease, QuotaLease)
        return lease

    def valid_caller(self, exchange: HttpExchange) -> Caller | None:
        """The caller of an open route; None if a key is required and the request has no valid one."""
        try:
            return self._access.caller(exchange.headers)
        except (Unauthorized, StorageUnavailable):
            return None

    async def model(self, exchange: HttpExchange, name: str) -> ServedModel:
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
