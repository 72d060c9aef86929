"""Maps model names to hosts.

    name -> trimmed, lower case; an empty name means the default model
         -> a configured model
         -> NAME/MODEL, where NAME is a configured model that stands for all models of a server
         -> an alias (exact, then the most specific matching pattern) of whatever a request may name
         -> NAME:latest, where NAME is a configured model
         -> a model in the models folder, by its name or its architecture (see `discovery`)
         -> 404, with similar names

Rules
1. A name is never used as a path.
2. An engine is loaded once; concurrent requests wait for the same load.
3. Models with the same file and options share an engine, its slots and its queue.
4. Before a model is loaded, its configuration and its file describe it.
5. A new configuration leaves unchanged models and running requests alone.
"""

import asyncio
import difflib
import logging
import math
import re
import time
from collections.abc import Iterator, Sequence
from functools import partial

from dragoman.config.aliases import AliasTable
from dragoman.config.model_spec import ModelSpec
from dragoman.config.settings import Settings
from dragoman.core.engine import Engine, ModelInfo, ask_models, check_engine, check_engine_class, known_models
from dragoman.core.errors import BadRequest, ConfigError, ModelNotFound, NotSupported
from dragoman.engines import DEFAULT_ENGINE, DIRECTORY_ENGINE, engine_class
from dragoman.files.discovery import DiscoveredModel, Discovery
from dragoman.models.engine_loader import EngineFactory, OnEngineLost, local_engine
from dragoman.models.lifecycle import Lifecycle
from dragoman.models.model_host import ModelHost
from dragoman.models.residency import NOT_CONFIGURED, LimitsChanged, ModelRemoved
from dragoman.models.served_model import ServedModel

log = logging.getLogger("dragoman.models")

MAX_NAME_LENGTH = 200
LOOK_SECONDS = 2.0
"""The folders are scanned at most this often."""
EMBEDDING = "embed"
"""Part of the names of embedding models, such as text-embedding-3-small."""
ALIAS = re.compile(r"[\w.:/@+-]{1,100}", re.ASCII)
"""A name that an error suggests as an alias."""
MAX_LISTED = 20
"""Names in an error message."""


