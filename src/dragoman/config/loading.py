"""Loads the settings from the configuration file, the environment and the command-line flags.

    file     := --config, or $DRAGOMAN_CONFIG, or ./dragoman.yaml if there is one (JSON is YAML)
    models   := name: source
              | name: {engine: llama, source or path: SOURCE, sampling, keep_alive, fallback, ray,
                       ...the engine's own options}
    adapters := name: PATH | name: {path: PATH, scale: NUMBER}      an option of llama; each is a model too
    aliases  := pattern: name              `gpt-*: smollm2`
    default, models_dir, memory, keep_alive, turn_seconds, layout,
    host, port, socket, api_keys, strict, event_log, hosts, proxies, limits, workers, grace_seconds, drain_seconds
    keys, telemetry, cors, tls             see `sections`

Rules
1. A flag overrides the environment, the environment overrides the file.
2. Without any configured model, the built-in model `smollm2` is served.
3. An error is one line with the file, the line and the key. Unknown keys are errors. All errors are reported together.
4. A relative path in a file is relative to the directory of that file.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from dragoman.config.config_file import ConfigFile, read_config_file, resolve_path
from dragoman.config.diagnostics import Locations, find_invalid_text
from dragoman.config.model_spec import MODEL_NAME, ModelSpec, model_from_flag, read_models
from dragoman.config.quantities import parse_duration, parse_size
from dragoman.config.sections import Tls, parse_network
from dragoman.config.settings import Settings
from dragoman.core.errors import ConfigError
from dragoman.files.discovery import list_names
from dragoman.files.sources import BUILT_IN, is_path, name_from_source

FILE_NAME = "dragoman.yaml"
ALIAS_NAME = re.compile(r"(?!/)(?!.*\.\.)[A-Za-z0-9._:/*?-]+")

T = TypeVar("T")


class Flags(msgspec.Struct, frozen=True):
    """Values from the command line; None and empty mean that the flag is absent."""

    models: Sequence[str] = ()
    engine: str | None = None
    """The engine of all these models; None means that each source decides."""
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
    """For models of the llama engine."""

    @property
    def keys(self) -> frozenset[str]:
        """The configuration keys that the flags set."""
        values = {
            "models_dir": self.models_dir,
            "host": self.host,
            "event_log": self.event_log,
            "socket": self.socket,
            "tls": self.tls_certificate,
            "layout": self.layout,
        }
        models = (f"models.{_name_and_source(flag)[0]}" for flag in self.models)
        return frozenset([*(key for key, value in values.items() if value), *models])


class LoadedConfig(msgspec.Struct, frozen=True):
    settings: Settings
    locations: Locations


def load_settings(
    path: str | None, flags: Flags, environ: Mapping[str, str], *, offered: Sequence[str] = ()
) -> Settings:
    return load(path, flags, environ, offered=offered).settings


def load(path: str | None, flags: Flags, environ: Mapping[str, str], *, offered: Sequence[str] = ()) -> LoadedConfig:
    """Load the configuration. `offered` are the models of engines that the caller passes; they need no entry."""
    file = read_config_file(
        path or environ.get("DRAGOMAN_CONFIG") or (FILE_NAME if Path(FILE_NAME).is_file() else None)
    )
    loader = _Loader(file, flags)
    models = read_models(file) | loader.parse_flags("--model", flags.models, partial(_parse_model, flags.engine))
    settings = loader.read_settings()
    aliases = loader.parse_flags("--alias", flags.aliases, _parse_alias)
    if flags.port is not None and not 0 <= flags.port <= 65535:
        loader.add_error(f"--port {flags.port}: expected a number from 0 to 65535")
    if flags.workers is not None and flags.workers < 1:
        loader.add_error(f"--workers {flags.workers}: expected a number from 1")
    memory = loader.parse_flag("--memory", flags.memory, parse_size)
    keep_alive = loader.parse_flag("--keep-alive", flags.keep_alive, parse_duration)
    models_dir = tuple(flags.models_dir) or settings.models_dir
    if models_dir is None and offered:
        # A caller that passes its own engine does not expect other models.
        models_dir = ()
    if not models and not offered and not models_dir:
        models = {"smollm2": ModelSpec("smollm2", "llama", "smollm2")}
    models = {name: _with_layout(model, flags.layout, settings.layout) for name, model in models.items()}
    key = environ.get("DRAGOMAN_API_KEY")
    result = msgspec.structs.replace(
        settings,
        models=tuple(models.values()),
        aliases=aliases | {pattern: name for pattern, name in loader.read_aliases().items() if pattern not in aliases},
        default=flags.default or settings.default,
        models_dir=models_dir,
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
        tls=loader.read_tls_flags() or settings.tls,
    )
    loader.check_names(result, offered, aliases)
    loader.raise_errors()
    return LoadedConfig(result, Locations(file.name, file.lines, flags.keys))


def _parse_model(engine: str | None, flag: str) -> tuple[str, ModelSpec]:
    name, source = _name_and_source(flag)
    if not name or not source:
        raise ConfigError(f"expected NAME=SOURCE, a path, or a built-in name ({', '.join(BUILT_IN)})")
    if not MODEL_NAME.fullmatch(name):
        raise ConfigError(f"{name!r} is not a valid model name: give NAME=SOURCE")
    return name, model_from_flag(name, source, engine)


def _name_and_source(flag: str) -> tuple[str, str]:
    name, equals, source = flag.partition("=")
    # A path, a version or a hash may contain "=" too.
    is_named = equals and MODEL_NAME.fullmatch(name) and is_path(flag) and not Path(flag).exists()
    return (name, source) if is_named else (name_from_source(flag) or "", flag)


def _with_layout(model: ModelSpec, flag: str | None, default: str | None) -> ModelSpec:
    """Apply the flag or the default. `auto` is not copied to the models, so that it causes only one warning."""
    if model.engine != "llama" or (flag is None and ("layout" in model.options or default is None)):
        return model
    options = {key: value for key, value in model.options.items() if key != "layout"}
    layout = {"layout": "as-is"} if (flag or default) == "as-is" else {}
    return msgspec.structs.replace(model, options=options | layout)


def _parse_alias(flag: str) -> tuple[str, str]:
    pattern, _, name = flag.partition("=")
    if not name or not ALIAS_NAME.fullmatch(pattern):
        raise ConfigError("expected PATTERN=NAME, as in 'gpt-*=smollm2'")
    return pattern, name


class _Loader:
    """Reads the file and the flags, and collects their errors."""

    def __init__(self, file: ConfigFile, flags: Flags) -> None:
        self._file = file
        self._flags = flags
        self._errors: list[str] = []

    def add_error(self, message: str) -> None:
        self._errors.append(message)

    def raise_errors(self) -> None:
        errors = self._file.errors + self._errors
        if errors:
            raise ConfigError(*errors)

    def parse_flag(self, name: str, value: str | None, parse: Callable[[str], T]) -> T | None:
        if value is None:
            return None
        try:
            return parse(value)
        except ConfigError as error:
            self.add_error(f"{name} {value}: {error}")
            return None

    def parse_flags(self, name: str, values: Iterable[str], parse: Callable[[str], tuple[str, T]]) -> dict[str, T]:
        return dict(pair for value in values if (pair := self.parse_flag(name, value, parse)) is not None)

    def read_settings(self) -> Settings:
        """Read the settings of the file, except models and aliases."""
        file = self._file
        values = {name: value for name, value in file.values.items() if name not in ("models", "aliases")}
        values["memory"] = file.parse(values, "memory", parse_size)
        values["keep_alive"] = file.parse(values, "keep_alive", parse_duration)
        values["models_dir"] = self._read_models_dir()
        values = {name: value for name, value in values.items() if value is not None}
        settings = msgspec.convert(file.select_valid_section(values, Settings), Settings)
        for at, entry in enumerate(settings.proxies):
            try:
                parse_network(entry)
            except ConfigError as error:
                file.add_error(f"proxies[{at}]", str(error))
        for problem in find_invalid_text(settings):
            file.add_error(problem.key, problem.message)
        return self._resolve_paths(settings)

    def _resolve_paths(self, settings: Settings) -> Settings:
        def resolve(path: str | None) -> str | None:
            return None if path is None else resolve_path(path, self._file.directory)

        replace, keys, tls = msgspec.structs.replace, settings.keys, settings.tls
        jwt = None if keys.jwt is None else replace(keys.jwt, key_file=resolve(keys.jwt.key_file))
        return replace(
            settings,
            event_log=resolve(settings.event_log),
            socket=resolve(settings.socket),
            keys=replace(keys, store=resolve(keys.store), jwt=jwt),
            tls=None if tls is None else replace(tls, certificate=resolve(tls.certificate), key=resolve(tls.key)),
        )

    def read_tls_flags(self) -> Tls | None:
        certificate, key = self._flags.tls_certificate, self._flags.tls_key
        if certificate and key:
            return Tls(certificate, key)
        if certificate or key:
            self.add_error("--tls-certificate and --tls-key belong together: give both")
        return None

    def _read_models_dir(self) -> list[Any] | None:
        """The value may be one string instead of a list."""
        value = self._file.values.get("models_dir")
        if value is None or not isinstance(value, str | list):
            return value
        paths = [value] if isinstance(value, str) else value
        return [self._file.resolve_source(path) if isinstance(path, str) and path else path for path in paths]

    def read_aliases(self) -> dict[str, str]:
        aliases: dict[str, str] = {}
        for pattern, name in self._file.get_mapping(self._file.values, "aliases").items():
            other = next((other for other in aliases if other.lower() == pattern.lower()), None)
            if other is not None:
                self._file.add_error(f"aliases.{pattern}", f"differs from the alias {other} only in case")
            elif not ALIAS_NAME.fullmatch(pattern):
                self._file.add_error(
                    f"aliases.{pattern}", "an alias may contain only letters, digits and . _ - : / * ?"
                )
            elif self._file.convert(name, str, f"aliases.{pattern}") is not None:
                aliases[pattern] = name
        return aliases

    def check_names(self, settings: Settings, offered: Sequence[str], alias_flags: Mapping[str, str]) -> None:
        """Check that aliases, fallbacks and the default name existing models. Names are case-insensitive."""
        names = [*(name for model in settings.models for name in model.names), *offered]
        known = {name.lower() for name in names}

        def check(name: str) -> str | None:
            is_open = any(model.has(name) for model in settings.models)
            if is_open or name.lower() in known or name.lower() in list_names(settings.folders):
                return None
            return f"model {name!r} not found; models: {', '.join(names) or 'none'}"

        for pattern, name in settings.aliases.items():
            error = "a model has this name already" if pattern.lower() in known else check(name)
            if error is not None and pattern in alias_flags:
                self.add_error(f"--alias {pattern}={name}: {error}")
            elif error is not None:
                self._file.add_error(f"aliases.{pattern}", error)
        for model in settings.models:
            error = None if model.fallback is None else check(model.fallback) or _find_cycle(model, settings.models)
            if error is not None:
                self._file.add_error(f"models.{model.name}.fallback", error)
        error = None if settings.default is None else check(settings.default)
        if error is not None and self._flags.default:
            self.add_error(f"--default: {error}")
        elif error is not None:
            self._file.add_error("default", error)


def _find_cycle(model: ModelSpec, models: Sequence[ModelSpec]) -> str | None:
    """Return an error if the model's fallbacks lead back to it. Only the first model of a cycle reports it."""
    specs = {name.lower(): spec for spec in models for name in spec.names}
    path = [model]
    while (fallback := path[-1].fallback) is not None:
        following = specs.get(fallback.lower()) or next((spec for spec in models if spec.has(fallback)), None)
        if following is None or following in path[1:]:
            return None  # a model without an entry has no fallback; a cycle of other models is reported by them
        path.append(following)
        if following is model:
            first = next(spec for spec in models if spec in path)
            return f"fallback cycle: {' -> '.join(spec.name for spec in path)}" if first is model else None
    return None
