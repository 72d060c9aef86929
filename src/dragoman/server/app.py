"""The ASGI app with all state: models, quotas, stored responses, telemetry."""

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

import msgspec
from sqlalchemy import Connection

from dragoman.config.settings import Settings
from dragoman.core.engine import Engine
from dragoman.core.errors import NotSupported, StorageUnavailable, Unauthorized
from dragoman.core.ids import new_id
from dragoman.models import Catalog, EngineFactory, ServedModel
from dragoman.protocols.models import ReloadResult
from dragoman.protocols.usage import day_of
from dragoman.server.auth.access import Authenticator
from dragoman.server.auth.admin_token import ADMIN_TOKEN_HEADER, has_token
from dragoman.server.auth.callers import Caller, QuotaLease, SavedCaller
from dragoman.server.background import BackgroundResponses
from dragoman.server.base_app import RESPONSES_PATH, BaseApp, Route, RouteTable
from dragoman.server.batches.line_jobs import JobPool
from dragoman.server.batches.results import ResultWriter
from dragoman.server.batches.runner import BatchRunner
from dragoman.server.http_exchange import HttpExchange
from dragoman.server.model_lease import LocalModelLease
from dragoman.server.telemetry.recorder import TelemetryRecorder, without_secrets
from dragoman.storage.batches import BatchStore
from dragoman.storage.blobs import open_blobs
from dragoman.storage.budgets import first_day
from dragoman.storage.conversations import ConversationStore
from dragoman.storage.database import Database
from dragoman.storage.files import EXPIRY_SECONDS, SWEEP_SECONDS, FileStore
from dragoman.storage.key_uses import WRITE_SECONDS as KEY_USES_SECONDS
from dragoman.storage.keys import store_path
from dragoman.storage.ledger import Ledger
from dragoman.storage.ledger_sql import read_owners
from dragoman.storage.maintenance import Maintenance
from dragoman.storage.responses import EXPIRY_SECONDS as RESPONSE_EXPIRY_SECONDS
from dragoman.storage.responses import ResponseStore
from dragoman.storage.servers import DEAD_SECONDS, HEARTBEAT_SECONDS
from dragoman.storage.space import SpaceLimit

log = logging.getLogger("dragoman")

SettingsLoader = Callable[[], Settings]
StructT = TypeVar("StructT", bound=msgspec.Struct)
T = TypeVar("T")
LEDGER_EXPIRY_SECONDS = 3600.0
"""How often expired entries of the ledger are deleted."""

FIXED = ("host", "port", "socket", "tls", "event_log", "record", "storage", "grace_seconds", "workers", "protocols")
FIXED_TELEMETRY = ("log_format", "log_level", "log_requests", "metrics_by_principal", "traces")
FIXED_LIMITS = (
    *("header_bytes", "body_seconds", "write_seconds", "keepalive_seconds", "stall_seconds", "batch_lines"),
    *("kept_responses", "kept_bytes", "kept_seconds"),
)
"""Settings that change only with a restart."""


def _keep_fixed_settings(loaded: Settings, initial: Settings) -> tuple[Settings, tuple[str, ...]]:
    """The loaded settings with the initial values of those that change only with a restart, and the names of those that
    were changed."""
    changed: list[str] = []

    def keep(section: str, new: StructT, old: StructT, names: Sequence[str]) -> StructT:
        changed.extend(f"{section}{name}" for name in names if getattr(new, name) != getattr(old, name))
        return msgspec.structs.replace(new, **{name: getattr(old, name) for name in names})

    settings = keep("", loaded, initial, FIXED)
    telemetry = keep("telemetry.", loaded.telemetry, initial.telemetry, FIXED_TELEMETRY)
    limits = keep("limits.", loaded.limits, initial.limits, FIXED_LIMITS)
    return msgspec.structs.replace(settings, telemetry=telemetry, limits=limits), tuple(changed)