class Catalog:
    def __init__(
        self, settings: Settings, engines: Sequence[Engine] = (), engine_factory: EngineFactory | None = None
    ) -> None:
        self._engine_factory = engine_factory or local_engine
        self.lifecycle = Lifecycle(settings.memory, settings.turn_seconds)
        self.models: dict[str, ServedModel] = {}
        """Configured models, by lower-case name."""
        self._settings = settings
        self._folder_models: dict[str, ServedModel] = {}
        """Models in the models folder, by path."""
        self._configured_paths: dict[str, str] = {}
        """Lower-case names of configured models, by the path of their file."""
        self._scanned_at = -math.inf
        self._scan_task: asyncio.Task[None] | None = None
        self._reported_paths: set[str] = set()
        """Damaged files in the models folder that the log has named."""
        self._own_engines = [(engine, self._add_own_engine(engine, settings)) for engine in engines]
        self._own_names: list[str] = []
        self._set_own_models([(host, known_models(engine)) for engine, host in self._own_engines])
        names = [info.name.lower() for engine in engines for info in known_models(engine)]
        if len(self._own_names) < len(names):
            raise ConfigError(f"two models are called {next(name for name in names if names.count(name) > 1)!r}")
        self.reconfigure(settings)

    def _add_own_engine(self, engine: Engine, settings: Settings) -> ModelHost:
        """Add an engine passed by the caller; it stays under every configuration."""
        check_engine(engine)
        check_engine_class(type(engine))
        infos = known_models(engine)

        async def build(on_lost: OnEngineLost) -> Engine:
            return engine

        key = self.lifecycle.new_key(infos[0].name if infos else type(engine).__name__)
        host = ModelHost(key, build, self.lifecycle, settings.limits, engine.slots)
        self.lifecycle.add(host, math.inf, is_pinned=True)
        return host

    def _set_own_models(self, listed: Sequence[tuple[ModelHost, Sequence[ModelInfo]]]) -> bool:
        """Serve the models that the caller's engines list now. Return whether they have changed."""
        others = {name: model for name, model in self.models.items() if name not in self._own_names}
        own: dict[str, ServedModel] = {}
        for host, infos in listed:
            for info in infos:
                name, known = info.name.lower(), self.models.get(info.name.lower())
                if name not in others and name not in own:
                    is_same = known is not None and known.name == info.name and known.host is host
                    own[name] = known if known is not None and is_same else ServedModel(info.name, host)
                    own[name].listed = info
        is_changed = own != {name: self.models[name] for name in self._own_names}
        self._own_names, self.models = list(own), own | others
        return is_changed

    async def refresh(self) -> bool:
        """Ask the caller's engines for their models again. Return whether they have changed."""
        listed = []
        for engine, host in self._own_engines:
            try:
                if not host.is_known and not known_models(engine):
                    # An engine that needs its model to know the names.
                    await host.ready()
                listed.append((host, await ask_models(engine)))
            except Exception:
                log.exception("model %s: `models` failed; its last answer stays", host.key)
                return False
        return self._set_own_models(listed)

    def reconfigure(self, settings: Settings) -> None:
        """Apply new settings. Unchanged models keep their hosts, loaded or not."""
        # The check comes first: a mistake must change nothing.
        seen: set[str] = set()
        for name in [*self._own_names, *(name for spec in settings.models for name in spec.names)]:
            if name.lower() in seen:
                raise ConfigError(f"two models are called {name!r}")
            seen.add(name.lower())
        self.lifecycle.feed(LimitsChanged(settings.memory, settings.turn_seconds))
        old_models = {name: model for name, model in self.models.items() if name not in self._own_names}
        self.models = {name: model for name, model in self.models.items() if name in self._own_names}
        for spec in settings.models:
            own = old_models.get(spec.name.lower())
            host = self._host_for(spec, settings, *self.models.values(), *([own] if own else []), *old_models.values())
            self.models |= {name.lower(): ServedModel(name, host, spec) for name in spec.names}
        old_folder_models, folder_models = self._folder_models, {}
        for path, model in old_folder_models.items():
            assert model.found is not None
            spec = _folder_spec(model.found, settings)
            host = self._host_for(spec, settings, model)
            folder_models[path] = ServedModel(spec.name, host, spec, model.found)
        self._folder_models = folder_models
        remaining = {model.host.key for model in (*self.models.values(), *self._folder_models.values())}
        for model in {model.host.key: model for model in (*old_models.values(), *old_folder_models.values())}.values():
            if model.host.key not in remaining:
                is_changed = model.found is not None or model.name.lower() in self.models
                reason = "its configuration has changed" if is_changed else NOT_CONFIGURED
                self.lifecycle.feed(ModelRemoved(model.host.key, reason))
        self._settings = settings
        self._aliases = AliasTable(settings.aliases)
        self.discovery = Discovery(settings.folders)
        self._scanned_at = -math.inf

    def _host_for(self, spec: ModelSpec, settings: Settings, *known: ServedModel) -> ModelHost:
        """Return the host of the first known model that the engine of this one can also serve, otherwise a new host."""
        keep_alive = settings.keep_alive if spec.keep_alive is None else spec.keep_alive
        old = next((old for old in known if old.spec is not None and old.spec.can_share_engine(spec)), None)
        if old is not None:
            host = old.host
            if self.models.get(old.name.lower()) is old:
                # Two names of this configuration: the engine stays as long as either of them asks for.
                keep_alive = max(keep_alive, self.lifecycle.residency_of(host).keep_alive)
            else:
                host.spec = spec
            host.set_limits(settings.limits)
            host.failures.reset_pause()
        else:
            slots = spec.options.get("slots")
            host = ModelHost(
                self.lifecycle.new_key(spec.name),
                partial(self._engine_factory, spec, settings.limits),
                self.lifecycle,
                settings.limits,
                slots if isinstance(slots, int) else None,
                spec,
            )
        self.lifecycle.add(host, keep_alive)
        return host

    @property
    def default(self) -> str | None:
        """The model for requests without a model name."""
        name = self._settings.default or next((model.name for model in self.models.values()), None)
        return name or next((found.name for found in self._runnable()), None)

    def resolve(self, name: str) -> ServedModel:
        """Return the model for a name, using the last scan of the folders."""
        key = name.strip().lower() or (self.default or "").lower()
        if len(key) <= MAX_NAME_LENGTH:
            model = self._lookup(key)
            if model is not None:
                return model
        raise ModelNotFound(self._not_found_message(name.strip() or self.default or ""), param="model")

    def fallbacks(self, model: ServedModel) -> Iterator[ServedModel]:
        """Yield the chain of fallback models, up to the first one that is missing."""
        while model.spec is not None and model.spec.fallback is not None:
            try:
                model = self.resolve(model.spec.fallback)
            except (ModelNotFound, NotSupported):
                return
            yield model

    async def find_requested(self, name: str) -> ServedModel:
        """Return the model that a request names. The settings may refuse a request that names none."""
        if self._settings.require_model and not name.strip():
            raise BadRequest("model: required, but missing; GET /v1/models lists the models", param="model")
        return await self.find(name)

    async def find(self, name: str) -> ServedModel:
        """Return the model for a name; ask the engines and scan the folders again if it is unknown."""
        try:
            return self.resolve(name)
        except ModelNotFound:
            if self._own_engines:
                await self.refresh()
            await self.scan()
            if EMBEDDING in name.lower():
                # The error suggests an embedding model.
                await asyncio.gather(*(model.static_info() for model in self.list_models()))
            return self.resolve(name)

    async def scan(self) -> None:
        """Scan the folders, unless the last scan is recent."""
        if time.monotonic() - self._scanned_at < LOOK_SECONDS:
            return
        if self._scan_task is None:
            self._scan_task = asyncio.create_task(self._scan())
        await asyncio.shield(self._scan_task)

    async def _scan(self) -> None:
        try:
            is_stale = True
            while is_stale:
                discovery = self.discovery
                paths = await asyncio.to_thread(scan_folders, discovery, self._settings.models)
                # A new configuration may have replaced the folders during the scan.
                is_stale = discovery is not self.discovery
            self._configured_paths = paths
            self._scanned_at = time.monotonic()
            self._report_problems()
            current = {found.path for found in self.discovery.found.values()} - set(paths)
            for path in [path for path in self._folder_models if path not in current]:
                host = self._folder_models.pop(path).host
                self.lifecycle.feed(ModelRemoved(host.key, "its file has left the models folder"))
        finally:
            self._scan_task = None

    def _report_problems(self) -> None:
        """Log each damaged file once. Those that the configuration names are reported before the start."""
        found = self.discovery.problems
        problems = {path: problem for path, problem in found.items() if path not in self._configured_paths}
        for path, problem in problems.items():
            if path not in self._reported_paths:
                log.warning("not served: %s", problem)
        self._reported_paths = set(problems)

    def describe_models(self) -> list[dict[str, str]]:
        """Return each model with its engine and its device, as far as they are known before it is loaded."""
        engines = {host.key: engine for engine, host in self._own_engines}
        described = []
        for model in self.models.values():
            if model.spec is None:
                own = engines[model.host.key]
                engine, device = type(own).__name__, own.device
            else:
                engine, device = model.spec.engine, engine_class(model.spec.engine).device
            described.append({"name": model.name, "engine": engine, "device": device})
        return described

    def list_models(self) -> list[ServedModel]:
        """Return all models that can be requested, configured ones first."""
        known = list(self.models.values())
        for found in self._runnable():
            if (model := self._folder_model(found)) not in known:
                known.append(model)
        return known

    def _runnable(self) -> Iterator[DiscoveredModel]:
        """Yield the models of the folders that an installed engine can run."""
        return (found for found in self.discovery.found.values() if _engine_for(found) is not None)

    def _lookup(self, key: str, aliases: tuple[str, ...] = ()) -> ServedModel | None:
        """Return the model for a name in lower case. `aliases` led to it."""
        if (model := self._find_configured(key)) is not None:
            return model
        target = None if key in aliases else self._aliases.resolve(key)
        if target is not None and (model := self._lookup(target.lower(), (*aliases, key))) is not None:
            return model
        base, _, tag = key.rpartition(":")
        if tag == "latest" and (model := self._find_configured(base)) is not None:
            return model
        return self._find_in_folder(key)

    def _find_configured(self, key: str) -> ServedModel | None:
        if key in self.models:
            return self.models[key]
        for model in self.models.values():
            if model.spec is not None and model.spec.includes(key):
                return model.member(key)
        return None

    def _find_in_folder(self, key: str) -> ServedModel | None:
        found = self.discovery.resolve(key)
        return None if found is None else self._folder_model(found)

    def _folder_model(self, found: DiscoveredModel) -> ServedModel:
        """Return the model of a file; the configured one if the configuration names the file."""
        if self._configured_paths.get(found.path) in self.models:
            return self.models[self._configured_paths[found.path]]
        if found.path not in self._folder_models:
            spec = _folder_spec(found, self._settings)
            host = self._host_for(spec, self._settings)
            self._folder_models[found.path] = ServedModel(found.name, host, spec, found)
        return self._folder_models[found.path]

    def _not_found_message(self, name: str) -> str:
        shown = name if len(name) <= 100 else name[:100] + "…"
        names = [model.name for model in self.models.values()]
        names += [found.name for found in self._runnable() if found.name not in names]
        same_name = [found.name for found in self.discovery.find_all(name.strip().lower())]
        exact_aliases = [alias for alias in self._aliases.targets if "*" not in alias and "?" not in alias]
        similar = same_name[:MAX_LISTED] or _similar_names(name, [*names, *exact_aliases])
        listed = ", ".join(names[:MAX_LISTED]) + (", …" if len(names) > MAX_LISTED else "")
        message = f"model {shown!r} is not served here; "
        message += f"did you mean {' or '.join(similar)}? " if similar else ""
        message += f"models: {listed or 'none'} (aliases: {', '.join(self._aliases.targets) or 'none'})."
        target = next(iter(names), None) if self.default == name else self.default
        if same_name:
            target = same_name[0]
        elif EMBEDDING in name.lower():
            target = next((model.name for model in self.list_models() if model.is_embedding_model), target)
        pattern = name if ALIAS.fullmatch(name) else "NAME"
        return f"{message} Start with --alias '{pattern}={target}' to map it." if target else message

    async def stop(self) -> None:
        if self._scan_task is not None:
            self._scan_task.cancel()
        await self.lifecycle.stop()


