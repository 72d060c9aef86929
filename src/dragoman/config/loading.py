"""Loads the settings from the configuration file, the environment and the command-line flags.

    file     := --config, or $DRAGOMAN_CONFIG, or ./dragoman.yaml if there is one (JSON is YAML)
    models   := name: source
              | name: {engine: llama, source or path: SOURCE, sampling, keep_alive, fallback, ray,
                       ...the engine's own options}
    adapters := name: PATH | name: {path: PATH, scale: NUMBER}      an option of llama; each is a model too
    aliases  := pattern: name              `gpt-*: smollm2`
    default, models_dir, models_yaml, require_model, errors, reasoning_fields, memory, keep_alive, turn_seconds, layout,
    host, port, socket, api_keys, strict, event_log, record, hosts, proxies, limits, workers, grace_seconds,
    drain_seconds, protocols,
    storage  := ADDRESS | {address: ADDRESS, blobs: DIRECTORY, file_bytes: SIZE, principal_bytes: SIZE,
                             keep: {responses: TIME, ...}}
    prices   := {name or pattern of a model: {input, cached_input, output}}
    keys, budgets, telemetry, cors, tls    see `sections`

Rules
1. A flag overrides the environment, the environment overrides the file.
2. Without any configured model, the built-in model `smollm2` is served.
3. An error is one line with the file, the line and the key. Unknown keys are errors. All errors are reported together.
4. A relative path in a file is relative to the directory of that file.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import msgspec

from dragoman.config.aliases import AliasTable
from dragoman.config.config_file import ConfigFile, read_config_file, resolve_path
from dragoman.config.diagnostics import Locations, find_known_key
from dragoman.config.model_spec import MODEL_NAME, ModelSpec, model_from_flag, read_models
from dragoman.config.models_yaml import read_models_yaml
from dragoman.config.quantities import parse_duration, parse_finite_duration, parse_size
from dragoman.config.sections import MEMORY, POSTGRES, parse_network
from dragoman.config.settings import Settings
from dragoman.core.errors import ConfigError
from dragoman.engines import DEFAULT_ENGINE
from dragoman.files.discovery import Discovery, list_names
from dragoman.files.sources import BUILT_IN, home_directory, is_path, name_from_source

FILE_NAME = "dragoman.yaml"
DATABASE_FILE = "dragoman.db"
ALIAS_NAME = re.compile(r"(?!/)(?!.*\.\.)[A-Za-z0-9._:/*?-]+")
HOST = re.compile(r"[A-Za-z0-9._:%-]+")
HOST_NAME = re.compile(r"[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]")
ORIGIN = re.compile(rf"\*|null|[A-Za-z][A-Za-z0-9+.-]*://({HOST_NAME.pattern})(:[0-9]+)?/?")
STORAGE_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
HTTP_URL = re.compile(r"https?://[^/?#\s]+(/\S*)?")


class Flags(msgspec.Struct, frozen=True):
    """Values from the command line; None and empty mean that the flag is absent."""

    models: Sequence[str] = ()
    engine: str | None = None
    """The engine of all these models; None means that each source decides."""
    aliases: Sequence[str] = ()
    default: str | None = None
    models_dir: Sequence[str] = ()
    models_yaml: str | None = None
    require_model: bool = False
    memory: str | None = None
    keep_alive: str | None = None
    host: str | None = None
    port: int | None = None
    api_keys: Sequence[str] = ()
    strict: bool = False
    event_log: str | None = None
    record: str | None = None
    storage: str | None = None
    protocols: Sequence[str] = ()
    workers: int | None = None
    socket: str | None = None
    tls_certificate: str | None = None
    tls_key: str | None = None
    anonymous: bool = False
    layout: Literal["auto", "as-is"] | None = None
    """For models of the llama engine."""

    @property
    def settings(self) -> dict[str, Any]:
        """The values of flags that set one key of the configuration: those that have the name of a setting, and TLS."""
        names = set(Flags.__struct_fields__) & set(Settings.__struct_fields__) - {"models", "aliases"}
        given = {name: getattr(self, name) for name in names}
        settings = {name: value for name, value in given.items() if value or type(value) is int}
        tls = {"certificate": self.tls_certificate, "key": self.tls_key}
        return settings | ({"tls": tls} if any(tls.values()) else {})

    @property
    def by_key(self) -> dict[str, str]:
        """The flags as they were written, by the key that they set."""
        shown = {key: f"--{key.replace('_', '-')} {value}" for key, value in self.settings.items()}
        lists = {"models_dir": "--models-dir", "api_keys": "--api-key", "protocols": "--protocol"}
        lists["tls"] = "--tls-certificate and --tls-key"
        return (
            {key: lists.get(key, flag) for key, flag in shown.items()}
            | {f"models.{_name_and_source(flag)[0]}": f"--model {flag}" for flag in self.models}
            | {f"aliases.{flag.partition('=')[0]}": f"--alias {flag}" for flag in self.aliases}
        )


class LoadedConfig(msgspec.Struct, frozen=True):
    settings: Settings
    locations: Locations


def load_settings(path: str | None, flags: Flags, environ: Mapping[str, str]) -> Settings:
    return load(path, flags, environ).settings


def load(
    path: str | None, flags: Flags, environ: Mapping[str, str], *, offered: Sequence[str] | None = None
) -> LoadedConfig:
    """Load the configuration. `offered` are the models of engines that the caller passes, which need no entry; None if
    it passes none."""
    path = path or environ.get("DRAGOMAN_CONFIG") or (FILE_NAME if Path(FILE_NAME).is_file() else None)
    file = read_config_file(path, flags.by_key)
    models = read_models(file)
    for flag in flags.models:
        model = file.parse(flag, partial(_parse_model, flags.engine), f"--model {flag}")
        if model is not None:
            models[model.name] = model
    aliases = _read_aliases(file, flags)
    settings = _read_settings(file, flags, environ)
    if settings.models_yaml is not None:
        taken = {name.lower() for name in models}
        others = file.parse(settings.models_yaml, read_models_yaml, "models_yaml") or {}
        models |= {name: model for name, model in others.items() if name.lower() not in taken}
    models_dir = settings.models_dir
    if models_dir is None and offered is not None:
        # A caller that passes its own engine does not expect other models.
        models_dir = ()
    if not models and offered is None and not models_dir:
        models = {"smollm2": ModelSpec("smollm2", DEFAULT_ENGINE, "smollm2")}
    settings = msgspec.structs.replace(
        settings,
        models=tuple(
            model.with_layout(settings.layout)
            if flags.layout or (settings.layout and "layout" not in model.options)
            else model
            for model in models.values()
        ),
        aliases=aliases,
        models_dir=models_dir,
    )
    _check_names(file, settings, offered or ())
    file.raise_errors()
    return LoadedConfig(settings, file.locations)


def _parse_model(engine: str | None, flag: str) -> ModelSpec:
    name, source = _name_and_source(flag)
    if not name or not source:
        raise ConfigError(f"expected NAME=SOURCE, a path, or a built-in name ({', '.join(BUILT_IN)})")
    if not MODEL_NAME.fullmatch(name):
        raise ConfigError(f"{name!r} is not a valid model name: give NAME=SOURCE")
    return model_from_flag(name, source, engine)


def _name_and_source(flag: str) -> tuple[str, str]:
    name, equals, source = flag.partition("=")
    # A path, a version or a hash may contain "=" too.
    is_named = equals and MODEL_NAME.fullmatch(name) and is_path(flag) and not Path(flag).exists()
    return (name, source) if is_named else (name_from_source(flag) or "", flag)


def _read_settings(file: ConfigFile, flags: Flags, environ: Mapping[str, str]) -> Settings:
    """Read all settings except models and aliases."""
    values = {name: value for name, value in file.values.items() if name not in ("models", "aliases")}
    values |= flags.settings
    if flags.storage is not None and isinstance(file.values.get("storage"), dict):
        values["storage"] = file.values["storage"] | {"address": flags.storage}
    key = environ.get("DRAGOMAN_API_KEY")
    if key and not flags.api_keys:
        # The file may be used without the variable too, so its mistakes are reported.
        file.convert({"api_keys": values.get("api_keys", ())}, Settings, "")
        values["api_keys"] = [key]
    if flags.anonymous:
        values["keys"] = file.get_mapping(values, "keys") | {"anonymous": True}
    if isinstance(values.get("models_dir"), str):
        values["models_dir"] = [values["models_dir"]]
    values["storage"] = _read_storage(file, values.get("storage"))
    values["memory"] = file.parse(values.get("memory"), parse_size, "memory")
    values["keep_alive"] = file.parse(values.get("keep_alive"), parse_duration, "keep_alive")
    settings: Settings = file.convert(values, Settings, "")
    for at, entry in enumerate(settings.proxies):
        file.parse(entry, parse_network, f"proxies[{at}]")
    _check_texts(file, settings)
    return _resolve_paths(file, settings)


def default_address() -> str:
    """The file of the storage if the configuration names none."""
    return str(home_directory() / DATABASE_FILE)


def _read_storage(file: ConfigFile, value: Any) -> dict[str, Any]:
    """The section `storage`, or its address alone. Without an address it is a file in the home directory."""
    section = {"address": value} if isinstance(value, str) else file.get_mapping({"storage": value}, "storage")
    keep = file.get_mapping(section, "keep")
    times = {name: file.parse(time, parse_finite_duration, f"storage.keep.{name}") for name, time in keep.items()}
    names = ("file_bytes", "principal_bytes")
    sizes = {name: file.parse(section.get(name), parse_size, f"storage.{name}") for name in names}
    return {"address": default_address()} | section | sizes | {"keep": times}


def _check_texts(file: ConfigFile, settings: Settings) -> None:
    """Report strings that have the right type but the wrong form."""
    traces = settings.telemetry.traces
    host = "a name or an address to listen on, as 127.0.0.1"
    name = "a name without scheme, port and path, as llm.example or [::1]"
    origin = "an origin, as https://app.example or http://localhost:3000, or *"
    texts = [("host", settings.host, HOST, host)]
    texts += [(f"hosts[{at}]", text, HOST_NAME, name) for at, text in enumerate(settings.hosts or ())]
    texts += [(f"cors.origins[{at}]", text, ORIGIN, origin) for at, text in enumerate(settings.cors.origins)]
    if traces is not None:
        address = "an address, as http://127.0.0.1:4318/v1/traces"
        texts.append(("telemetry.traces.endpoint", traces.endpoint, HTTP_URL, address))
    if STORAGE_URL.match(settings.storage.address) and not settings.storage.address.startswith(POSTGRES):
        # The address may have a password.
        file.add_error("storage", f"expected {MEMORY}, a path, or {POSTGRES}USER:PASSWORD@HOST:PORT/NAME")
    for key, text, pattern, expected in texts:
        if not pattern.fullmatch(text):
            file.add_error(key, f"expected {expected}, got {text!r}")


def _resolve_paths(file: ConfigFile, settings: Settings) -> Settings:
    def resolve(key: str, path: str) -> str:
        return path if find_known_key(key, file.locations.flags) else resolve_path(path, file.directory)

    return _map_paths(settings, resolve)


def with_absolute_paths(settings: Settings) -> Settings:
    """Return the settings for a process with another working directory."""
    here = Path.cwd()
    settings = _map_paths(settings, lambda key, path: resolve_path(path, here))
    return msgspec.structs.replace(settings, models=tuple([model.resolve_paths(here) for model in settings.models]))


def _map_paths(settings: Settings, convert: Callable[[str, str], str]) -> Settings:
    """Convert the paths of all settings except those of the models. `convert` gets the key and the path."""

    def resolve(key: str, path: str | None) -> str | None:
        return None if path is None else convert(key, path)

    replace, keys, tls, folders = msgspec.structs.replace, settings.keys, settings.tls, settings.models_dir
    storage = settings.storage
    is_address = storage.address == MEMORY or storage.address.startswith(POSTGRES)
    jwt = None if keys.jwt is None else replace(keys.jwt, key_file=convert("keys", keys.jwt.key_file))
    return replace(
        settings,
        models_dir=None if folders is None else tuple([convert("models_dir", folder) for folder in folders]),
        models_yaml=resolve("models_yaml", settings.models_yaml),
        event_log=resolve("event_log", settings.event_log),
        record=resolve("record", settings.record),
        socket=resolve("socket", settings.socket),
        storage=replace(
            storage,
            address=storage.address if is_address else convert("storage", storage.address),
            blobs=resolve("storage", storage.blobs),
        ),
        keys=replace(keys, store=resolve("keys", keys.store), jwt=jwt),
        tls=tls and replace(tls, certificate=convert("tls", tls.certificate), key=convert("tls", tls.key)),
    )


def _read_aliases(file: ConfigFile, flags: Flags) -> dict[str, str]:
    """Read the aliases of the flags, then those of the file."""
    parsed = (file.parse(flag, _parse_alias, f"--alias {flag}") for flag in flags.aliases)
    given = dict(pair for pair in parsed if pair is not None)
    aliases: dict[str, str] = {}
    for pattern, name in file.get_mapping(file.values, "aliases").items():
        key = f"aliases.{pattern}"
        other = next((other for other in aliases if other.lower() == pattern.lower()), None)
        if other is not None:
            file.add_error(key, f"differs from the alias {other} only in case")
        elif not ALIAS_NAME.fullmatch(pattern):
            file.add_error(key, "an alias may contain only letters, digits and . _ - : / * ?")
        elif file.convert(name, str, key) is not None:
            aliases[pattern] = name
    return given | {pattern: name for pattern, name in aliases.items() if pattern not in given}


def _parse_alias(flag: str) -> tuple[str, str]:
    pattern, _, name = flag.partition("=")
    if not name or not ALIAS_NAME.fullmatch(pattern):
        raise ConfigError("expected PATTERN=NAME, as in 'gpt-*=smollm2'")
    return pattern, name


def _check_names(file: ConfigFile, settings: Settings, offered: Sequence[str]) -> None:
    """Check that aliases, fallbacks and the default name models that a request may name."""
    names = [*(name for model in settings.models for name in model.names), *offered]
    known = {name.lower() for name in names}

    table = AliasTable(settings.aliases)
    discovery = Discovery(settings.folders)

    def is_in_folder(name: str) -> bool:
        if name in list_names(settings.folders):
            return True
        if not discovery.found:
            discovery.scan()
        return discovery.resolve(name) is not None

    def find_error(name: str, aliases: tuple[str, ...] = ()) -> str | None:
        key = name.lower()
        if (
            key in known
            or key.removesuffix(":latest") in known
            or any(model.includes(name) for model in settings.models)
        ):
            return None
        if key in aliases:
            return f"alias cycle: {' -> '.join((*aliases, key))}"
        target = table.resolve(key)
        if target is not None and target.lower() != key:
            return find_error(target, (*aliases, key))
        if is_in_folder(key):
            return None
        return f"model {name!r} not found; models: {', '.join(names) or 'none'}"

    errors = {}
    for pattern, name in settings.aliases.items():
        is_taken = pattern.lower() in known
        errors[f"aliases.{pattern}"] = (
            "a model has this name already" if is_taken else find_error(name, (pattern.lower(),))
        )
    for model in settings.models:
        if model.fallback is not None:
            error = find_error(model.fallback) or _find_cycle(model, settings.models)
            errors[f"models.{model.name}.fallback"] = error
    if settings.default is not None:
        errors["default"] = find_error(settings.default)
    for key, error in errors.items():
        if error is not None:
            file.add_error(key, error)


def _find_cycle(model: ModelSpec, models: Sequence[ModelSpec]) -> str | None:
    """Return an error if the model's fallbacks lead back to it. Only the first model of a cycle reports it."""
    specs = {name.lower(): spec for spec in models for name in spec.names}
    path = [model]
    while (fallback := path[-1].fallback) is not None:
        following = specs.get(fallback.lower()) or next((spec for spec in models if spec.includes(fallback)), None)
        if following is None or following in path[1:]:
            return None  # a model without an entry has no fallback; a cycle of other models is reported by them
        path.append(following)
        if following is model:
            first = next(spec for spec in models if spec in path)
            return f"fallback cycle: {' -> '.join(spec.name for spec in path)}" if first is model else None
    return None