class App(BaseApp):
    telemetry: TelemetryRecorder
    responses: ResponseStore
    background: BackgroundResponses
    files: FileStore
    batches: BatchStore

    def __init__(
        self,
        routes: "RouteTable[App]",
        settings: Settings,
        engines: Sequence[Engine] = (),
        reload_settings: SettingsLoader | None = None,
        engine_factory: EngineFactory | None = None,
    ) -> None:
        """`reload_settings` loads the settings again; `engine_factory` makes engines that run elsewhere."""
        self.catalog = Catalog(settings, engines, engine_factory)
        super().__init__(routes, settings, TelemetryRecorder(settings.telemetry, settings.event_log))
        self.database = Database(settings.storage.address)
        self.ledger = self.telemetry.ledger = Ledger(self.database, settings, self.telemetry.metrics.limited)
        self.blobs = open_blobs(settings.storage)
        space = SpaceLimit(self.database, settings.storage.principal_bytes)
        self.files = FileStore(self.database, self.blobs, settings.storage.keep.files, space)
        self.batches = BatchStore(self.database, self.files, settings.storage.keep.batches)
        limits = settings.limits
        pool = JobPool(self, self.batches, self.blobs, self.telemetry.metrics, limits.batch_lines)
        writer = ResultWriter(self.batches, self.files, self.blobs)
        self.batch_runner = BatchRunner(pool, writer, limits.body_bytes)
        self.batches.on_change = self.batch_runner.wake
        self.maintenance = Maintenance()
        if self.database.is_shared:
            self.maintenance.add(self.database.renew_heartbeat, HEARTBEAT_SECONDS)
        self.maintenance.add(self.ledger.close_lost, DEAD_SECONDS)
        self.maintenance.add(self.ledger.delete_expired, LEDGER_EXPIRY_SECONDS)
        self.maintenance.add(self.files.remove_expired, EXPIRY_SECONDS)
        self.maintenance.add(self.files.sweep, SWEEP_SECONDS)
        self.maintenance.add(self._write_key_uses, KEY_USES_SECONDS)
        self.responses = store = ResponseStore(self.database, settings, space)
        bounds = store.bounds, settings.limits.body_bytes
        self.conversations = ConversationStore(self.database, store.keep_seconds, *bounds, space)
        self.background = BackgroundResponses(self, store, RESPONSES_PATH)
        self.maintenance.add(store.remove_expired, RESPONSE_EXPIRY_SECONDS)
        self.maintenance.add(self.conversations.remove_unused, RESPONSE_EXPIRY_SECONDS)
        self.maintenance.add(self.background.resume, DEAD_SECONDS)
        self.maintenance.add(self.batches.remove_expired, EXPIRY_SECONDS)
        self.created = int(time.time())
        self.started = time.monotonic()
        self.admin_token = secrets.token_urlsafe(32)
        """If no keys are configured, `/admin` requires it in the header X-Dragoman-Admin-Token."""
        self._is_stopped = False
        self._restoring: asyncio.Task[None] | None = None
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
            settings, restart_needed = _keep_fixed_settings(loaded, self._initial_settings)
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
                restart_needed=restart_needed,
            )
            log.info("the configuration was read again; models: %s", ", ".join(after) or "none")
        return result

    def _reconfigure(self, settings: Settings) -> None:
        self.catalog.reconfigure(settings)
        self.ledger.configure(settings)
        self.batch_runner.max_line = self.conversations.most = settings.limits.body_bytes

    def _enter_quota(self, exchange: HttpExchange, route: "Route[App] | None") -> None:
        quota = exchange.caller.quota
        if quota is not None and exchange.method == "POST":
            exchange.response.quota_lease = lease = QuotaLease(quota, self.telemetry.metrics.limited)
            lease.enter()

    def _answer(self, exchange: HttpExchange, route: "Route[App]") -> Awaitable[None]:
        if exchange.record.scope == "admin":
            self._check_operator(exchange)
        return route.handler(self, exchange)

    def _check_operator(self, exchange: HttpExchange) -> None:
        """Require the admin token if no key is needed. The scope of a key has been checked already."""
        if exchange.caller.needs_admin_token and not has_token(exchange.headers, self.admin_token):
            raise Unauthorized(
                "this route needs a key with the scope admin. As no keys are configured, it also accepts the header "
                f"{ADMIN_TOKEN_HEADER} with the token from the run directory of the server's home. "
                "`dragoman models` and `dragoman drain` send it."
            )

    def model_lease(self, exchange: HttpExchange) -> LocalModelLease:
        lease = exchange.response.quota_lease
        assert lease is None or isinstance(lease, QuotaLease)
        # A batch was admitted when it was created.
        is_admitted = exchange.job is not None and exchange.job.is_batch
        return LocalModelLease(self.catalog, exchange.caller, lease, self.ledger, exchange.record.id, is_admitted)

    def quota_lease_for(self, headers: Mapping[bytes, bytes]) -> QuotaLease | None:
        """A lease on the quota of the caller with these headers; None if it has no quota. Nothing is reserved yet."""
        quota = self._authenticator.authenticate(headers).quota
        return None if quota is None else QuotaLease(quota, self.telemetry.metrics.limited)

    def valid_caller(self, exchange: HttpExchange) -> Caller | None:
        """The caller of an open route; None if a key is required and the request has no valid one."""
        try:
            return self._authenticator.authenticate(exchange.headers)
        except (Unauthorized, StorageUnavailable):
            return None

    async def model(self, exchange: HttpExchange, name: str) -> ServedModel:
        """Find the model with this name, and check that the caller may use it."""
        lease = self.model_lease(exchange)
        try:
            return await lease.resolve(name)
        finally:
            exchange.record.model = lease.label

    def restore_caller(self, saved: SavedCaller) -> Caller:
        """The caller of a stored job. Raises Unauthorized if its key is no longer valid."""
        return self._authenticator.restore(saved)

    async def check_model(self, caller: Caller, name: str) -> None:
        """Raise an error if there is no such model, or if the caller may not use it."""
        await LocalModelLease(self.catalog, caller, None, None, "").resolve(name)

    async def read_usage(self, read: Callable[[Connection, Authenticator], T]) -> T:
        """Read the ledger, including the requests that have just ended."""
        self._authenticator.refresh()
        await self.ledger.flush()
        return await self.database.read(lambda connection: read(connection, self._authenticator))

    async def _restore_limits(self) -> None:
        """Count what keys used in the last minute before this server started, and of budgets that warn."""
        first = first_day(day_of(time.time()))
        try:
            recent = await self.ledger.read_recent()
            await self.ledger.restore_warnings(lambda found: self._authenticator.owners(read_owners(found, first)))
        except StorageUnavailable:
            # The database has logged the reason.
            return
        self._authenticator.restore_rates(recent, time.time())

    async def _write_key_uses(self) -> None:
        await asyncio.to_thread(self.telemetry.key_uses.write, store_path(self.settings.keys))

    def new_request_id(self, path: str) -> str:
        """The id of a job that posts to a path."""
        return new_id(self.routes.paths[path]["POST"].id_prefix)

    def start(self) -> None:
        super().start()
        if self.settings.record is not None:
            log.warning("requests and replies are recorded in %s, prompts included", self.settings.record)
        self.maintenance.start()
        self.batch_runner.start()
        self._restoring = asyncio.get_running_loop().create_task(self._restore_limits())
        self.telemetry.events.start(
            {"models": self.catalog.describe_models(), "config": without_secrets(self.settings)}
        )

    async def finish_jobs(self, grace_seconds: float, forced: asyncio.Event | None = None) -> None:
        """Begin no further jobs. Running ones have the grace time, unless the stop is forced."""
        forced = forced or asyncio.Event()
        await asyncio.gather(self.batch_runner.stop(grace_seconds, forced), self.background.stop(grace_seconds, forced))

    async def stop(self) -> None:
        if self._is_stopped:
            return
        self._is_stopped = True
        self.stop_requests()
        await self.finish_jobs(0)
        await self.tasks.finish()
        await self.catalog.stop()
        await self.maintenance.stop()
        await self._write_key_uses()
        await self.ledger.stop()
        await asyncio.to_thread(self.database.close)
        await asyncio.to_thread(self.blobs.close)
        self._authenticator.close()
        await self._close_recording()
        self.telemetry.close()
