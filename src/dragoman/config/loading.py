"""What the operator wants: file, environment, flags.

    file     := --config, or $DRAGOMAN_CONFIG, or ./dragoman.yaml if there is one (JSON is YAML)
    models   := name: source
              | name: {engine: llama, source or path: SOURCE, sampling, keep_alive, fallback, ray,
                       ...the engine's own options}
    adapters := name: PATH | name: {path: PATH, scale: NUMBER}      an option of llama; each is a model too
    aliases  := pattern: name              `gpt-*: smollm2`
    default, models_dir, memory, keep_alive, turn_seconds, layout,
    host, port, socket, api_keys, strict, event_log, hosts, proxies, limits, workers, grace_seconds, drain_seconds
    keys, telemetry, cors, tls             sections of their own, see `operation`

Rules
1. A flag wins over the environment, the environment over the file.
2. Nothing configured means the built-in model `smollm2`.
3. A mistake is one line with the file, the line and the key. Unknown keys are mistakes. All mistakes are told together.
4. A relative path in a file starts from the folder of that file.

    file.py        a file as values and lines; what is wrong in it
    forms.py       what some texts must look like
    doubts.py      what is no mistake, and hardly meant
    places.py      where a setting was written
    models.py      one entry of `models:`
    paths.py       paths in a file
    quantities.py  sizes and times
    replicas.py    how many of a model there are under Ray
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from dragoman.config.config_file import File, read
from dragoman.config.locations import Places
from dragoman.config.model_spec import MODEL_NAME, ModelSpec, flagged, read_models
from dragoman.config.paths import keys_located, located, tls_located
from dragoman.config.quantities import duration, size
from dragoman.config.sections import Tls, network
from dragoman.config.settings import Settings
from dragoman.config.validators import wrong_forms
from dragoman.core.errors import ConfigError
from dragoman.files.discovery import names_in
from dragoman.files.sources import BUILT_IN, is_path, own_name

FILE_NAME = "dragoman.yaml"
ALIAS_NAME = re.compile(r"(?!/)(?!.*\.\.)[A-Za-z0-9._:/*?-]+")

T = TypeVar("T")


class Flags(msgspec.Struct, frozen=True):
    """What the command line says; None and empty mean that it does not."""

    models: Sequence[str] = ()
    engine: str | None = None
    """Of all these models; None: by what their sources are."""
    aliases: Sequence[str] = ()
    default: str | None = None
    models_dir: Sequence[str] = ()
    memory: str | None = None
    keep_alive: str | None = None
    host: str | None = None
    port: int | None = None
    api_keys: Sequence[str] = ()
    strict: bool = False
    event_log: str | None = None
    workers: int | None = None
    socket: str | None = None
    tls_certificate: str | None = None
    tls_key: str | None = None
    anonymous: bool = False
    layout: Literal["auto", "as-is"] | None = None
    """Of the models that llama.cpp runs."""

    @property
    def keys(self) -> frozenset[str]:
        """What they give, as a file would call it."""
        given = {
            "models_dir": self.models_dir,
            "host": self.host,
            "event_log": self.event_log,
            "socket": self.socket,
            "tls": self.tls_certificate,
        }
        models = (f"models.{_name_and_source(flag)[0]}" for flag in self.models)
        return frozenset([*(key for key, value in given.items() if value), *models])


class Loaded(msgspec.Struct, frozen=True):
    """Settings, and where they were written."""

    settings: Settings
    places: Places


def load_settings(
    path: str | None, flags: Flags, environ: Mapping[str, str], *, offered: Sequence[str] = ()
) -> Settings:
    return load(path, flags, environ, offered=offered).settings


def load(path: str | None, flags: Flags, environ: Mapping[str, str], *, offered: Sequence[str] = ()) -> Loaded:
    """`offered` are models of engines that the caller brings along; they need no entry anywhere."""
    file = read(path or environ.get("DRAGOMAN_CONFIG") or (FILE_NAME if Path(FILE_NAME).is_file() else None))
    reading = _Reading(file, flags)
    models = read_models(file) | reading.flags("--model", flags.models, partial(_model_flag, flags.engine))
    settings = reading.settings()
    by_flag = reading.flags("--alias", flags.aliases, _alias_flag)
    if flags.port is not None and not 0 <= flags.port <= 65535:
        reading.note(f"--port {flags.port}: expected a number from 0 to 65535")
    if flags.workers is not None and flags.workers < 1:
        reading.note(f"--workers {flags.workers}: expected a number from 1")
    memory, keep_alive = (
        reading.flag("--memory", flags.memory, size),
        reading.flag("--keep-alive", flags.keep_alive, duration),
    )
    folders = tuple(flags.models_dir) or settings.models_dir
    if folders is None and offered:
        # Who serves an engine of their own does not expect others beside it.
        folders = ()
    if not models and not offered and not folders:
        models = {"smollm2": ModelSpec("smollm2", "llama", "smollm2")}
    models = {name: _laid_out(model, flags.layout, settings.layout) for name, model in models.items()}
    key = environ.get("DRAGOMAN_API_KEY")
    result = msgspec.structs.replace(
        settings,
        models=tuple(models.values()),
        aliases=by_flag | {pattern: name for pattern, name in reading.aliases().items() if pattern not in by_flag},
        default=flags.default or settings.default,
        models_dir=folders,
        memory=memory or settings.memory,
        keep_alive=settings.keep_alive if keep_alive is None else keep_alive,
        layout=flags.layout or settings.layout,
        host=flags.host or settings.host,
        port=settings.port if flags.port is None else flags.port,
        api_keys=tuple(flags.api_keys) or ((key,) if key else settings.api_keys),
        strict=flags.strict or settings.strict,
        event_log=flags.event_log or settings.event_log,
        workers=flags.workers or settings.workers,
        socket=flags.socket or settings.socket,
        keys=msgspec.structs.replace(settings.keys, anonymous=True) if flags.anonymous else settings.keys,
        tls=reading.tls_flags() or settings.tls,
    )
    reading.check_names(result, offered, by_flag)
    reading.end()
    return Loaded(result, Places(file.name, file.lines, flags.keys))


def _model_flag(engine: str | None, flag: str) -> tuple[str, ModelSpec]:
    name, source = _name_and_source(flag)
    if not name or not source:
        raise ConfigError(f"expected NAME=SOURCE, a path, or a built-in name ({', '.join(BUILT_IN)})")
    if not MODEL_NAME.fullmatch(name):
        raise ConfigError(f"{name!r} cannot be the name of a model: give NAME=SOURCE")
    return name, flagged(name, source, engine)


def _name_and_source(flag: str) -> tuple[str, str]:
    name, equals, source = flag.partition("=")
    # A path, a version or a hash may have one of its own.
    is_named = equals and MODEL_NAME.fullmatch(name) and is_path(flag) and not Path(flag).exists()
    return (name, source) if is_named else (own_name(flag) or "", flag)


def _laid_out(model: ModelSpec, by_flag: str | None, otherwise: str) -> ModelSpec:
    layout = by_flag or model.options.get("layout", otherwise)
    if model.engine != "llama" or layout == model.options.get("layout", "auto"):
        return model
    return msgspec.structs.replace(model, options={**model.options, "layout": layout})


def _alias_flag(flag: str) -> tuple[str, str]:
    pattern, _, name = flag.partition("=")
    if not name or not ALIAS_NAME.fullmatch(pattern):
        raise ConfigError("expected PATTERN=NAME, as in 'gpt-*=smollm2'")
    return pattern, name


class _Reading:
    """What the file and the flags say, and what is wrong in them."""

    def __init__(self, file: File, flags: Flags) -> None:
        self._file = file
        self._flags = flags
        self._mistakes: list[str] = []

    def note(self, words: str) -> None:
        self._mistakes.append(words)

    def end(self) -> None:
        mistakes = self._file.mistakes + self._mistakes
        if mistakes:
            raise ConfigError(*mistakes)

    def flag(self, name: str, value: str | None, parse: Callable[[str], T]) -> T | None:
        if value is None:
            return None
        try:
            return parse(value)
        except ConfigError as error:
            self.note(f"{name} {value}: {error}")
            return None

    def flags(self, name: str, values: Iterable[str], parse: Callable[[str], tuple[str, T]]) -> dict[str, T]:
        return dict(pair for value in values if (pair := self.flag(name, value, parse)) is not None)

    def settings(self) -> Settings:
        """Those of the file, but for models and aliases."""
        file = self._file
        given = {name: value for name, value in file.values.items() if name not in ("models", "aliases")}
        given["memory"] = file.parsed(given, "memory", size)
        given["keep_alive"] = file.parsed(given, "keep_alive", duration)
        given["models_dir"] = self._folders()
        plain = {name: value for name, value in given.items() if value is not None}
        settings = msgspec.convert(file.section(plain, Settings), Settings)
        for at, entry in enumerate(settings.proxies):
            self._check_proxy(entry, f"proxies[{at}]")
        for mistake in wrong_forms(settings):
            file.note(mistake.key, mistake.words)
        return self._from_here(settings)

    def _check_proxy(self, entry: str, key: str) -> None:
        try:
            network(entry)
        except ConfigError as error:
            self._file.note(key, str(error))

    def _from_here(self, settings: Settings) -> Settings:
        folder = self._file.folder
        return msgspec.structs.replace(
            settings,
            event_log=None if settings.event_log is None else located(settings.event_log, folder),
            socket=None if settings.socket is None else located(settings.socket, folder),
            keys=keys_located(settings.keys, folder),
            tls=tls_located(settings.tls, folder),
        )

    def tls_flags(self) -> Tls | None:
        certificate, key = self._flags.tls_certificate, self._flags.tls_key
        if certificate and key:
            return Tls(certificate, key)
        if certificate or key:
            self.note("--tls-certificate and --tls-key belong together: give both")
        return None

    def _folders(self) -> list[Any] | None:
        """One may be written without the list."""
        given = self._file.values.get("models_dir")
        if given is None or not isinstance(given, str | list):
            return given
        folders = [given] if isinstance(given, str) else given
        return [self._file.from_here(folder) if isinstance(folder, str) and folder else folder for folder in folders]

    def aliases(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for pattern, name in self._file.mapping(self._file.values, "aliases").items():
            other = next((other for other in found if other.lower() == pattern.lower()), None)
            if other is not None:
                self._file.note(f"aliases.{pattern}", f"{other} is the same alias but for its case")
            elif not ALIAS_NAME.fullmatch(pattern):
                self._file.note(f"aliases.{pattern}", "an alias has letters, digits and . _ - : / * ? only")
            elif self._file.convert(name, str, f"aliases.{pattern}") is not None:
                found[pattern] = name
        return found

    def check_names(self, settings: Settings, offered: Sequence[str], by_flag: Mapping[str, str]) -> None:
        """Aliases and the default name models that there are. Upper and lower case are the same here."""
        names = [*(name for model in settings.models for name in model.names), *offered]
        known = {name.lower() for name in names}

        def unknown(name: str) -> str | None:
            is_open = any(model.has(name) for model in settings.models)
            if is_open or name.lower() in known or name.lower() in names_in(settings.folders):
                return None
            return f"no model is called {name!r}; models: {', '.join(names) or 'none'}"

        for pattern, name in settings.aliases.items():
            wrong = "a model has this name already" if pattern.lower() in known else unknown(name)
            if wrong is not None and pattern in by_flag:
                self.note(f"--alias {pattern}={name}: {wrong}")
            elif wrong is not None:
                self._file.note(f"aliases.{pattern}", wrong)
        for model in settings.models:
            wrong = None if model.fallback is None else unknown(model.fallback) or _circle(model, settings.models)
            if wrong is not None:
                self._file.note(f"models.{model.name}.fallback", wrong)
        wrong = None if settings.default is None else unknown(settings.default)
        if wrong is not None and self._flags.default:
            self.note(f"--default: {wrong}")
        elif wrong is not None:
            self._file.note("default", wrong)


def _circle(model: ModelSpec, models: Sequence[ModelSpec]) -> str | None:
    """What is wrong where a model would end up answering for itself; of a circle the first model is told."""
    specs = {name.lower(): spec for spec in models for name in spec.names}
    way = [model]
    while (fallback := way[-1].fallback) is not None:
        after = specs.get(fallback.lower()) or next((spec for spec in models if spec.has(fallback)), None)
        if after is None or after in way[1:]:
            return None  # a file, which has none; or the circle is that of others, who are told
        way.append(after)
        if after is model:
            first = next(spec for spec in models if spec in way)
            return f"a circle: {' -> '.join(spec.name for spec in way)}" if first is model else None
    return None