def _similar_names(name: str, names: Sequence[str]) -> list[str]:
    by_lower = {known.lower(): known for known in names}
    key = name.strip().lower()[:MAX_NAME_LENGTH]
    return [by_lower[match] for match in difflib.get_close_matches(key, by_lower, n=3, cutoff=0.6)]


def _engine_for(found: DiscoveredModel) -> str | None:
    if found.kind == "gguf":
        return DEFAULT_ENGINE
    return DIRECTORY_ENGINE if engine_class(DIRECTORY_ENGINE).is_installed() else None


def _folder_spec(found: DiscoveredModel, settings: Settings) -> ModelSpec:
    """Build the spec of a model that is not configured."""
    engine = _engine_for(found)
    if engine is None:
        raise NotSupported(
            f"model '{found.name}' is a folder of {found.architecture or 'weights'}, which no installed engine runs: "
            f"install one with pip install 'dragoman[{DIRECTORY_ENGINE}]', or serve a GGUF file of the model"
        )
    return ModelSpec(found.name, engine, found.path).with_layout(settings.layout)


def scan_folders(discovery: Discovery, specs: Sequence[ModelSpec]) -> dict[str, str]:
    """Scan the folders and return the lower-case names of configured models by the path of their files."""
    discovery.scan()
    paths = {}
    for spec in specs:
        try:
            path = spec.locate()
            if path is not None:
                paths[str(path.resolve())] = spec.name.lower()
        except (ConfigError, OSError):
            # A request for the model reports the error.
            continue
    return paths
